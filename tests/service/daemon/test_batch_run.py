"""The loop on a pretended machine: jobs end, fail, starve, are interrupted and resumed; nothing sleeps."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from carpool.backends.executors import ExecutorGone
from carpool.backends.profile_library import ProfileLibrary
from carpool.backends.run_folder import BELIEVED, PROFILE, RunFolder
from carpool.core.errors import InputError
from carpool.core.messages import Assign, Release
from carpool.core.model import JobId, JobSpec, Kind, Phase
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.core.topology import Placement
from carpool.jobs.devices import LocalDevice, parse_devices
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.policies.registry import parse_policy
from carpool.predictors.profiles.profile import read_profile
from carpool.runtime.executor.reports import Evaluation, Sized, Told
from carpool.service.daemon.batch_run import BatchRun, RunEnd, RunRequest
from carpool.service.store.journal_file import is_unfinished, read_journal_file, read_run_journal
from carpool.service.store.store import LOG
from tests.support.fake_executor import FakeExecutor

TWO = parse_devices("cpu:2", cores=(0, 1), gpus=())


def job(name: str, **more: object) -> ListedJob:
    """A job of one device, unless said otherwise."""
    return ListedJob(replace(JobSpec(JobId(name)), **more), Program(entry="train.py:main"))  # type: ignore[arg-type]


def asked(*jobs: ListedJob, policy: str = "fifo", devices: Sequence[LocalDevice] = TWO) -> RunRequest:
    return RunRequest("jobs", jobs, tuple(devices), policy, "0")


class PretendedRun(BatchRun):
    """A run on a pretended machine, which is also its clock."""

    machine: list[FakeExecutor]


def opened(request: RunRequest, folder: Path) -> PretendedRun:
    machine: list[FakeExecutor] = []

    async def start(devices: Sequence[LocalDevice], state: Path) -> FakeExecutor:
        return machine[0]

    run = PretendedRun.open(request, RunFolder(folder), start, lambda at, begun_at: machine[0])
    run.machine = machine
    return run


def go(run: PretendedRun, machine: FakeExecutor) -> RunEnd:
    run.machine.append(machine)
    try:
        return asyncio.run(run.run())
    finally:
        run.close()


def test_all_jobs_run_to_their_end(tmp_path: Path) -> None:
    run = opened(asked(job("a"), job("b"), job("c")), tmp_path / "run")
    machine = FakeExecutor({"a": 10, "b": 20, "c": 5})
    assert go(run, machine) is RunEnd.DONE
    accounts = run.accounting.accounts
    assert {name: account.jct_s for name, account in accounts.items()} == {"a": 10.0, "b": 20.0, "c": 15.0}
    assert accounts[JobId("c")].wait_s == 10.0
    assert [account.phase for account in accounts.values()] == [Phase.FINISHED] * 3
    assert machine.stopped == [False]
    assert run.metrics.summary().makespan_s == 20.0
    assert run.metrics.summary().utilisation == pytest.approx(35 / 40)


def test_everything_is_kept_in_the_folder(tmp_path: Path) -> None:
    run = opened(replace(asked(job("a")), journal=tmp_path / "copy.jsonl"), tmp_path / "run")
    machine = FakeExecutor({"a": 10})
    machine.at(4.0, lambda: machine.report_progress(loss=0.5))
    machine.at(5.0, lambda: machine.say(Evaluation(JobId("a"), 5, {"accuracy": 0.25})))
    machine.at(6.0, lambda: machine.say(Told(JobId("a"), "a worker died and was replaced")))
    go(run, machine)
    folder = tmp_path / "run" / "jobs" / "a"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == [
        {"schema": 1, "at_s": 4.0, "step": 4.0, "loss": 0.5, "steps_per_s": 1.0},
        {"schema": 1, "at_s": 5.0, "step": 5, "metrics": {"accuracy": 0.25}},
    ]
    (told,) = RunFolder(tmp_path / "run").rows(JobId("a"), "story.jsonl")
    assert told == {"schema": 1, "at_s": 6.0, "what": "a worker died and was replaced"}
    outcome = RunFolder(tmp_path / "run").outcome(JobId("a"))
    assert outcome is not None
    assert (outcome.steps, outcome.digest) == (10, "digest of a")
    header, records = read_journal_file(tmp_path / "copy.jsonl")
    stored_header, stored = read_run_journal(run.folder)
    assert header == stored_header
    assert records == [record for record in stored if record.facts or record.planned]
    assert RunFolder(tmp_path / "run").settings().jobs == run.request.jobs
    assert not is_unfinished(RunFolder(tmp_path / "run"))


def test_a_failed_job_leaves_the_others_alone(tmp_path: Path) -> None:
    jobs = (job("a"), job("b"), job("c", after=(JobId("a"),)))
    run = opened(asked(*jobs), tmp_path / "run")
    go(run, FakeExecutor({"a": 3, "b": 9, "c": 1}, fails={"a": "the loss is not a number"}))
    phases = {name: account.phase for name, account in run.accounting.accounts.items()}
    assert phases == {"a": Phase.FAILED, "b": Phase.FINISHED, "c": Phase.FAILED}
    assert run.accounting.accounts[JobId("a")].error == "the loss is not a number"
    assert "dependency 'a' failed" in run.accounting.accounts[JobId("c")].error


def test_elastic_jobs_take_over_what_becomes_free(tmp_path: Path) -> None:
    wide = {"min_devices": 1, "max_devices": 2}
    run = opened(asked(job("a", **wide), job("b", **wide), policy="afs"), tmp_path / "run")
    machine = FakeExecutor({"a": 10, "b": 30})
    go(run, machine)
    assert [account.jct_s for account in run.accounting.accounts.values()] == [10.0, 20.0]
    widths = [order.allocation.num_devices for order in machine.orders if isinstance(order, Assign)]
    assert widths == [1, 1, 2]


def test_lengths_and_rates_are_learned_from_reports(tmp_path: Path) -> None:
    run = opened(asked(job("a")), tmp_path / "run")
    machine = FakeExecutor({"a": 10})
    seen = []

    def look() -> None:
        held = run.scheduler.jobs[JobId("a")]
        seen.append((run.estimator.total(held.id), run.estimator.remaining(held, 4.0).mean))

    machine.at(4.0, machine.report_progress)
    machine.at(4.5, look)
    go(run, machine)
    assert seen == [(10.0, 6.0)]


def test_nothing_begins_when_it_is_interrupted_while_the_executor_starts(tmp_path: Path) -> None:
    async def start(devices: Sequence[LocalDevice], state: Path) -> FakeExecutor:
        run.interrupt()
        await asyncio.Event().wait()  # it would take for ever
        raise AssertionError

    run = BatchRun.open(asked(job("a")), RunFolder(tmp_path / "run"), start)
    assert asyncio.run(run.run()) is RunEnd.INTERRUPTED
    run.close()
    assert is_unfinished(RunFolder(tmp_path / "run"))
    again = opened(asked(job("a")), tmp_path / "run")
    assert go(again, FakeExecutor({"a": 10})) is RunEnd.DONE
    assert again.accounting.accounts[JobId("a")].phase is Phase.FINISHED


def test_an_executor_that_has_just_started_is_stopped_when_it_is_interrupted(tmp_path: Path) -> None:
    machine = FakeExecutor({"a": 10})

    async def start(devices: Sequence[LocalDevice], state: Path) -> FakeExecutor:
        asyncio.get_running_loop().call_soon(run.interrupt)  # after it has returned, before the run goes on
        return machine

    run = BatchRun.open(asked(job("a")), RunFolder(tmp_path / "run"), start, lambda at, begun_at: machine)
    assert asyncio.run(run.run()) is RunEnd.INTERRUPTED
    run.close()
    assert (machine.orders, machine.stopped) == ([], [False])


def test_who_cancels_a_run_while_it_starts_is_not_told_that_it_was_interrupted(tmp_path: Path) -> None:
    async def cancelled() -> RunEnd:
        going = asyncio.create_task(run.run())
        await began.wait()
        going.cancel()
        return await going

    began = asyncio.Event()

    async def start(devices: Sequence[LocalDevice], state: Path) -> FakeExecutor:
        began.set()
        await asyncio.Event().wait()
        raise AssertionError

    run = BatchRun.open(asked(job("a")), RunFolder(tmp_path / "run"), start)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    run.close()


class Never(Policy):
    """Gives nobody anything."""

    def plan(self, view: Snapshot) -> Plan:
        return Plan.NOTHING


def test_a_job_that_stops_at_a_loss_is_watched_for_it(tmp_path: Path) -> None:
    run = opened(asked(job("a")), tmp_path)
    machine = FakeExecutor({JobId("a"): 200})
    left: list[float] = []

    def report(at: float) -> None:
        machine.report_progress(loss=1.0 / (0.01 * at + 0.5) + 0.2)
        left.append(run.estimator.remaining(run.scheduler.jobs[JobId("a")], at).mean)

    machine.at(0.5, lambda: machine.say(Sized(JobId("a"), 200, target_loss=0.9)))
    for at in range(1, 31):
        machine.at(float(at), partial(report, float(at)))
    go(run, machine)
    assert left[3] == pytest.approx(197.0, abs=1.0)  # its steps
    assert left[-1] == pytest.approx(93.0 - 30.0, rel=0.15)  # 1/(0.01·93 + 0.5) + 0.2 = 0.9


def test_starved_jobs_fail_instead_of_waiting_for_ever(tmp_path: Path) -> None:
    run = opened(replace(asked(job("a")), find_policy=lambda text: Never()), tmp_path / "run")
    assert go(run, FakeExecutor({"a": 3})) is RunEnd.DONE
    assert run.accounting.accounts[JobId("a")].phase is Phase.FAILED
    assert "never assign" in run.accounting.accounts[JobId("a")].error


class Patient(Policy):
    """Waits five seconds before it gives a job anything."""

    def plan(self, view: Snapshot) -> Plan:
        if view.at < 5.0:
            return Plan((), "wait", wake_at=5.0)
        return parse_policy("fifo").plan(view)


def test_a_policy_is_woken_when_it_asked_to_be(tmp_path: Path) -> None:
    run = opened(replace(asked(job("a")), find_policy=lambda text: Patient()), tmp_path / "run")
    go(run, FakeExecutor({"a": 3}))
    assert run.accounting.accounts[JobId("a")].jct_s == 8.0


def test_a_dead_executor_is_our_fault_and_said(tmp_path: Path) -> None:
    run = opened(asked(job("a")), tmp_path / "run")
    machine = FakeExecutor({"a": 10})
    machine.at(4.0, machine.die)
    with pytest.raises(ExecutorGone, match="signal 9"):
        go(run, machine)
    assert is_unfinished(RunFolder(tmp_path / "run"))


# ------------------------------------------------------------------------------------------------ interrupt and resume
def interrupted(tmp_path: Path, *jobs: ListedJob, after_s: float = 12.0) -> FakeExecutor:
    """A run of a (10 steps), b (30) and c (8) that is interrupted on the way."""
    run = opened(asked(*jobs), tmp_path / "run")
    machine = FakeExecutor({"a": 10, "b": 30, "c": 8})
    machine.at(after_s, run.interrupt)
    assert go(run, machine) is RunEnd.INTERRUPTED
    assert machine.stopped == [True]
    assert is_unfinished(RunFolder(tmp_path / "run"))
    return machine


THREE = (job("a"), job("b"), job("c"))


def resumed(tmp_path: Path, before: FakeExecutor, request: RunRequest) -> tuple[PretendedRun, FakeExecutor]:
    run = opened(request, tmp_path / "run")
    machine = FakeExecutor({"a": 10, "b": 30, "c": 8, "d": 4}, start=run.scheduler.at, kept=before.kept)
    assert go(run, machine) is RunEnd.DONE
    return run, machine


def test_resume_goes_on_and_runs_finished_jobs_not_again(tmp_path: Path) -> None:
    before = interrupted(tmp_path, *THREE)
    assert before.kept == {"a": 10.0, "b": 12.0, "c": 2.0}
    run, machine = resumed(tmp_path, before, asked(*THREE))
    assert machine.introduced == {"b": True, "c": True}
    assert {order.job for order in machine.orders} == {"b", "c"}
    accounts = run.accounting.accounts
    assert {name: account.phase for name, account in accounts.items()} == dict.fromkeys("abc", Phase.FINISHED)
    outcome = accounts[JobId("a")].outcome
    assert outcome is not None
    assert outcome.digest == "digest of a"
    assert [round(account.jct_s or 0.0) for account in accounts.values()] == [10, 28, 16]  # 10 s is the last record
    _, records = read_run_journal(run.folder)
    assert [record.at for record in records] == sorted(record.at for record in records)


def test_resume_on_other_devices(tmp_path: Path) -> None:
    before = interrupted(tmp_path, *THREE)
    three = parse_devices("cpu:3", cores=(0, 1, 2), gpus=())
    run, machine = resumed(tmp_path, before, asked(*THREE, devices=three))
    assert [device.id for device in run.devices] == [2, 3, 4]
    used = {device for order in machine.orders if isinstance(order, Assign) for device in order.allocation.devices()}
    assert used <= {2, 3, 4}
    assert run.accounting.accounts[JobId("b")].phase is Phase.FINISHED


def test_resume_with_jobs_added_and_dropped(tmp_path: Path) -> None:
    before = interrupted(tmp_path, *THREE)
    run, machine = resumed(tmp_path, before, asked(job("b"), job("d")))
    phases = {name: account.phase for name, account in run.accounting.accounts.items()}
    assert phases == {"a": Phase.FINISHED, "b": Phase.FINISHED, "c": Phase.CANCELLED, "d": Phase.FINISHED}
    assert {order.job for order in machine.orders if isinstance(order, Assign)} == {"b", "d"}


def test_resume_refuses_a_job_that_was_changed(tmp_path: Path) -> None:
    interrupted(tmp_path, *THREE)
    other = ListedJob(THREE[1].spec, Program(entry="train.py:main", args={"lr": 1.0}))
    with pytest.raises(InputError, match="job 'b' was changed"):
        opened(asked(THREE[0], other, THREE[2]), tmp_path / "run")


def test_resume_after_a_kill_that_cut_the_journal(tmp_path: Path) -> None:
    before = interrupted(tmp_path, *THREE)
    log = tmp_path / "run" / LOG
    log.write_bytes(log.read_bytes() + b'01234567 01234567 99 {"rec')
    run, _ = resumed(tmp_path, before, asked(*THREE))
    assert run.accounting.accounts[JobId("b")].phase is Phase.FINISHED
    assert "middle of a line" in " ".join(run.notices)


def test_a_second_interrupt_does_not_wait_for_checkpoints(tmp_path: Path) -> None:
    class Slow(FakeExecutor):
        async def stop(self, *, checkpoint: bool) -> None:
            await super().stop(checkpoint=checkpoint)
            if checkpoint:
                await asyncio.Event().wait()

    run = opened(asked(job("a")), tmp_path / "run")
    machine = Slow({"a": 10})
    machine.at(3.0, run.interrupt)
    machine.at(4.0, run.interrupt)
    assert go(run, machine) is RunEnd.INTERRUPTED
    assert machine.stopped == [True, False]


def test_what_is_decided_while_stopping_is_not_carried_out(tmp_path: Path) -> None:
    class Finishing(FakeExecutor):
        async def stop(self, *, checkpoint: bool) -> None:
            self._finish(JobId("a"))
            for _ in range(20):
                await asyncio.sleep(0)
            await super().stop(checkpoint=checkpoint)

    run = opened(asked(job("a"), job("b"), job("c")), tmp_path / "run")
    machine = Finishing({"a": 10, "b": 10, "c": 10})
    machine.at(3.0, run.interrupt)
    assert go(run, machine) is RunEnd.INTERRUPTED
    assert run.accounting.accounts[JobId("a")].phase is Phase.FINISHED
    assert [order.job for order in machine.orders] == ["a", "b"]
    assert not any(isinstance(order, Release) for order in machine.orders)


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    first.hold()
    with pytest.raises(InputError, match="another run uses"):
        second.hold()
    first.let_go()
    second.hold()
    second.let_go()


def test_what_a_run_has_learned_is_what_the_next_one_begins_with(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def main(): ...\n")
    program = Program(entry="train.py:main", folder=str(tmp_path))
    jobs = (ListedJob(JobSpec(JobId("a"), model=program.entry), program),)

    def sit(name: str) -> PretendedRun:
        request = replace(asked(*jobs), profiles=ProfileLibrary(tmp_path).beliefs(jobs))
        run = opened(request, tmp_path / "runs" / name)
        machine = FakeExecutor({"a": 10}, batch=(8, 80))
        for at in (1.0, 3.0, 6.0):
            machine.at(at, machine.report_progress)
        assert go(run, machine) is RunEnd.DONE
        return run

    first = sit("first")
    assert not (first.folder.job("a") / BELIEVED).exists()
    learned = read_profile(first.folder.job("a") / PROFILE)
    (seen,) = learned.measurements
    assert (seen.steps, seen.step_s) == pytest.approx((5, 1.0))
    assert learned.costs == (0.0, None, 0.0)
    belief = ProfileLibrary(tmp_path).beliefs(jobs)[JobId("a")].rate(Placement(((Kind(TWO[0].kind), 1),)))
    assert belief is not None
    assert belief.rate.mean == pytest.approx(1.0)
    assert belief.basis == "measured"
    second = sit("second")
    assert read_profile(second.folder.job("a") / BELIEVED) == learned
    assert read_profile(second.folder.job("a") / PROFILE).measurements[0].steps == 10
