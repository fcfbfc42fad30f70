"""Real processes through the executor's near end: tiny trainings, every fault, and the weights stay the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import select
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from carpool.core.errors import CarpoolError
from carpool.core.messages import (
    Assign,
    AssignApplied,
    Fact,
    JobFailed,
    JobFinished,
    Probe,
    ProgressReported,
    Release,
    ReleaseApplied,
)
from carpool.core.model import Allocation, JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.program import Program
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.executor.client import ExecutorClient, ExecutorOptions
from carpool.runtime.executor.reports import Facts, Gone, Outcome, Report, Told
from carpool.runtime.state.digest import digest
from carpool.runtime.worker.entry_loader import load_training
from carpool.testing.reference import plain_loop

T = TypeVar("T")
F = TypeVar("F", AssignApplied, ReleaseApplied, ProgressReported, JobFinished, JobFailed)
PATIENCE_S = 60.0
CORES = sorted(os.sched_getaffinity(0))
SINGLES = [LocalDevice(i, f"cpu:{i}", "cpu1", cores=(CORES[i % len(CORES)],)) for i in range(4)]
SEVERAL = LocalDevice(4, "cpu:4", "cpu3", cores=tuple(CORES * 3)[:3])  # as if there were so many
DEVICES = [*SINGLES, SEVERAL]

ENTRY = """
import dataclasses
import time
import torch
from torch import nn
from carpool import Stop, Training
from carpool.runtime.data.datasets import TensorData


def mean_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def tiny(epochs=4, rate=0.01, step_s=0.0):
    chance = torch.Generator().manual_seed(1)
    data = TensorData(torch.randn(100, 6, generator=chance), torch.randint(0, 3, (100,), generator=chance))
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    step = optimizer.step
    if step_s:  # not by a hook: an exact job with hooks keeps to one core
        optimizer.step = lambda: (step(), time.sleep(step_s))
    return Training(
        model=model, optimizer=optimizer, dataset=data, loss=mean_loss,
        batch_size=36, stop=Stop(epochs=epochs), evaluate=lambda model: {"norm": float(model[0].weight.norm())},
    )


def plain(epochs=4):
    made = tiny(epochs)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    return dataclasses.replace(made, model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.01))


class Noisy(TensorData):  # draws from the global generators
    def batch(self, indices):
        inputs, labels = super().batch(indices)
        return inputs + 0.1 * torch.randn_like(inputs), labels


def collate(rows):  # draws too
    inputs, labels = torch.utils.data.default_collate(rows)
    return inputs + 0.1 * torch.randn_like(inputs), labels


def noisy(by_batch):
    made = tiny(6, step_s=0.01)
    if by_batch:
        return dataclasses.replace(made, dataset=Noisy(*made.dataset.tensors))
    return dataclasses.replace(made, dataset=torch.utils.data.TensorDataset(*made.dataset.tensors), collate=collate)


def raises():
    return dataclasses.replace(tiny(), loss=lambda model, batch: 1 / 0)
