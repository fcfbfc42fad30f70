"""An executor with real processes: tiny trainings learn the same weights under resizes and faults."""

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
    JobCrashed,
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
from carpool.runtime.executor.job_folder import JobFolder
from carpool.runtime.executor.reports import Facts, Gone, HandedOver, Outcome, Report, Told
from carpool.runtime.state.digest import digest
from carpool.runtime.worker.entry_loader import load_training
from carpool.testing.reference import plain_loop

T = TypeVar("T")
F = TypeVar("F", AssignApplied, ReleaseApplied, ProgressReported, JobFinished, JobFailed, JobCrashed)
TIMEOUT_S = 60.0
CORES = sorted(os.sched_getaffinity(0))
SINGLES = [LocalDevice(i, f"cpu:{i}", "cpu1", cores=(CORES[i % len(CORES)],)) for i in range(4)]
SEVERAL = LocalDevice(4, "cpu:4", "cpu3", cores=tuple(CORES * 3)[:3])  # as if the machine had so many
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


def silent(epochs=4):  # nothing is saved but on demand
    return dataclasses.replace(tiny(epochs, step_s=0.005), evaluate=None)


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


class Rig:
    """An executor and its reports."""

    def __init__(self, link: ExecutorClient, folder: Path, mark: str) -> None:
        self.link = link
        self.folder = folder
        self.mark = mark
        self.reports: list[Report] = []
        self.generations: dict[str, int] = {}

    @classmethod
    async def open(cls, folder: Path, **options: Any) -> Rig:
        (folder / "jobs.py").write_text(ENTRY, encoding="utf-8")
        mark = f"{os.getpid()}-{time.monotonic_ns()}"  # in the environment of all its processes
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
        """Receive until something is found."""
        async with asyncio.timeout(TIMEOUT_S):
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

    async def handed_over(self, job: str) -> HandedOver:
        return await self.until(
            lambda: next((r for r in self.reports if isinstance(r, HandedOver) and r.job == job), None)
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
        """Names of live processes by pid."""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                with contextlib.suppress(OSError):
                    if f"CARPOOL_TEST={self.mark}\0".encode() in (folder / "environ").read_bytes():
                        found[int(folder.name)] = (folder / "comm").read_text().strip()
        return found

    def assert_nothing_left(self) -> None:
        """Wait until all processes have exited."""
        for pid, name in self.processes().items():
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                ended, _, _ = select.select([handle], [], [], TIMEOUT_S)
                os.close(handle)
                assert ended, f"{name} ({pid}) is still alive"
        assert self.processes() == {}

    def expected(self, *, shards: int | None = 8, **args: Any) -> str:
        return plain_loop(load_training("jobs.py:tiny", args, folder=self.folder), shards=shards).digest


Run = Callable[[Awaitable[T]], T]


@pytest.fixture(scope="module")
def rig(loop: asyncio.AbstractEventLoop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One executor for all tests that do not end it."""
    made = loop.run_until_complete(Rig.open(tmp_path_factory.mktemp("executor")))
    yield made
    loop.run_until_complete(made.link.stop(checkpoint=False))
    assert isinstance(loop.run_until_complete(last(made)), Gone)
    made.assert_nothing_left()


async def last(rig: Rig) -> Report:
    async with asyncio.timeout(TIMEOUT_S):
        while not isinstance(report := await rig.link.receive(), Gone):
            pass
    return report


@pytest.fixture
def run(loop: asyncio.AbstractEventLoop) -> Callable[[Any], Any]:
    return loop.run_until_complete


def test_a_single_worker_learns_what_a_plain_loop_learns(rig: Rig, run: Run[None]) -> None:
    async def go() -> None:
        rig.introduce("plain", exact=False)
        rig.introduce("exact")
        rig.assign("plain", 0)
        rig.assign("exact", 1)
        plain, exact = await rig.finished("plain"), await rig.finished("exact")
        assert (plain.digest, exact.digest) == (rig.expected(shards=None), rig.expected())
        assert (plain.steps, plain.epochs) == (12, 4)
        assert set(plain.metrics) == {"norm"}
        assert rig.facts("plain", AssignApplied) == [AssignApplied(JobId("plain"), 1, 0.0)]

    run(go())


def test_a_job_resized_at_random_steps_learns_the_same(rig: Rig, run: Run[None]) -> None:
    async def go() -> None:
        chance = random.Random(7)
        rig.introduce("elastic", args={"epochs": 40, "step_s": 0.005})
        step = 0
        for devices in ((0,), (0, 1), (2, 1, 3), (2,)):
            generation = rig.assign("elastic", *devices)
            applied = await rig.applied("elastic", generation)
            step = int(applied.done) + chance.randrange(1, 12)
            await rig.step("elastic", step)
        outcome = await rig.finished("elastic")
        assert outcome.digest == rig.expected(epochs=40)

    run(go())


@pytest.mark.parametrize("kind", ["kill", "stop", "memory"])
def test_a_fault_beside_another_job_changes_nothing(rig: Rig, run: Run[None], kind: str) -> None:
    async def go() -> None:
        job, mate = f"struck-{kind}", f"mate-{kind}"
        rig.introduce(job, args={"epochs": 8}, faults=[{"step": 5, "kind": kind, "rank": 1}])
        rig.introduce(mate, exact=False, args={"epochs": 20}, faults=[{"step": 7, "kind": kind}])
        rig.assign(job, 0, 1)
        rig.assign(mate, 1)
        assert (await rig.finished(job)).digest == rig.expected(epochs=8)
        assert (await rig.finished(mate)).digest == rig.expected(shards=None, epochs=20)
        fault = {"kill": "SIGKILL", "stop": "no heartbeat", "memory": "out of memory"}[kind]
        assert fault in rig.story(job)
        assert fault in rig.story(mate)

    run(go())


def test_in_default_mode_a_killed_worker_does_not_change_the_bits(rig: Rig, run: Run[None]) -> None:
    async def go() -> None:
        rig.introduce("calm", exact=False)
        rig.introduce(
            "rough", exact=False, faults=[{"step": 4, "kind": "kill", "rank": 0}, {"step": 8, "kind": "kill"}]
        )
        rig.assign("calm", 0, 1)
        rig.assign("rough", 2, 3)
        assert (await rig.finished("calm")).digest == (await rig.finished("rough")).digest

    run(go())


def test_a_worker_that_dies_at_different_steps_is_replaced_each_time(rig: Rig, run: Run[None]) -> None:
    """It reports its steps five times a second; the rest is read from its counter."""

    async def go() -> None:
        faults = [{"step": step, "kind": "kill"} for step in (3, 4, 5, 8)]
        rig.introduce("unlucky", exact=False, faults=faults)
        rig.assign("unlucky", 0)
        assert (await rig.finished("unlucky")).digest == rig.expected(shards=None)
        assert re.findall(r"SIGKILL\) at step (\d+)", rig.story("unlucky")) == ["3", "4", "5", "8"]

    run(go())


def test_a_step_that_kills_its_worker_every_time_fails_the_job(rig: Rig, run: Run[None]) -> None:
    async def go() -> None:
        rig.introduce("deadly", exact=False, faults=[{"step": 5, "kind": "kill", "once": ""}])
        rig.assign("deadly", 0)
        assert "3 times in step 6" in (await rig.failed("deadly")).error

    run(go())


def test_a_step_out_of_memory_with_exclusive_access_uses_micro_batches(rig: Rig, run: Run[None]) -> None:
    """Steps replayed after a crash are split from the same step on."""

    async def go() -> None:
        rig.introduce(
            "large",
            entry="jobs.py:plain",
            exact=False,
            faults=[{"step": 4, "kind": "memory", "above": 10, "once": ""}, {"step": 8, "kind": "kill"}],
        )
        rig.introduce("neighbour", exact=False, args={"epochs": 40})
        rig.assign("neighbour", 0)
        rig.assign("large", 0)
        trainer = Trainer(load_training("jobs.py:plain", {}, folder=rig.folder))
        trainer.limits = ((4, 18), (4, 9))
        assert [done.step for done in trainer.steps()][-1] == 12
        assert (await rig.finished("large")).digest == digest(trainer.training.model)
        assert "4 micro-batches of 9 samples" in rig.story("large")
        assert (await rig.finished("neighbour")).digest == rig.expected(shards=None, epochs=40)

    run(go())


@pytest.mark.parametrize(("exact", "reason"), [(True, "exact"), (False, "BatchNorm")])
def test_a_job_that_must_not_be_split_fails_with_a_way_out(rig: Rig, run: Run[None], exact: bool, reason: str) -> None:
    async def go() -> None:
        job = f"too-large-{exact}"
        rig.introduce(job, exact=exact, faults=[{"step": 3, "kind": "memory", "above": 2, "once": ""}])
        rig.assign(job, 1)
        error = (await rig.failed(job)).error
        assert all(part in error for part in ("step 4", "36 samples", "cpu:1", reason))
        assert "lower batch_size (36)" in error

    run(go())


def test_a_probe_is_measured_and_the_job_continues(rig: Rig, run: Run[None]) -> None:
    """Its steps count like any others."""

    async def go() -> None:
        rig.introduce("probed", exact=False, args={"epochs": 10}, faults=[{"step": 20, "kind": "kill"}])
        rig.link.carry([Assign(JobId("probed"), Allocation.of(3), 1, Probe(6))])
        assert (await rig.finished("probed")).digest == rig.expected(shards=None, epochs=10)
        reports = rig.facts("probed", ProgressReported)
        assert reports[0].done == 12.0
        assert reports[0].rate > 0.0

    run(go())


@pytest.mark.parametrize("by_batch", [True, False], ids=["batch", "collate"])
def test_random_numbers_of_a_batch_do_not_depend_on_the_device(rig: Rig, run: Run[None], by_batch: bool) -> None:
    async def go() -> None:
        job, args = f"noisy-{by_batch}", {"by_batch": by_batch}
        rig.introduce(job, entry="jobs.py:noisy", args=args, faults=[{"step": 7, "kind": "kill"}])
        rig.assign(job, 1, 2)
        await rig.step(job, 3)
        rig.assign(job, 3, 1, 2)
        plain = plain_loop(load_training("jobs.py:noisy", args, folder=rig.folder), shards=8)
        assert (await rig.finished(job)).digest == plain.digest

    run(go())


def test_a_released_job_continues_on_another_device(rig: Rig, run: Run[None]) -> None:
    async def go() -> None:
        rig.introduce("moved", args={"epochs": 30, "step_s": 0.005})
        rig.assign("moved", 0, 1)
        await rig.step("moved", 3)
        released = await rig.released("moved", rig.release("moved"))
        assert released.done >= 3
        again = await rig.applied("moved", rig.assign("moved", 2))
        assert again.done == released.done
        assert (await rig.finished("moved")).digest == rig.expected(epochs=30)

    run(go())


def test_two_jobs_are_time_sliced_on_one_device(rig: Rig, run: Run[None]) -> None:
    async def go() -> None:
        for job in ("first", "second"):
            rig.introduce(job, args={"epochs": 8})
        rig.assign("first", 0, 1, turn=0, fraction=0.5)
        rig.assign("second", 1, 0, turn=1, fraction=0.5)
        first, second = await rig.finished("first"), await rig.finished("second")
        assert first.digest == second.digest == rig.expected(epochs=8)

    run(go())


def test_jobs_under_a_memory_cap_learn_what_they_learn_alone(run: Run[None], tmp_path: Path) -> None:
    """Each state takes a page of 2 MiB; there is room for two."""

    async def go() -> None:
        rig = await Rig.open(tmp_path, memory_cap=5 << 20, quantum_s=0.0)
        jobs = [f"capped-{n}" for n in range(4)]
        for job in jobs:
            rig.introduce(job, exact=False, args={"epochs": 12})
            rig.assign(job, 0, fraction=0.25)
        rig.introduce("wide", args={"epochs": 6})
        rig.assign("wide", 1, 0, fraction=0.25)
        assert {(await rig.finished(job)).digest for job in jobs} == {rig.expected(shards=None, epochs=12)}
        assert (await rig.finished("wide")).digest == rig.expected(epochs=6)
        hits = [re.search(r"had (\d+) turns under the memory cap, (\d+) of", rig.story(job)) for job in jobs]
        assert any(found and int(found[1]) > int(found[2]) for found in hits), "a job was swapped out"
        await rig.link.stop(checkpoint=False)
        assert isinstance(await last(rig), Gone)

    run(go())


def test_faults_of_time_sliced_jobs_block_no_turn(rig: Rig, run: Run[None]) -> None:
    async def go() -> None:
        jobs = {f"turn-{n}": devices for n, devices in enumerate([(0, 1), (1, 0), (0,), (1,), (0, 1)])}
        for n, job in enumerate(jobs):
            faults = [{"step": step, "kind": kind} for step in (3, 7) for kind in ("memory", "kill")]
            rig.introduce(job, exact=n % 2 == 0, args={"epochs": 6}, faults=faults)
        for n, (job, devices) in enumerate(jobs.items()):
            rig.assign(job, *devices, turn=n % 2, fraction=0.2)
        ends = {job: (await rig.finished(job)).digest for job in jobs}
        assert {ends["turn-0"], ends["turn-2"], ends["turn-4"]} == {rig.expected(epochs=6)}
        assert ends["turn-3"] == rig.expected(shards=None, epochs=6)

    run(go())


def test_user_errors_fail_only_their_job(rig: Rig, run: Run[None]) -> None:
    async def go() -> None:
        rig.introduce("raises", entry="jobs.py:raises")
        rig.introduce("absent", entry="jobs.py:nothing")
        rig.introduce("diverges", args={"rate": 1e30})
        rig.introduce("fine", faults=[{"step": 2, "kind": "disk"}], checkpoint_s=0.0)
        for device, job in enumerate(("raises", "absent", "diverges", "fine")):
            rig.assign(job, device)
        assert "ZeroDivisionError" in (await rig.failed("raises")).error
        assert "nothing" in (await rig.failed("absent")).error
        assert "step" in (await rig.failed("diverges")).error
        assert (await rig.finished("fine")).digest == rig.expected()
        assert "saving the state failed" in rig.story("fine")

    run(go())


def test_a_command_is_placed_logged_released_and_started_again(rig: Rig, run: Run[None]) -> None:
    async def go() -> None:
        names = ("OMP_NUM_THREADS", "CARPOOL_DEVICES", "CUDA_DEVICE_ORDER")
        script = f"import os; print(*[os.environ.get(name) for name in {names}], os.getcwd())"
        rig.introduce("script", entry="", command=("python", "-c", script))
        rig.introduce("exits", entry="", command=("sh", "-c", "echo oh >&2; exit 3"))
        rig.introduce("absent-program", entry="", command=("no-such-program",))
        hangs = "trap '' TERM; echo begun >> count; while [ ! -e go ]; do sleep 1000 & wait $!; done"
        rig.introduce("hangs", entry="", command=("sh", "-c", hangs), resumable=True)
        for job in ("script", "exits", "absent-program", "hangs"):
            rig.assign(job, 2)
        outcome = await rig.finished("script")
        assert outcome.digest is None
        log = rig.folder / "state" / "jobs" / "script" / "log"
        assert log.read_text() == f"1 cpu:2 PCI_BUS_ID {rig.folder}\n"
        assert "exit code 3" in (await rig.failed("exits")).error
        assert "could not be started" in (await rig.failed("absent-program")).error
        await rig.released("hangs", rig.release("hangs"))
        assert "sleep" not in rig.processes().values()
        (rig.folder / "go").touch()
        rig.assign("hangs", 3)
        await rig.finished("hangs")
        assert (rig.folder / "count").read_text() == "begun\nbegun\n"

    run(go())


def test_a_released_command_is_stopped_whole_and_continues_on_another_device(rig: Rig, run: Run[None]) -> None:
    counts = "import counting"
    (rig.folder / "counting.py").write_text(
        "import os, multiprocessing, pathlib, time\n"
        "def work(mine):\n"
        "    while not pathlib.Path('counted').exists():\n"
        "        mine.value += 1\n"
        "if True:\n"
        "    context = multiprocessing.get_context('fork')\n"
        "    mine = context.Value('q')\n"
        "    child = context.Process(target=work, args=(mine,))\n"
        "    child.start()\n"
        "    while mine.value < 10: pass\n"
        "    pathlib.Path('pid').write_text(str(child.pid))\n"
        "    child.join()\n"
        "    print('cores', *os.sched_getaffinity(0), 'starts once')\n"
    )

    def state_of(pid: int) -> str:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    async def go() -> None:
        rig.introduce("counts", entry="", command=("python", "-c", counts))
        rig.assign("counts", 0)
        while not (written := rig.folder / "pid").exists() or not written.read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        child = int(written.read_text())
        await rig.released("counts", rig.release("counts"))
        assert state_of(child) == "T"
        (rig.folder / "counted").touch()
        await rig.applied("counts", rig.assign("counts", 1))
        await rig.finished("counts")
        log = (rig.folder / "state" / "jobs" / "counts" / "log").read_text()
        assert log == f"cores {DEVICES[1].cores[0]} starts once\n"
        assert "parked" in rig.story("counts")

    run(go())


def test_a_parked_command_that_is_stopped_leaves_nothing(rig: Rig, run: Run[None]) -> None:
    async def go() -> None:
        rig.introduce("sleeps", entry="", command=("sh", "-c", "touch begun; setsid sleep 1000 & sleep 1000"))
        rig.assign("sleeps", 0)
        while not (rig.folder / "begun").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await rig.released("sleeps", rig.release("sleeps"))
        rig.link.forget(JobId("sleeps"))
        while "sleep" in rig.processes().values():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    run(go())


def test_an_order_for_an_unknown_job_fails_it_and_one_for_a_foreign_device_does_not(rig: Rig, run: Run[None]) -> None:
    async def go() -> None:
        rig.assign("stranger", 0)
        assert "unknown job" in (await rig.failed("stranger")).error
        rig.introduce("../lost", args={"epochs": 1})
        rig.assign("../lost", 99)
        crash = await rig.until(lambda: next(iter(rig.facts("../lost", JobCrashed)), None))
        assert "device 99" in crash.error
        assert not rig.facts("../lost", JobFailed)
        await rig.released("../lost", rig.release("../lost"))
        assert (rig.folder / "state" / "jobs" / "%2E.%2Flost").is_dir()

    run(go())


@pytest.mark.parametrize("kind", ["", "stop_in_save", "kill_in_save"])
def test_a_job_that_is_handed_over_continues_from_its_state_on_disk(rig: Rig, run: Run[None], kind: str) -> None:
    job = f"moved-{kind}"
    program: dict[str, Any] = {"entry": "jobs.py:silent", "args": {"epochs": 100_000}, "checkpoint_s": 3600.0}

    async def go() -> None:
        rig.introduce(job, **program, faults=[{"step": 0, "kind": kind}] if kind else [])
        rig.assign(job, 0)
        await rig.step(job, 100)  # a mirror is written before that
        rig.link.hand_over(JobId(job))
        done = await rig.handed_over(job)
        on_disk = [copy.step for copy in JobFolder(rig.folder / "state", job).state_copies()]
        assert done.steps == max(on_disk, default=0)
        assert done.steps >= 100 or kind
        rig.introduce(job, **program, resume=True)
        assert (await rig.applied(job, rig.assign(job, 1))).done == done.steps
        rig.link.forget(JobId(job))

    run(go())


def test_a_job_that_was_handed_over_ends_with_the_weights_of_a_plain_loop(rig: Rig, run: Run[None]) -> None:
    async def go() -> None:
        rig.introduce("continued", args={"epochs": 40, "step_s": 0.005})
        rig.assign("continued", 0)
        await rig.step("continued", 1)
        rig.link.hand_over(JobId("continued"))
        await rig.handed_over("continued")
        if not rig.facts("continued", JobFinished):  # it may have ended before
            rig.introduce("continued", args={"epochs": 40, "step_s": 0.005}, resume=True)
            rig.assign("continued", 1)
        assert (await rig.finished("continued")).digest == rig.expected(epochs=40)

    run(go())


def test_a_dead_fork_server_is_replaced(rig: Rig, run: Run[None]) -> None:
    async def go() -> None:
        rig.introduce("orphan", args={"epochs": 40, "step_s": 0.005})
        rig.assign("orphan", 0, 1)
        await rig.step("orphan", 3)
        (forkserver,) = [pid for pid, name in rig.processes().items() if name == "carpool-forksrv"]
        os.kill(forkserver, signal.SIGKILL)
        assert (await rig.finished("orphan")).digest == rig.expected(epochs=40)

    run(go())


def test_update_sharding_does_not_change_the_weights(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    async def go() -> None:
        rig = await Rig.open(tmp_path, updates="even")
        rig.introduce("split", args={"epochs": 30, "step_s": 0.005}, faults=[{"step": 12, "kind": "kill", "rank": 1}])
        rig.assign("split", 0, 1, 2)
        await rig.step("split", 14)
        await rig.applied("split", rig.assign("split", 1, 3))
        outcome = await rig.finished("split")
        assert outcome.digest == rig.expected(epochs=30)
        assert "share of the parameters: cpu:0" in rig.story("split")
        assert "SIGKILL" in rig.story("split")
        await rig.link.stop(checkpoint=False)
        assert isinstance(await last(rig), Gone)

    loop.run_until_complete(go())


def test_an_executor_that_stops_takes_no_more_jobs(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    async def go() -> None:
        rig = await Rig.open(tmp_path)
        rig.introduce("running", args={"epochs": 60, "step_s": 0.002})
        rig.assign("running", 0)
        await rig.step("running", 2)
        stopping = asyncio.create_task(rig.link.stop(checkpoint=True))
        await asyncio.sleep(0)  # it is sent
        rig.introduce("late", args={"epochs": 1})
        rig.introduce("program", entry="", command=("true",))
        rig.assign("late", 1)
        rig.assign("program", 2)
        async with asyncio.timeout(TIMEOUT_S):
            while not isinstance(report := await rig.link.receive(), Gone):
                rig.reports.append(report)
        await stopping
        about = [fact for each in rig.reports if isinstance(each, Facts) for fact in each.facts]
        assert {getattr(fact, "job", "") for fact in about} == {"running"}, "the scheduler places the others again"
        rig.assert_nothing_left()

    loop.run_until_complete(go())


def test_a_stopped_executor_can_be_resumed_and_a_killed_one_leaves_no_process(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    async def go() -> None:
        rig = await Rig.open(tmp_path)
        rig.introduce("running", args={"epochs": 60, "step_s": 0.002})
        rig.introduce("parked", exact=False, args={"epochs": 100, "step_s": 0.002})
        rig.assign("running", 0, 1)
        rig.assign("parked", 2)
        await rig.step("parked", 2)
        await rig.released("parked", rig.release("parked"))
        await rig.step("running", 2)
        stopping = asyncio.create_task(rig.link.stop(checkpoint=True))
        assert isinstance(await last(rig), Gone)
        await stopping
        rig.assert_nothing_left()
        again = await Rig.open(tmp_path)
        again.generations = rig.generations
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


def test_an_executor_terminated_while_it_starts_prints_nothing(
    tmp_path: Path, run: Run[None], capfd: pytest.CaptureFixture[str]
) -> None:
    def children(pid: int) -> list[int]:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    async def go() -> None:
        before = set(children(os.getpid()))
        starting = asyncio.create_task(ExecutorClient.start(DEVICES, tmp_path))
        async with asyncio.timeout(TIMEOUT_S):
            # There is no event for the start of its fork server.
            while not (mine := set(children(os.getpid())) - before) or not children(*mine):  # noqa: ASYNC110
                await asyncio.sleep(0)
        os.kill(mine.pop(), signal.SIGTERM)
        with pytest.raises(CarpoolError, match=r"did not start: (killed by signal SIGTERM|ended with exit code 0)"):
            await starting

    run(go())
    assert capfd.readouterr().err == ""
