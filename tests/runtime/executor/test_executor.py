"""Turns, lanes and faults in an executor with fake processes."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from carpool.core.messages import (
    Assign,
    AssignApplied,
    JobFailed,
    OutsidersSeen,
    ProgressReported,
    Release,
    ReleaseApplied,
)
from carpool.core.model import Allocation, JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.nvml import GpuProcess
from carpool.jobs.program import Program
from carpool.runtime.executor.client_protocol import ExecutorOptions
from carpool.runtime.executor.executor import Executor
from carpool.runtime.executor.reports import Facts, Report, Sized, Told
from carpool.runtime.executor.training_workers import ExecutorDependencies
from carpool.runtime.memory.oom_kills import OomKills
from carpool.runtime.process.launch import Launched
from carpool.runtime.process.protocol import (
    AdmissionRequested,
    Begin,
    CheckEntry,
    Contributed,
    EntryChecked,
    Grant,
    Halted,
    Loaded,
    MemoryMeasured,
    Message,
    Prewarm,
    Prewarmed,
    Proceed,
    Published,
    Ready,
    Stepped,
    SwapOut,
    SwappedOut,
    TurnEnded,
    TurnEnding,
    TurnRequested,
    WorkerFailed,
)
from carpool.runtime.process.worker_pool import WorkerKey, WorkerPool
from carpool.runtime.sharing.device_handoff import DeviceHandoff
from carpool.runtime.sharing.foreign_processes import INTERVAL_S, ListProcesses
from carpool.runtime.sharing.mps_daemon import MpsDaemon

READY = Ready("digest", contribution_bytes=64, batch_size=8, total_steps=9, num_samples=80)
DEVICES = [LocalDevice(i, f"cpu:{i}", "cpu1", cores=(i,)) for i in range(2)]


def close_files(executor: Executor) -> None:
    """Close the descriptors of an executor that has no processes."""
    for training in executor.jobs.trainings.values():
        training.close()
    executor.workers.arbiter.close()


class FakePool(WorkerPool):
    """Records launches and messages."""

    def __init__(self) -> None:
        self.launched: list[WorkerKey] = []
        self.killed: list[WorkerKey] = []
        self.environments: dict[WorkerKey, dict[str, str]] = {}
        self.places: dict[WorkerKey, tuple[tuple[int, ...], int]] = {}  # cores and threads
        self.lane_bytes: dict[WorkerKey, int] = {}
        self.sent: list[tuple[WorkerKey, Message]] = []
        self.prewarmed: dict[WorkerKey, dict[str, str]] = {}
        self.assigned: dict[WorkerKey, WorkerKey] = {}
        self.checks: dict[str, asyncio.Future[WorkerKey]] = {}  # by job, to wait for

    is_ready = True

    def begin(self, launched: Launched | None = None) -> None:
        pass

    async def ready(self) -> None:
        pass

    def check(self, key: WorkerKey, request: CheckEntry) -> None:
        self.checks[request.job].set_result(key)

    def prewarm(self, key: WorkerKey, prewarm: Prewarm) -> None:
        self.prewarmed[key] = dict(prewarm.environment)

    def assign(self, prewarmed: WorkerKey, key: WorkerKey, begin: Begin, log: int, *fds: int) -> None:
        self.assigned[prewarmed] = key
        self.launch(key, begin, log, *fds)

    def without_heartbeat(self, seconds: float) -> list[WorkerKey]:
        return []

    def launch(self, key: WorkerKey, begin: Begin, log: int, *fds: int) -> None:
        self.launched.append(key)
        self.environments[key] = dict(begin.environment)
        self.places[key] = begin.cores, begin.threads
        self.lane_bytes[key] = begin.lane_bytes

    def kill(self, key: WorkerKey) -> None:
        self.killed.append(key)

    def send(self, key: WorkerKey, message: Message, fds: tuple[int, ...] = ()) -> None:
        self.sent.append((key, message))

    def granted(self) -> list[WorkerKey]:
        return [key for key, message in self.sent if isinstance(message, Grant)]

    def dependencies(
        self, clock: Callable[[], float] = lambda: 0.0, list_processes: ListProcesses | None = None
    ) -> ExecutorDependencies:
        """Dependencies of an executor with this pool."""
        return ExecutorDependencies(clock, lambda *_: self, list_processes=list_processes)


def test_a_worker_that_halts_while_it_waits_for_a_turn_is_skipped(tmp_path: Path) -> None:
    pool = FakePool()
    executor = Executor(DEVICES, tmp_path, ExecutorOptions(), lambda report: None, pool.dependencies())
    for job in ("a", "b"):
        executor.add_job(JobId(job), Program(entry="jobs.py:tiny"), resume=False)
    executor.apply_orders([Assign(JobId(job), Allocation.of(0, 1), 1) for job in ("a", "b")])
    a0, a1, b0, b1 = pool.launched
    for key in (a0, a1, b0, b1):
        executor.workers.on_message(key, READY)
    epoch = next(message.epoch for key, message in pool.sent if key == b0 and isinstance(message, Proceed))
    executor.workers.on_message(b0, TurnRequested(0))
    executor.workers.on_message(a0, TurnRequested(0))
    executor.workers.on_exit(a1, "killed by SIGKILL")
    executor.workers.on_message(a0, Halted(0))
    executor.workers.on_message(b0, Contributed(epoch, 0, 0.01, 4))
    executor.workers.on_message(b0, TurnRequested(1))
    assert pool.granted() == [b0, b0]


def test_a_worker_that_the_kernel_killed_for_memory_says_so(tmp_path: Path) -> None:
    class Kills(OomKills):
        def claim(self) -> str:
            return "out of memory: the limit is 2 GiB"

    pool, reports = FakePool(), list[Report]()
    outside = replace(pool.dependencies(), make_oom_kills=Kills)
    executor = Executor(DEVICES, tmp_path, ExecutorOptions(), reports.append, outside)
    executor.add_job(JobId("a"), Program(entry="jobs.py:tiny"), resume=False)
    executor.apply_orders([Assign(JobId("a"), Allocation.of(0), 1)])
    (key,) = pool.launched
    executor.workers.on_message(key, READY)
    executor.workers.on_exit(key, "killed by SIGKILL")
    told = [report.words for report in reports if isinstance(report, Told)]
    assert [words for words in told if "died (killed by SIGKILL, out of memory: the limit is 2 GiB)" in words]
    close_files(executor)


def test_the_next_turn_is_granted_during_the_last_step_and_an_exit_ends_a_turn(tmp_path: Path) -> None:
    pool = FakePool()
    executor = Executor(DEVICES, tmp_path, ExecutorOptions(), lambda report: None, pool.dependencies())
    for job in ("a", "b"):
        executor.add_job(JobId(job), Program(entry="jobs.py:tiny"), resume=False)
    executor.apply_orders([Assign(JobId(job), Allocation.of(0, fraction=0.5), 1) for job in ("a", "b")])
    a, b = pool.launched
    for key in (a, b):
        executor.workers.on_message(key, READY)
        executor.workers.on_message(key, TurnRequested(0))
    executor.workers.on_message(a, TurnEnding(1))
    assert [message for key, message in pool.sent if isinstance(message, Grant)] == [Grant(1, 1, 0), Grant(1, 2, 1)]
    handoff = DeviceHandoff(*executor.workers.arbiter.handoff_descriptors(0))
    assert not handoff.has_reached(1)
    executor.workers.on_exit(a, "killed by SIGKILL")
    assert handoff.has_reached(1)
    handoff.close()


def test_under_a_memory_cap_a_grant_waits_until_another_job_is_swapped_out(tmp_path: Path) -> None:
    pool = FakePool()
    options, clock = ExecutorOptions(memory_cap=100), itertools.count()
    executor = Executor(DEVICES, tmp_path, options, lambda report: None, pool.dependencies(lambda: float(next(clock))))
    for job in ("a", "b"):
        executor.add_job(JobId(job), Program(entry="jobs.py:tiny"), resume=False)
    executor.apply_orders([Assign(JobId(job), Allocation.of(0, fraction=0.5), 1) for job in ("a", "b")])
    a, b = pool.launched
    executor.workers.on_message(a, AdmissionRequested())
    executor.workers.on_message(b, AdmissionRequested())
    executor.workers.on_message(a, READY)
    executor.workers.on_message(a, TurnEnding(1))
    sent = [(key, message) for key, message in pool.sent if not isinstance(message, Proceed)]
    assert sent == [(a, Grant(16, 1, 0, free_bytes=100)), (a, SwapOut(wholly=True))]
    executor.workers.on_message(a, MemoryMeasured(60, 0, 10))
    executor.workers.on_message(a, TurnEnded(1))
    executor.workers.on_message(a, SwappedOut(wholly=True))
    assert pool.sent[-1] == (b, Grant(16, 2, 1, free_bytes=90))


def test_reports_say_which_portion_of_a_step_each_device_computes(tmp_path: Path) -> None:
    pool, reports, now = FakePool(), list[Report](), [0.0]
    executor = Executor(DEVICES, tmp_path, ExecutorOptions(), reports.append, pool.dependencies(lambda: now[0]))
    executor.add_job(JobId("a"), Program(entry="jobs.py:tiny"), resume=False)
    executor.apply_orders([Assign(JobId("a"), Allocation.of(0, 1), 1)])
    for key in pool.launched:
        executor.workers.on_message(key, READY)
    devices = executor.jobs.trainings[JobId("a")].devices
    epoch = next(message.epoch for _, message in pool.sent if isinstance(message, Proceed))
    for step in range(3):
        now[0] += 2.0
        for key in pool.launched:
            executor.workers.on_message(key, Contributed(epoch, step, 1.5 if devices[key[1]] else 0.5, 4))
    executor.workers.on_message(pool.launched[0], Stepped(3, 0, 1.0, 1.0, 0.5))
    facts = [fact for report in reports if isinstance(report, Facts) for fact in report.facts]
    (progress,) = (fact for fact in facts if isinstance(fact, ProgressReported))
    assert progress.step_s == pytest.approx(2.0)
    assert progress.busy == pytest.approx((0.25, 0.75))
    close_files(executor)


# -- lanes of a GPU ---------------------------------------------------------------------------------------------------


class FakeMps(MpsDaemon):
    """A daemon that is alive until a test changes that."""

    is_alive = True

    async def start(self) -> None:
        pass

    def environment(self, percent: int) -> dict[str, str]:
        return {"percent": str(percent)}


class Gpu:
    """An executor with one GPU, MPS and fake workers."""

    def __init__(
        self,
        state: Path,
        *,
        mps: bool = True,
        is_closed: bool = False,
        devices: Sequence[LocalDevice] = (LocalDevice(0, "cuda:0", "H200", (), 0),),
        list_processes: ListProcesses | None = None,
    ) -> None:
        self.pool, self.mps = FakePool(), FakeMps()
        self.now = 0.0
        self.reports: list[Report] = []
        options = ExecutorOptions(warm=1, mps=mps, is_closed=is_closed)
        dependencies = ExecutorDependencies(
            lambda: self.now, lambda *_: self.pool, lambda: self.mps, list_processes=list_processes
        )
        self.executor = Executor(devices, state, options, self.reports.append, dependencies)
        asyncio.run(self.executor.start())

    def run(
        self, job: str, fraction: float, generation: int = 1, *, exact: bool = False, device: int = 0, turn: int = 0
    ) -> WorkerKey:
        """Assign a share to a job; the newest worker."""
        if generation == 1:
            self.executor.add_job(JobId(job), Program(entry="jobs.py:tiny", exact=exact), resume=False)
        allocation = Allocation.of(device, fraction=fraction, turn=turn)
        self.executor.apply_orders([Assign(JobId(job), allocation, generation)])
        return self.pool.launched[-1] if self.pool.launched else (job, 0)

    def receives(self, key: WorkerKey, *messages: Message) -> None:
        for message in messages:
            self.executor.workers.on_message(key, message)

    def sent_to(self, key: WorkerKey) -> list[str]:
        return [type(message).__name__ for client, message in self.pool.sent if client == key]


@pytest.fixture
def gpu(tmp_path: Path) -> Gpu:
    return Gpu(tmp_path)


def test_shares_of_a_gpu_are_lanes_without_time_slicing(gpu: Gpu) -> None:
    a, b = gpu.run("a", 0.4), gpu.run("b", 0.8)
    assert gpu.pool.environments == {a: {"percent": "40"}, b: {"percent": "80"}}
    gpu.receives(a, READY)
    gpu.receives(b, READY)
    proceeds = [message for _, message in gpu.pool.sent if isinstance(message, Proceed)]
    assert [proceed.time_sliced for proceed in proceeds] == [False, False]


def test_workers_start_in_the_processes_that_have_checked_their_entries_and_get_their_lanes(gpu: Gpu) -> None:
    async def check() -> list[WorkerKey]:
        jobs = ("a", "b", "waits")
        gpu.pool.checks = {job: asyncio.get_running_loop().create_future() for job in jobs}
        programs = dict.fromkeys(jobs, Program(entry="jobs.py:tiny"))
        checking = asyncio.create_task(gpu.executor.checks.run(programs))
        keys = []
        for job in jobs:
            keys.append(await gpu.pool.checks[job])
            gpu.receives(keys[-1], EntryChecked(can_begin=True))
        assert await checking == dict.fromkeys(jobs, "")
        return keys

    keys = asyncio.run(check())
    for job in ("a", "b"):
        gpu.executor.add_job(JobId(job), Program(entry="jobs.py:tiny"), resume=False)
    gpu.executor.apply_orders([Assign(JobId(job), Allocation.of(0, fraction=0.4), 1) for job in ("a", "b")])
    assert gpu.pool.assigned == {keys[0]: ("a", 1), keys[1]: ("b", 1)}
    assert gpu.pool.environments == {("a", 1): {"percent": "40"}, ("b", 1): {"percent": "40"}}
    assert gpu.pool.killed == [keys[2]]


def test_a_worker_on_a_gpu_gets_the_requested_cores(gpu: Gpu) -> None:
    gpu.executor.add_job(JobId("a"), Program(entry="jobs.py:tiny", cpus=1), resume=False)
    a, b = gpu.run("a", 0.4, 2), gpu.run("b", 0.4)
    assert gpu.pool.places == {a: ((min(os.sched_getaffinity(0)),), 1), b: ((), 1)}


def test_an_exact_job_always_has_a_whole_lane(gpu: Gpu) -> None:
    a, b = gpu.run("a", 0.4, exact=True), gpu.run("b", 0.4)
    assert gpu.pool.environments == {a: {"percent": "100"}, b: {"percent": "40"}}


def test_without_mps_jobs_are_time_sliced_and_the_reason_is_noted(tmp_path: Path) -> None:
    gpu = Gpu(tmp_path, mps=False)
    a, b = gpu.run("a", 0.4), gpu.run("b", 0.8)
    gpu.receives(a, READY)
    gpu.receives(b, READY)
    proceeds = [message for _, message in gpu.pool.sent if isinstance(message, Proceed)]
    assert [proceed.time_sliced for proceed in proceeds] == [True, True]
    reports = {report.job: report.words for report in gpu.reports if isinstance(report, Told)}
    assert set(reports) == {"a", "b"}
    assert all("MPS is turned off" in note for note in reports.values())


def test_another_share_is_another_process_that_takes_over_at_a_boundary(gpu: Gpu) -> None:
    old = gpu.run("a", 0.4)
    gpu.receives(old, READY)
    new = gpu.run("a", 0.5, generation=2)
    assert new != old
    assert gpu.pool.environments[new] == {"percent": "50"}
    assert gpu.sent_to(old) == ["Proceed"]  # it continues while the new one starts
    gpu.receives(new, READY)
    assert gpu.sent_to(old) == ["Proceed", "Halt"]
    gpu.receives(old, Halted(7), Published(7))
    gpu.receives(new, Loaded(7))
    assert gpu.sent_to(new) == ["Load", "Proceed"]
    assert gpu.sent_to(old)[-1] == "Publish"  # on standby
    applied = [fact for report in gpu.reports if isinstance(report, Facts) for fact in report.facts]
    assert AssignApplied(JobId("a"), 2, 7.0) in applied


def test_the_same_share_keeps_the_process(gpu: Gpu) -> None:
    old = gpu.run("a", 0.4)
    gpu.receives(old, READY)
    assert gpu.run("a", 0.4, generation=2) == old


def test_a_gpu_fault_ends_all_clients_and_jobs_restart_one_by_one(gpu: Gpu) -> None:
    a, b = gpu.run("a", 0.4), gpu.run("b", 0.4)
    gpu.receives(a, READY, Stepped(5, 0, 1.0, 1.0, 1.0))
    gpu.receives(b, READY, Stepped(9, 0, 1.0, 1.0, 1.0))
    gpu.receives(b, WorkerFailed("device", "CUDA error: an illegal memory access was encountered", 9))
    gpu.receives(a, WorkerFailed("device", "CUDA error: an illegal memory access was encountered", 5))
    assert sorted(gpu.pool.killed) == [a, b]
    gpu.executor.workers.on_exit(b, "killed by SIGKILL")
    assert gpu.pool.launched == [a, b]  # the other client has not exited yet
    gpu.executor.workers.on_exit(a, "killed by SIGKILL")
    *_, first = gpu.pool.launched
    assert len(gpu.pool.launched) == 3
    assert first[0] == "a"
    gpu.receives(first, READY, Stepped(6, 0, 1.0, 1.0, 1.0))
    assert [key[0] for key in gpu.pool.launched] == ["a", "b", "a", "b"]
    notes = [report.words for report in gpu.reports if isinstance(report, Told)]
    assert sum("failed for all of its jobs" in note for note in notes) == 2
    assert not any(isinstance(f, JobFailed) for r in gpu.reports if isinstance(r, Facts) for f in r.facts)


def test_a_job_that_faults_alone_repeatedly_fails(gpu: Gpu) -> None:
    key = gpu.run("a", 0.4)
    for _ in range(3):
        gpu.receives(key, READY, WorkerFailed("device", "CUDA error: misaligned address", 0))
        gpu.executor.workers.on_exit(key, "exit code 3")
        key = gpu.pool.launched[-1]
    failed = [f for r in gpu.reports if isinstance(r, Facts) for f in r.facts if isinstance(f, JobFailed)]
    assert "misaligned address" in failed[0].error


def test_a_job_that_waits_for_isolation_is_not_blamed(gpu: Gpu) -> None:
    keys = {job: gpu.run(job, 0.3) for job in ("struck", "other", "third")}
    for key in keys.values():
        gpu.receives(key, READY)
    counter = gpu.executor._trainings[JobId("struck")].counter(keys["struck"][1])
    os.pwrite(counter, (133).to_bytes(8, "little"), 0)  # it had not reported most of these steps
    gpu.receives(keys["other"], WorkerFailed("device", "CUDA error: an illegal memory access was encountered", 9))
    for key in keys.values():
        gpu.executor.workers.on_exit(key, "killed by SIGKILL")
    for _ in range(3):
        (alone,) = gpu.pool.launched[len(keys) :]
        assert alone[0] == "struck"
        gpu.receives(alone, READY, Stepped(130, 0, 1.0, 1.0, 1.0))  # still before the failing step: no other job starts
        assert gpu.pool.launched[-1] == alone
        gpu.receives(alone, WorkerFailed("device", "CUDA error: an illegal memory access was encountered", 133))
        keys[f"again {alone[1]}"] = alone
        gpu.executor.workers.on_exit(alone, "exit code 3")
    failed = [f for r in gpu.reports if isinstance(r, Facts) for f in r.facts if isinstance(f, JobFailed)]
    assert [fact.job for fact in failed] == ["struck"]
    assert gpu.pool.launched[-1][0] == "other"  # the first one to start since
    assert not [key for key in gpu.pool.killed if key[0] == "other" and key != keys["other"]]


def test_a_waiting_worker_can_be_cancelled(gpu: Gpu) -> None:
    async def go() -> None:
        a, b = gpu.run("a", 0.4), gpu.run("b", 0.4)
        gpu.receives(a, READY)
        gpu.receives(b, READY)
        gpu.receives(a, WorkerFailed("device", "CUDA error: unspecified launch failure", 0))
        gpu.executor.workers.on_exit(a, "exit code 3")
        gpu.executor.workers.on_exit(b, "killed by SIGKILL")
        assert len(gpu.pool.launched) == 3
        gpu.executor.apply_orders([Release(JobId("b"), 2)])
        await asyncio.sleep(0)
        released = [f for r in gpu.reports if isinstance(r, Facts) for f in r.facts if isinstance(f, ReleaseApplied)]
        assert [fact.job for fact in released] == ["b"]

    asyncio.run(go())


def test_the_length_of_a_training_is_reported_when_it_is_loaded(tmp_path: Path) -> None:
    pool = FakePool()
    reports: list[Report] = []
    executor = Executor(DEVICES, tmp_path, ExecutorOptions(), reports.append, pool.dependencies())
    executor.add_job(JobId("a"), Program(entry="jobs.py:tiny"), resume=False)
    executor.apply_orders([Assign(JobId("a"), Allocation.of(0), 1)])
    executor.workers.on_message(pool.launched[0], replace(READY, target_loss=0.05, window=5))
    assert Sized(JobId("a"), 9, 8, 80, target_loss=0.05, window=5, gradient_bytes=64) in reports


# -- prewarmed processes and missing lanes -----------------------------------------------------------------------------


def test_a_gpu_fault_kills_prewarmed_processes_before_workers_start(gpu: Gpu) -> None:
    gpu.now = 5.0
    gpu.executor.tick()
    (warm,) = gpu.pool.prewarmed
    assert gpu.pool.prewarmed[warm] == {"percent": "100"}
    gpu.receives(warm, Prewarmed(2.0))
    a = gpu.run("a", 0.4)
    gpu.receives(a, READY, WorkerFailed("device", "CUDA error: an illegal memory access was encountered", 0))
    assert gpu.pool.killed == [a, warm] or gpu.pool.killed == [warm, a]
    gpu.executor.workers.on_exit(a, "killed by SIGKILL")
    assert gpu.pool.launched == [a]  # the prewarmed process is a client of the broken server too
    gpu.executor.workers.on_exit(warm, "killed by SIGKILL")
    assert [key[0] for key in gpu.pool.launched] == ["a", "a"]


def test_without_further_jobs_no_process_is_prewarmed(tmp_path: Path) -> None:
    gpu = Gpu(tmp_path, is_closed=True)
    gpu.now = 5.0
    gpu.executor.tick()
    assert not gpu.pool.prewarmed  # no job is known
    gpu.executor.add_job(JobId("b"), Program(entry="jobs.py:tiny"), resume=False)
    gpu.run("a", 0.4)
    gpu.now = 10.0
    gpu.executor.tick()
    (warm,) = gpu.pool.prewarmed  # for b
    gpu.receives(warm, Prewarmed(2.0))
    gpu.run("b", 0.6, generation=2)
    gpu.now = 15.0
    gpu.executor.tick()
    assert gpu.pool.killed == [warm]  # it has another lane, and no job waits
    assert len(gpu.pool.prewarmed) == 1


def test_a_prewarmed_process_of_the_right_lane_becomes_the_worker(gpu: Gpu) -> None:
    gpu.now = 5.0
    gpu.executor.tick()
    (warm,) = gpu.pool.prewarmed
    gpu.receives(warm, Prewarmed(2.0, 512 << 20))
    a = gpu.run("a", 1.0)
    assert gpu.pool.assigned == {warm: a}
    notes = [report.words for report in gpu.reports if isinstance(report, Told)]
    assert len(notes) == 1
    assert all(part in notes[0] for part in ("cuda:0", "512 MiB", "2.0 s"))


def test_a_job_out_of_memory_gets_that_of_prewarmed_processes(gpu: Gpu) -> None:
    a = gpu.run("a", 0.4)
    gpu.now = 5.0
    gpu.executor.tick()
    (warm,) = gpu.pool.prewarmed
    gpu.receives(a, READY, WorkerFailed("memory", "CUDA out of memory", 0))
    assert gpu.pool.killed == [warm]


def test_a_worker_without_its_lane_restarts_without_counting_as_a_loss(gpu: Gpu) -> None:
    error = "MPS is not active"
    gpu.mps.is_alive = False
    key = gpu.run("a", 0.4)
    assert gpu.pool.launched == []
    gpu.mps.is_alive = True
    gpu.executor._on_mps_change()
    key = gpu.pool.launched[-1]
    gpu.mps.is_alive = False
    gpu.receives(key, WorkerFailed("lane", error))
    gpu.executor.workers.on_exit(key, "exit code 3")
    assert len(gpu.pool.launched) == 1  # the daemon is not running
    gpu.mps.is_alive = True
    gpu.executor._on_mps_change()
    assert len(gpu.pool.launched) == 2
    notes = [report.words for report in gpu.reports if isinstance(report, Told)]
    assert len(notes) == 1
    assert error in notes[0]


def test_mps_errors_count_against_no_job_and_turn_lanes_off_in_the_end(gpu: Gpu) -> None:
    error = "CUDA error: the remote procedural call between the MPS server and the MPS client failed"
    key = gpu.run("a", 0.4)
    for number in range(3):
        gpu.receives(key, READY, WorkerFailed("device", error, 0))
        gpu.executor.workers.on_exit(key, "exit code 3")
        key = gpu.pool.launched[-1]
        assert gpu.executor.workers.mps.has_lanes is (number < 2)
    assert gpu.pool.environments[key] == {}
    assert not any(isinstance(f, JobFailed) for r in gpu.reports if isinstance(r, Facts) for f in r.facts)


def test_jobs_are_time_sliced_when_lanes_are_never_given(gpu: Gpu) -> None:
    for job in ("a", "b"):
        gpu.run(job, 0.4)
    for _ in range(3):
        key = next(key for key in reversed(gpu.pool.launched) if key[0] == "a")
        gpu.receives(key, WorkerFailed("lane", "40 % requested"))
        gpu.executor.workers.on_exit(key, "exit code 3")
    last = gpu.pool.launched[-1]
    assert last[0] == "a"
    assert gpu.pool.environments[last] == {}
    b = next(key for key in gpu.pool.launched if key[0] == "b")
    gpu.receives(b, READY)
    gpu.receives(last, READY)
    proceeds = {key[0]: message for key, message in gpu.pool.sent if isinstance(message, Proceed)}
    assert [proceeds[job].time_sliced for job in ("a", "b")] == [True, True]
    notes = [report.words for report in gpu.reports if isinstance(report, Told) and report.job == "b"]
    assert "time-sliced" in notes[0]
    assert "40 % requested" in notes[0]
    assert not any(isinstance(f, JobFailed) for r in gpu.reports if isinstance(r, Facts) for f in r.facts)


def test_foreign_processes_are_reported_as_facts(tmp_path: Path) -> None:
    clock, reports = itertools.count(0, INTERVAL_S), list[Report]()
    rows = [GpuProcess(os.getppid(), 3 << 30)]
    gpu = LocalDevice(4, "cuda:1", "H200", (), 1)
    options = ExecutorOptions(mps=False)
    dependencies = FakePool().dependencies(lambda: float(next(clock)), lambda index: rows)
    executor = Executor([gpu], tmp_path, options, reports.append, dependencies)
    for _ in range(3):
        executor.tick()
    (report,) = reports
    assert isinstance(report, Facts)
    (seen,) = report.facts
    assert isinstance(seen, OutsidersSeen)
    assert (seen.device, seen.processes[0].pid, seen.keeps_free) == (4, os.getppid(), False)


def test_commands_that_end_while_the_executor_closes_raise_nothing(tmp_path: Path) -> None:
    """The arbiter's descriptors stay open until the last command has left its device."""

    class StoppedPool(FakePool):
        async def stop(self) -> None:
            pass

    async def go() -> None:
        executor = Executor(DEVICES, tmp_path, ExecutorOptions(), lambda _: None, StoppedPool().dependencies())
        executor.add_job(JobId("sleeps"), Program(command=("sh", "-c", "sleep 1000")), resume=False)
        executor.apply_orders([Assign(JobId("sleeps"), Allocation.of(0), 1)])
        while not executor.jobs.commands[JobId("sleeps")].has_process:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await executor.close()

    asyncio.run(go())