"""


class Desk:
    """An executor, and everything it has reported."""

    def __init__(self, link: ExecutorClient, folder: Path, mark: str) -> None:
        self.link = link
        self.folder = folder
        self.mark = mark
        self.reports: list[Report] = []
        self.generations: dict[str, int] = {}

    @classmethod
    async def open(cls, folder: Path, **options: Any) -> Desk:
        (folder / "jobs.py").write_text(ENTRY, encoding="utf-8")
        mark = f"{os.getpid()}-{time.monotonic_ns()}"  # stands in the environment of all its processes
        environment = {"CARPOOL_TEST": mark}
        chosen = ExecutorOptions(hang_s=2.5, mirror_s=0.2, grace_s=0.5, environment=environment, **options)
        return cls(await ExecutorClient.start(DEVICES, folder / "state", options=chosen), folder, mark)

    def introduce(
        self, job: str, *, resume: bool = False, faults: list[dict[str, Any]] | None = None, **what: Any
    ) -> None:
        named = [{"job": job, "once": str(self.folder / f"{job}-{n}"), **fault} for n, fault in enumerate(faults or [])]
        chosen: dict[str, Any] = {"entry": "jobs.py:tiny", "folder": str(self.folder), "exact": True}
        chosen["environment"] = {"CARPOOL_FAULTS": json.dumps(named)}
        self.link.introduce(JobId(job), Program(**chosen | what), resume=resume)

    def assign(self, job: str, *devices: int, **share: Any) -> int:
        generation = self.generations[job] = self.generations.get(job, 0) + 1
        self.link.carry([Assign(JobId(job), Allocation.of(*devices, **share), generation)])
        return generation

    def release(self, job: str) -> int:
        generation = self.generations[job] = self.generations.get(job, 0) + 1
        self.link.carry([Release(JobId(job), generation)])
        return generation

    async def until(self, found: Callable[[], T | None]) -> T:
        """Receive until something is there; not for ever."""
        async with asyncio.timeout(PATIENCE_S):
            while (thing := found()) is None:
                report = await self.link.receive()
                self.reports.append(report)
                assert not isinstance(report, Gone), self.reports
        return thing

    def facts(self, job: str, kind: type[F]) -> list[F]:
        every = [fact for report in self.reports if isinstance(report, Facts) for fact in report.facts]
        return [fact for fact in every if isinstance(fact, kind) and fact.job == job]

    def story(self, job: str) -> str:
        return "\n".join(report.words for report in self.reports if isinstance(report, Told) and report.job == job)

    async def step(self, job: str, step: int) -> None:
        await self.until(lambda: next((f for f in self.facts(job, ProgressReported) if f.done >= step), None))

    async def applied(self, job: str, generation: int) -> AssignApplied:
        return await self.until(
            lambda: next((f for f in self.facts(job, AssignApplied) if f.generation == generation), None)
        )

    async def released(self, job: str, generation: int) -> ReleaseApplied:
        return await self.until(
            lambda: next((f for f in self.facts(job, ReleaseApplied) if f.generation == generation), None)
        )

    async def failed(self, job: str) -> JobFailed:
        return await self.until(lambda: next(iter(self.facts(job, JobFailed)), None))

    async def finished(self, job: str) -> Outcome:
        def end() -> Fact | None:
            return next(iter([*self.facts(job, JobFinished), *self.facts(job, JobFailed)]), None)

        ended = await self.until(end)
        assert isinstance(ended, JobFinished), (ended, self.story(job))
        return next(report for report in self.reports if isinstance(report, Outcome) and report.job == job)

    def processes(self) -> dict[int, str]:
        """The names of those that live, by pid."""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                with contextlib.suppress(OSError):
                    if f"CARPOOL_TEST={self.mark}\0".encode() in (folder / "environ").read_bytes():
                        found[int(folder.name)] = (folder / "comm").read_text().strip()
        return found

    def assert_nothing_left(self) -> None:
        """Wait for the end of what still lives; nothing else may be there then."""
        for pid, name in self.processes().items():
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                ended, _, _ = select.select([handle], [], [], PATIENCE_S)
                os.close(handle)
                assert ended, f"{name} ({pid}) goes on"
        assert self.processes() == {}

    def expected(self, *, shards: int | None = 8, **args: Any) -> str:
        return plain_loop(load_training("jobs.py:tiny", args, folder=self.folder), shards=shards).digest


Run = Callable[[Awaitable[T]], T]


@pytest.fixture(scope="module")
def desk(loop: asyncio.AbstractEventLoop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """One executor for all tests that do not end it; each uses jobs of its own."""
    made = loop.run_until_complete(Desk.open(tmp_path_factory.mktemp("executor")))
    yield made
    loop.run_until_complete(made.link.stop(checkpoint=False))
    assert isinstance(loop.run_until_complete(last(made)), Gone)
    made.assert_nothing_left()


async def last(desk: Desk) -> Report:
    async with asyncio.timeout(PATIENCE_S):
        while not isinstance(report := await desk.link.receive(), Gone):
            pass
    return report


@pytest.fixture
def run(loop: asyncio.AbstractEventLoop) -> Callable[[Any], Any]:
    return loop.run_until_complete


def test_alone_it_learns_what_a_plain_loop_learns(desk: Desk, run: Run[None]) -> None:
    async def go() -> None:
        desk.introduce("plain", exact=False)
        desk.introduce("exact")
        desk.assign("plain", 0)
        desk.assign("exact", 1)
        plain, exact = await desk.finished("plain"), await desk.finished("exact")
        assert (plain.digest, exact.digest) == (desk.expected(shards=None), desk.expected())
        assert (plain.steps, plain.epochs) == (12, 4)
        assert set(plain.metrics) == {"norm"}
        assert desk.facts("plain", AssignApplied) == [AssignApplied(JobId("plain"), 1, 0.0)]

    run(go())


def test_resized_at_random_steps_it_learns_the_same(desk: Desk, run: Run[None]) -> None:
    async def go() -> None:
        chance = random.Random(7)
        desk.introduce("elastic", args={"epochs": 40, "step_s": 0.005})
        step = 0
        for devices in ((0,), (0, 1), (2, 1, 3), (2,)):
            generation = desk.assign("elastic", *devices)
            applied = await desk.applied("elastic", generation)
            step = int(applied.done) + chance.randrange(1, 12)
            await desk.step("elastic", step)
        outcome = await desk.finished("elastic")
        assert outcome.digest == desk.expected(epochs=40)

    run(go())


@pytest.mark.parametrize("kind", ["kill", "stop", "memory"])
def test_a_fault_in_company_changes_nothing(desk: Desk, run: Run[None], kind: str) -> None:
    async def go() -> None:
        job, mate = f"struck-{kind}", f"mate-{kind}"
        desk.introduce(job, args={"epochs": 8}, faults=[{"step": 5, "kind": kind, "rank": 1}])
        desk.introduce(mate, exact=False, args={"epochs": 20}, faults=[{"step": 7, "kind": kind}])
        desk.assign(job, 0, 1)
        desk.assign(mate, 1)
        assert (await desk.finished(job)).digest == desk.expected(epochs=8)
        assert (await desk.finished(mate)).digest == desk.expected(shards=None, epochs=20)
        words = {"kill": "SIGKILL", "stop": "no sign of life", "memory": "ran out of memory"}[kind]
        assert words in desk.story(job)
        assert words in desk.story(mate)

    run(go())


def test_in_default_mode_a_killed_worker_is_replaced_and_the_bits_stay(desk: Desk, run: Run[None]) -> None:
    async def go() -> None:
        desk.introduce("calm", exact=False)
        desk.introduce(
            "rough", exact=False, faults=[{"step": 4, "kind": "kill", "rank": 0}, {"step": 8, "kind": "kill"}]
        )
        desk.assign("calm", 0, 1)
        desk.assign("rough", 2, 3)
        assert (await desk.finished("calm")).digest == (await desk.finished("rough")).digest

    run(go())


def test_a_lone_worker_that_dies_at_one_step_after_another_is_replaced_each_time(desk: Desk, run: Run[None]) -> None:
    """It speaks of its steps five times a second only: what it did since is read when it is dead."""

    async def go() -> None:
        faults = [{"step": step, "kind": "kill"} for step in (3, 4, 5, 8)]
        desk.introduce("unlucky", exact=False, faults=faults)
        desk.assign("unlucky", 0)
        assert (await desk.finished("unlucky")).digest == desk.expected(shards=None)
        words = [f"killed by SIGKILL) at step {step} and is replaced" for step in (3, 4, 5, 8)]
        assert [word in desk.story("unlucky") for word in words] == [True] * 4

    run(go())


def test_a_step_that_kills_its_worker_every_time_fails_the_job(desk: Desk, run: Run[None]) -> None:
    async def go() -> None:
        desk.introduce("deadly", exact=False, faults=[{"step": 5, "kind": "kill", "once": ""}])
        desk.assign("deadly", 0)
        assert "lost 3 times without completing step 6" in (await desk.failed("deadly")).error

    run(go())


def test_what_runs_out_of_memory_even_alone_is_made_in_micro_steps_whatever_else_happens(
    desk: Desk, run: Run[None]
) -> None:
    """Steps made again after a crash are split from the same step on: the weights are those of a run without it."""

    async def go() -> None:
        desk.introduce(
            "large",
            entry="jobs.py:plain",
            exact=False,
            faults=[{"step": 4, "kind": "memory", "above": 10, "once": ""}, {"step": 8, "kind": "kill"}],
        )
        desk.introduce("neighbour", exact=False, args={"epochs": 40})
        desk.assign("neighbour", 0)
        desk.assign("large", 0)
        trainer = Trainer(load_training("jobs.py:plain", {}, folder=desk.folder))
        trainer.limits = ((4, 18), (4, 9))
        assert [done.step for done in trainer.steps()][-1] == 12
        assert (await desk.finished("large")).digest == digest(trainer.training.model)
        assert "split into 4 micro-steps of 9 samples; rounding differs" in desk.story("large")
        assert (await desk.finished("neighbour")).digest == desk.expected(shards=None, epochs=40)

    run(go())


@pytest.mark.parametrize(("exact", "words"), [(True, "An exact job"), (False, "A batch-normalised job")])
def test_what_may_not_be_split_fails_and_says_what_to_do(desk: Desk, run: Run[None], exact: bool, words: str) -> None:
    async def go() -> None:
        job = f"too-large-{exact}"
        desk.introduce(job, exact=exact, faults=[{"step": 3, "kind": "memory", "above": 2, "once": ""}])
        desk.assign(job, 1)
        error = (await desk.failed(job)).error
        assert "step 4 of 36 samples needs more memory than cpu:1 has" in error
        assert words in error
        assert "lower batch_size (36)" in error

    run(go())


def test_a_probe_is_measured_and_the_job_goes_on(desk: Desk, run: Run[None]) -> None:
    """Its steps count like any others."""

    async def go() -> None:
        desk.introduce("probed", exact=False, args={"epochs": 10}, faults=[{"step": 20, "kind": "kill"}])
        desk.link.carry([Assign(JobId("probed"), Allocation.of(3), 1, Probe(6))])
        assert (await desk.finished("probed")).digest == desk.expected(shards=None, epochs=10)
        reports = desk.facts("probed", ProgressReported)
        assert reports[0].done == 12.0
        assert reports[0].rate > 0.0

    run(go())


@pytest.mark.parametrize("by_batch", [True, False], ids=["batch", "collate"])
def test_what_is_drawn_for_a_batch_is_the_same_wherever_a_shard_is_computed(
    desk: Desk, run: Run[None], by_batch: bool
) -> None:
    async def go() -> None:
        job, args = f"noisy-{by_batch}", {"by_batch": by_batch}
        desk.introduce(job, entry="jobs.py:noisy", args=args, faults=[{"step": 7, "kind": "kill"}])
        desk.assign(job, 1, 2)
        await desk.step(job, 3)
        desk.assign(job, 3, 1, 2)
        plain = plain_loop(load_training("jobs.py:noisy", args, folder=desk.folder), shards=8)
        assert (await desk.finished(job)).digest == plain.digest

    run(go())


def test_released_and_given_another_device_it_goes_on(desk: Desk, run: Run[None]) -> None:
    async def go() -> None:
        desk.introduce("moved", args={"epochs": 30, "step_s": 0.005})
        desk.assign("moved", 0, 1)
        await desk.step("moved", 3)
        released = await desk.released("moved", desk.release("moved"))
        assert released.done >= 3
        again = await desk.applied("moved", desk.assign("moved", 2))
        assert again.done == released.done
        assert (await desk.finished("moved")).digest == desk.expected(epochs=30)

    run(go())


def test_two_jobs_take_turns_on_one_device(desk: Desk, run: Run[None]) -> None:
    async def go() -> None:
        for job in ("first", "second"):
            desk.introduce(job, args={"epochs": 8})
        desk.assign("first", 0, 1, turn=0, fraction=0.5)
        desk.assign("second", 1, 0, turn=1, fraction=0.5)
        first, second = await desk.finished("first"), await desk.finished("second")
        assert first.digest == second.digest == desk.expected(epochs=8)

    run(go())


def test_jobs_over_a_memory_cap_take_turns_and_learn_what_they_learn_alone(run: Run[None], tmp_path: Path) -> None:
    """Each state takes a page of 2 MiB; there is room for two."""

    async def go() -> None:
        desk = await Desk.open(tmp_path, memory_cap=5 << 20, quantum_s=0.0)
        jobs = [f"capped-{n}" for n in range(4)]
        for job in jobs:
            desk.introduce(job, exact=False, args={"epochs": 12})
            desk.assign(job, 0, fraction=0.25)
        desk.introduce("wide", args={"epochs": 6})
        desk.assign("wide", 1, 0, fraction=0.25)
        assert {(await desk.finished(job)).digest for job in jobs} == {desk.expected(shards=None, epochs=12)}
        assert (await desk.finished("wide")).digest == desk.expected(epochs=6)
        hits = [re.search(r"came to (\d+) turns under the memory cap, (\d+) of", desk.story(job)) for job in jobs]
        assert any(found and int(found[1]) > int(found[2]) for found in hits), "somebody had to leave"
        await desk.link.stop(checkpoint=False)
        assert isinstance(await last(desk), Gone)

    run(go())


def test_faults_while_jobs_take_turns_leave_no_token_with_somebody_who_rests(desk: Desk, run: Run[None]) -> None:
    async def go() -> None:
        jobs = {f"turn-{n}": devices for n, devices in enumerate([(0, 1), (1, 0), (0,), (1,), (0, 1)])}
        for n, job in enumerate(jobs):
            faults = [{"step": step, "kind": kind} for step in (3, 7) for kind in ("memory", "kill")]
            desk.introduce(job, exact=n % 2 == 0, args={"epochs": 6}, faults=faults)
        for n, (job, devices) in enumerate(jobs.items()):
            desk.assign(job, *devices, turn=n % 2, fraction=0.2)
        ends = {job: (await desk.finished(job)).digest for job in jobs}
        assert {ends["turn-0"], ends["turn-2"], ends["turn-4"]} == {desk.expected(epochs=6)}
        assert ends["turn-3"] == desk.expected(shards=None, epochs=6)

    run(go())


def test_errors_of_the_users_fail_their_job_only(desk: Desk, run: Run[None]) -> None:
    async def go() -> None:
        desk.introduce("raises", entry="jobs.py:raises")
        desk.introduce("absent", entry="jobs.py:nothing")
        desk.introduce("diverges", args={"rate": 1e30})
        desk.introduce("fine", faults=[{"step": 2, "kind": "disk"}], checkpoint_s=0.0)
        for device, job in enumerate(("raises", "absent", "diverges", "fine")):
            desk.assign(job, device)
        assert "ZeroDivisionError" in (await desk.failed("raises")).error
        assert "nothing" in (await desk.failed("absent")).error
        assert "step" in (await desk.failed("diverges")).error
        assert (await desk.finished("fine")).digest == desk.expected()
        assert "nothing was saved" in desk.story("fine")

    run(go())


def test_a_command_is_placed_logged_released_and_begun_again(desk: Desk, run: Run[None]) -> None:
    async def go() -> None:
        names = ("OMP_NUM_THREADS", "CARPOOL_DEVICES", "CUDA_DEVICE_ORDER")
        script = f"import os; print(*[os.environ.get(name) for name in {names}], os.getcwd())"
        desk.introduce("script", entry="", command=("python", "-c", script))
        desk.introduce("exits", entry="", command=("sh", "-c", "echo oh >&2; exit 3"))
        desk.introduce("absent-program", entry="", command=("no-such-program",))
        hangs = "trap '' TERM; echo begun >> count; while [ ! -e go ]; do sleep 1000 & wait $!; done"
        desk.introduce("hangs", entry="", command=("sh", "-c", hangs))
        for job in ("script", "exits", "absent-program", "hangs"):
            desk.assign(job, 2)
        outcome = await desk.finished("script")
        assert outcome.digest is None
        log = desk.folder / "state" / "jobs" / "script" / "log"
        assert log.read_text() == f"1 cpu:2 PCI_BUS_ID {desk.folder}\n"  # GPUs have the numbers that they are listed by
        assert "exit code 3" in (await desk.failed("exits")).error
        assert "could not be started" in (await desk.failed("absent-program")).error
        await desk.released("hangs", desk.release("hangs"))
        assert "sleep" not in desk.processes().values()
        (desk.folder / "go").touch()
        desk.assign("hangs", 3)
        await desk.finished("hangs")
        assert (desk.folder / "count").read_text() == "begun\nbegun\n"

    run(go())


def test_orders_that_make_no_sense_are_answered(desk: Desk, run: Run[None]) -> None:
    async def go() -> None:
        desk.assign("stranger", 0)
        assert "introduced" in (await desk.failed("stranger")).error
        desk.introduce("../lost", args={"epochs": 1})
        desk.assign("../lost", 99)
        assert "device 99" in (await desk.failed("../lost")).error
        await desk.released("../lost", desk.release("../lost"))
        assert (desk.folder / "state" / "jobs" / "%2E.%2Flost").is_dir()

    run(go())


def test_a_dead_nursery_is_replaced(desk: Desk, run: Run[None]) -> None:
    async def go() -> None:
        desk.introduce("orphan", args={"epochs": 40, "step_s": 0.005})
        desk.assign("orphan", 0, 1)
        await desk.step("orphan", 3)
        (forkserver,) = [pid for pid, name in desk.processes().items() if name == "carpool-forksrv"]
        os.kill(forkserver, signal.SIGKILL)
        assert (await desk.finished("orphan")).digest == desk.expected(epochs=40)

    run(go())


def test_whoever_updates_the_parameters_the_weights_are_the_same(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    async def go() -> None:
        desk = await Desk.open(tmp_path, updates="even")
        desk.introduce("split", args={"epochs": 30, "step_s": 0.005}, faults=[{"step": 12, "kind": "kill", "rank": 1}])
        desk.assign("split", 0, 1, 2)
        await desk.step("split", 14)
        await desk.applied("split", desk.assign("split", 1, 3))
        outcome = await desk.finished("split")
        assert outcome.digest == desk.expected(epochs=30)
        assert "each device updates a part of the parameters for all: cpu:0" in desk.story("split")
        assert "SIGKILL" in desk.story("split")
        await desk.link.stop(checkpoint=False)
        assert isinstance(await last(desk), Gone)

    loop.run_until_complete(go())


def test_stopped_with_checkpoints_a_new_executor_goes_on_and_killed_it_leaves_nothing(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    async def go() -> None:
        desk = await Desk.open(tmp_path)
        desk.introduce("running", args={"epochs": 60, "step_s": 0.002})
        desk.introduce("parked", exact=False, args={"epochs": 100, "step_s": 0.002})
        desk.assign("running", 0, 1)
        desk.assign("parked", 2)
        await desk.step("parked", 2)
        await desk.released("parked", desk.release("parked"))
        await desk.step("running", 2)
        stopping = asyncio.create_task(desk.link.stop(checkpoint=True))
        assert isinstance(await last(desk), Gone)
        await stopping
        desk.assert_nothing_left()
        again = await Desk.open(tmp_path)
        again.generations = desk.generations
        again.introduce("running", args={"epochs": 60, "step_s": 0.002}, resume=True)
        again.introduce("parked", exact=False, args={"epochs": 100, "step_s": 0.002}, resume=True)
        applied = [
            await again.applied(job, again.assign(job, device)) for device, job in enumerate(["running", "parked"])
        ]
        assert [fact.done >= 2 for fact in applied] == [True, True]
        assert (await again.finished("parked")).digest == again.expected(shards=None, epochs=100)
        assert (await again.finished("running")).digest == again.expected(epochs=60)
        again.introduce("endless", args={"epochs": 100_000})
        again.introduce("sleeps", entry="", command=("sh", "-c", "setsid sleep 1000 & sleep 1000"))
        again.assign("endless", 0, 1)
        again.assign("sleeps", 2)
        await again.step("endless", 2)
        os.kill(again.link.pid, signal.SIGKILL)
        gone = await last(again)
        assert isinstance(gone, Gone)
        assert "SIGKILL" in gone.reason
        again.assert_nothing_left()

    loop.run_until_complete(go())


def test_an_executor_that_is_told_to_end_while_it_starts_has_nothing_to_say(
    tmp_path: Path, run: Run[None], capfd: pytest.CaptureFixture[str]
) -> None:
    def children(pid: int) -> list[int]:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    async def go() -> None:
        before = set(children(os.getpid()))
        starting = asyncio.create_task(ExecutorClient.start(DEVICES, tmp_path))
        async with asyncio.timeout(PATIENCE_S):
            # Nobody tells that its fork server imports torch now.
            while not (mine := set(children(os.getpid())) - before) or not children(*mine):  # noqa: ASYNC110
                await asyncio.sleep(0)
        os.kill(mine.pop(), signal.SIGTERM)
        with pytest.raises(CarpoolError, match="did not start: ended with exit code 0"):
            await starting

    run(go())
    assert capfd.readouterr().err == ""
