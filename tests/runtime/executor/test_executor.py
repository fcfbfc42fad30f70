"""A device's token and a GPU's lanes: fakes for the processes, all messages by hand."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from carpool.core.messages import Assign, AssignApplied, JobFailed, OutsidersSeen, Release, ReleaseApplied
from carpool.core.model import Allocation, JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.nvml import GpuProcess
from carpool.jobs.program import Program
from carpool.runtime.executor.client_protocol import ExecutorOptions
from carpool.runtime.executor.context import ExecutorDependencies
from carpool.runtime.executor.executor import Executor
from carpool.runtime.executor.reports import Facts, Report, Sized, Told
from carpool.runtime.process.protocol import (
    AdmissionRequested,
    Begin,
    Contributed,
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
from carpool.runtime.sharing.foreign_processes import EVERY_S, ListProcesses
from carpool.runtime.sharing.mps_daemon import MpsDaemon

READY = Ready("digest", segment_bytes=64, batch_size=8, total_steps=9, num_samples=80)
DEVICES = [LocalDevice(i, f"cpu:{i}", "cpu1", cores=(i,)) for i in range(2)]


class FakeStaff(WorkerPool):
    """Notes who was started and what was said to whom."""

    def __init__(self) -> None:
        self.begun: list[WorkerKey] = []
        self.killed: list[WorkerKey] = []
        self.environments: dict[WorkerKey, dict[str, str]] = {}
        self.places: dict[WorkerKey, tuple[tuple[int, ...], int]] = {}  # cores and threads
        self.sent: list[tuple[WorkerKey, Message]] = []
        self.seated: dict[WorkerKey, dict[str, str]] = {}
        self.moved: dict[WorkerKey, WorkerKey] = {}

    async def start(self) -> None:
        """Nobody has to be there."""

    def seat(self, key: WorkerKey, warm: Prewarm) -> None:
        self.seated[key] = dict(warm.environment)

    def hand_over(self, seat: WorkerKey, key: WorkerKey, begin: Begin, log: int, *beside: int) -> None:
        self.moved[seat] = key
        self.begin(key, begin, log, *beside)

    def silent_for(self, seconds: float) -> list[WorkerKey]:
        return []

    def begin(self, key: WorkerKey, begin: Begin, log: int, *beside: int) -> None:
        self.begun.append(key)
        self.environments[key] = dict(begin.environment)
        self.places[key] = begin.cores, begin.threads

    def kill(self, key: WorkerKey) -> None:
        self.killed.append(key)

    def send(self, key: WorkerKey, message: Message, fds: tuple[int, ...] = ()) -> None:
        self.sent.append((key, message))

    def granted(self) -> list[WorkerKey]:
        return [key for key, message in self.sent if isinstance(message, Grant)]

    def means(self, clock: Callable[[], float] = lambda: 0.0, ask: ListProcesses | None = None) -> ExecutorDependencies:
        """Those of an executor whose workers these are."""
        return ExecutorDependencies(clock, lambda *_: self, ask=ask)


def test_a_worker_that_halts_while_it_waits_for_the_token_is_passed_over(tmp_path: Path) -> None:
    """Else the token lies with one that stands still, and if it stands still for a neighbour, for ever."""
    staff = FakeStaff()
    executor = Executor(DEVICES, tmp_path, ExecutorOptions(), lambda report: None, staff.means())
    for job in ("a", "b"):
        executor.introduce(JobId(job), Program(entry="jobs.py:tiny"), resume=False)
    executor.carry([Assign(JobId(job), Allocation.of(0, 1), 1) for job in ("a", "b")])
    a0, a1, b0, b1 = staff.begun
    for key in (a0, a1, b0, b1):
        executor.heard(key, READY)
    formation = next(message.formation for key, message in staff.sent if key == b0 and isinstance(message, Proceed))
    executor.heard(b0, TurnRequested(0))
    executor.heard(a0, TurnRequested(0))
    executor.ended(a1, "killed by SIGKILL")
    executor.heard(a0, Halted(0))
    executor.heard(b0, Contributed(formation, 0, 0.01, 4))
    executor.heard(b0, TurnRequested(1))
    assert staff.granted() == [b0, b0]


def test_the_next_worker_is_told_before_the_last_step_is_through_and_a_death_sets_it_free(tmp_path: Path) -> None:
    staff = FakeStaff()
    executor = Executor(DEVICES, tmp_path, ExecutorOptions(), lambda report: None, staff.means())
    for job in ("a", "b"):
        executor.introduce(JobId(job), Program(entry="jobs.py:tiny"), resume=False)
    executor.carry([Assign(JobId(job), Allocation.of(0, fraction=0.5), 1) for job in ("a", "b")])
    a, b = staff.begun
    for key in (a, b):
        executor.heard(key, READY)
        executor.heard(key, TurnRequested(0))
    executor.heard(a, TurnEnding(1))
    assert [message for key, message in staff.sent if isinstance(message, Grant)] == [Grant(1, 1, 0), Grant(1, 2, 1)]
    baton = DeviceHandoff(*executor._rota.descriptors(0))
    assert not baton.has_reached(1)
    executor.ended(a, "killed by SIGKILL")
    assert baton.has_reached(1)
    baton.close()


def test_under_a_memory_cap_a_grant_waits_until_another_has_left(tmp_path: Path) -> None:
    staff = FakeStaff()
    options, clock = ExecutorOptions(memory_cap=100), itertools.count()
    executor = Executor(DEVICES, tmp_path, options, lambda report: None, staff.means(lambda: float(next(clock))))
    for job in ("a", "b"):
        executor.introduce(JobId(job), Program(entry="jobs.py:tiny"), resume=False)
    executor.carry([Assign(JobId(job), Allocation.of(0, fraction=0.5), 1) for job in ("a", "b")])
    a, b = staff.begun
    executor.heard(a, AdmissionRequested())
    executor.heard(b, AdmissionRequested())
    executor.heard(a, READY)
    executor.heard(a, TurnEnding(1))
    said = [(key, message) for key, message in staff.sent if not isinstance(message, Proceed)]
    assert said == [(a, Grant(16, 1, 0, room=100)), (a, SwapOut(wholly=True))]
    executor.heard(a, MemoryMeasured(60, 0, 10))
    executor.heard(a, TurnEnded(1))
    executor.heard(a, SwappedOut(wholly=True))
    assert staff.sent[-1] == (b, Grant(16, 2, 1, room=90))


# -- lanes of a GPU ---------------------------------------------------------------------------------------------------


class FakeMps(MpsDaemon):
    """A service that is there until it is told not to be."""

    is_alive = True

    async def start(self) -> None:
        """It is there already."""

    def environment(self, percent: int) -> dict[str, str]:
        return {"percent": str(percent)}


class Gpu:
    """An executor with one GPU and MPS, its workers pretended."""

    def __init__(self, state: Path, *, mps: bool = True, is_closed: bool = False) -> None:
        self.staff, self.mps = FakeStaff(), FakeMps()
        self.now = 0.0
        self.reports: list[Report] = []
        devices = [LocalDevice(0, "cuda:0", "H200", (), 0)]
        options = ExecutorOptions(warm=1, mps=mps, is_closed=is_closed)
        means = ExecutorDependencies(lambda: self.now, lambda *_: self.staff, lambda: self.mps)
        self.executor = Executor(devices, state, options, self.reports.append, means)
        asyncio.run(self.executor.start())

    def run(self, job: str, fraction: float, generation: int = 1, *, exact: bool = False) -> WorkerKey:
        """Order a job to run with a share; its newest worker, if that was started."""
        if generation == 1:
            self.executor.introduce(JobId(job), Program(entry="jobs.py:tiny", exact=exact), resume=False)
        self.executor.carry([Assign(JobId(job), Allocation.of(0, fraction=fraction), generation)])
        return self.staff.begun[-1] if self.staff.begun else (job, 0)

    def says(self, key: WorkerKey, *messages: Message) -> None:
        for message in messages:
            self.executor.heard(key, message)

    def said_to(self, key: WorkerKey) -> list[str]:
        return [type(message).__name__ for who, message in self.staff.sent if who == key]


@pytest.fixture
def gpu(tmp_path: Path) -> Gpu:
    return Gpu(tmp_path)


def test_shares_of_a_gpu_are_lanes_without_turns(gpu: Gpu) -> None:
    a, b = gpu.run("a", 0.4), gpu.run("b", 0.8)
    assert gpu.staff.environments == {a: {"percent": "40"}, b: {"percent": "80"}}
    gpu.says(a, READY)
    gpu.says(b, READY)
    proceeds = [message for _, message in gpu.staff.sent if isinstance(message, Proceed)]
    assert [proceed.by_token for proceed in proceeds] == [False, False]


def test_a_worker_on_a_gpu_keeps_to_as_many_cores_as_it_asked_for(gpu: Gpu) -> None:
    gpu.executor.introduce(JobId("a"), Program(entry="jobs.py:tiny", cpus=1), resume=False)
    a, b = gpu.run("a", 0.4, 2), gpu.run("b", 0.4)
    assert gpu.staff.places == {a: ((min(os.sched_getaffinity(0)),), 1), b: ((), 1)}


def test_an_exact_job_has_a_whole_lane_whatever_its_share_is(gpu: Gpu) -> None:
    a, b = gpu.run("a", 0.4, exact=True), gpu.run("b", 0.4)
    assert gpu.staff.environments == {a: {"percent": "100"}, b: {"percent": "40"}}


def test_without_mps_jobs_take_turns_and_their_stories_say_why(tmp_path: Path) -> None:
    gpu = Gpu(tmp_path, mps=False)
    a, b = gpu.run("a", 0.4), gpu.run("b", 0.8)
    gpu.says(a, READY)
    gpu.says(b, READY)
    proceeds = [message for _, message in gpu.staff.sent if isinstance(message, Proceed)]
    assert [proceed.by_token for proceed in proceeds] == [True, True]
    told = {report.job: report.words for report in gpu.reports if isinstance(report, Told)}
    assert told == dict.fromkeys("ab", "jobs take turns on the GPU, without MPS: it is turned off")


def test_another_share_is_another_process_that_takes_over_at_a_boundary(gpu: Gpu) -> None:
    old = gpu.run("a", 0.4)
    gpu.says(old, READY)
    new = gpu.run("a", 0.5, generation=2)
    assert new != old
    assert gpu.staff.environments[new] == {"percent": "50"}
    assert gpu.said_to(old) == ["Proceed"]  # it works on while the other one warms up
    gpu.says(new, READY)
    assert gpu.said_to(old) == ["Proceed", "Halt"]
    gpu.says(old, Halted(7), Published(7))
    gpu.says(new, Loaded(7))
    assert gpu.said_to(new) == ["Load", "Proceed"]
    assert gpu.said_to(old)[-1] == "Publish"  # it stands by
    applied = [fact for report in gpu.reports if isinstance(report, Facts) for fact in report.facts]
    assert AssignApplied(JobId("a"), 2, 7.0) in applied


def test_the_same_share_keeps_the_process(gpu: Gpu) -> None:
    old = gpu.run("a", 0.4)
    gpu.says(old, READY)
    assert gpu.run("a", 0.4, generation=2) == old


def test_a_fault_ends_all_clients_and_they_come_back_one_by_one(gpu: Gpu) -> None:
    a, b = gpu.run("a", 0.4), gpu.run("b", 0.4)
    gpu.says(a, READY, Stepped(5, 0, 1.0, 1.0, 1.0))
    gpu.says(b, READY, Stepped(9, 0, 1.0, 1.0, 1.0))
    gpu.says(b, WorkerFailed("device", "CUDA error: an illegal memory access was encountered", 9))
    gpu.says(a, WorkerFailed("device", "CUDA error: an illegal memory access was encountered", 5))
    assert sorted(gpu.staff.killed) == [a, b]
    gpu.executor.ended(b, "killed by SIGKILL")
    assert gpu.staff.begun == [a, b]  # the other one is still there
    gpu.executor.ended(a, "killed by SIGKILL")
    *_, first = gpu.staff.begun
    assert len(gpu.staff.begun) == 3
    assert first[0] == "a"
    gpu.says(first, READY, Stepped(6, 0, 1.0, 1.0, 1.0))
    assert [key[0] for key in gpu.staff.begun] == ["a", "b", "a", "b"]
    stories = [report.words for report in gpu.reports if isinstance(report, Told)]
    assert sum("failed under all of its jobs" in words for words in stories) == 2
    assert not any(isinstance(f, JobFailed) for r in gpu.reports if isinstance(r, Facts) for f in r.facts)


def test_whoever_faults_alone_again_and_again_fails(gpu: Gpu) -> None:
    key = gpu.run("a", 0.4)
    for _ in range(3):
        gpu.says(key, READY, WorkerFailed("device", "CUDA error: misaligned address", 0))
        gpu.executor.ended(key, "exit code 3")
        key = gpu.staff.begun[-1]
    failed = [f for r in gpu.reports if isinstance(r, Facts) for f in r.facts if isinstance(f, JobFailed)]
    assert "misaligned address" in failed[0].error


def test_who_waits_to_come_back_is_neither_hit_nor_an_excuse(gpu: Gpu) -> None:
    keys = {job: gpu.run(job, 0.3) for job in ("struck", "other", "third")}
    for key in keys.values():
        gpu.says(key, READY)
    counted = gpu.executor._trainings[JobId("struck")].counters[keys["struck"][1]]
    os.pwrite(counted, (133).to_bytes(8, "little"), 0)  # it had said nothing of most of these steps
    gpu.says(keys["other"], WorkerFailed("device", "CUDA error: an illegal memory access was encountered", 9))
    for key in keys.values():
        gpu.executor.ended(key, "killed by SIGKILL")
    for _ in range(3):
        (alone,) = gpu.staff.begun[len(keys) :]
        assert alone[0] == "struck"
        gpu.says(alone, READY, Stepped(130, 0, 1.0, 1.0, 1.0))  # not there yet: nobody else is let in
        assert gpu.staff.begun[-1] == alone
        gpu.says(alone, WorkerFailed("device", "CUDA error: an illegal memory access was encountered", 133))
        keys[f"again {alone[1]}"] = alone
        gpu.executor.ended(alone, "exit code 3")
    failed = [f for r in gpu.reports if isinstance(r, Facts) for f in r.facts if isinstance(f, JobFailed)]
    assert [fact.job for fact in failed] == ["struck"]
    assert gpu.staff.begun[-1][0] == "other"  # and it is the first that has started since
    assert not [key for key in gpu.staff.killed if key[0] == "other" and key != keys["other"]]


def test_a_worker_that_waits_to_start_can_be_called_off(gpu: Gpu) -> None:
    async def go() -> None:
        a, b = gpu.run("a", 0.4), gpu.run("b", 0.4)
        gpu.says(a, READY)
        gpu.says(b, READY)
        gpu.says(a, WorkerFailed("device", "CUDA error: unspecified launch failure", 0))
        gpu.executor.ended(a, "exit code 3")
        gpu.executor.ended(b, "killed by SIGKILL")
        assert len(gpu.staff.begun) == 3
        gpu.executor.carry([Release(JobId("b"), 2)])
        await asyncio.sleep(0)
        released = [f for r in gpu.reports if isinstance(r, Facts) for f in r.facts if isinstance(f, ReleaseApplied)]
        assert [fact.job for fact in released] == ["b"]

    asyncio.run(go())


def test_where_a_training_ends_is_reported_when_it_is_loaded(tmp_path: Path) -> None:
    staff = FakeStaff()
    told: list[Report] = []
    executor = Executor(DEVICES, tmp_path, ExecutorOptions(), told.append, staff.means())
    executor.introduce(JobId("a"), Program(entry="jobs.py:tiny"), resume=False)
    executor.carry([Assign(JobId("a"), Allocation.of(0), 1)])
    executor.heard(staff.begun[0], replace(READY, target_loss=0.05, window=5))
    assert Sized(JobId("a"), 9, 8, 80, target_loss=0.05, window=5) in told


# -- seats that are kept warm, and lanes that were not given ----------------------------------------------------------


def test_a_fault_takes_the_warm_seats_along_and_nobody_starts_before_they_are_gone(gpu: Gpu) -> None:
    gpu.now = 5.0
    gpu.executor.tick()
    (seat,) = gpu.staff.seated
    assert gpu.staff.seated[seat] == {"percent": "100"}
    gpu.says(seat, Prewarmed(2.0))
    a = gpu.run("a", 0.4)
    gpu.says(a, READY, WorkerFailed("device", "CUDA error: an illegal memory access was encountered", 0))
    assert gpu.staff.killed == [a, seat] or gpu.staff.killed == [seat, a]
    gpu.executor.ended(a, "killed by SIGKILL")
    assert gpu.staff.begun == [a]  # the seat is a client of the broken server as well
    gpu.executor.ended(seat, "killed by SIGKILL")
    assert [key[0] for key in gpu.staff.begun] == ["a", "a"]


def test_where_nobody_else_will_come_no_seat_is_kept(tmp_path: Path) -> None:
    gpu = Gpu(tmp_path, is_closed=True)
    gpu.now = 5.0
    gpu.executor.tick()
    assert not gpu.staff.seated  # no job is known
    gpu.executor.introduce(JobId("b"), Program(entry="jobs.py:tiny"), resume=False)
    gpu.run("a", 0.4)
    gpu.now = 10.0
    gpu.executor.tick()
    (seat,) = gpu.staff.seated  # for b
    gpu.says(seat, Prewarmed(2.0))
    gpu.run("b", 0.6, generation=2)
    gpu.now = 15.0
    gpu.executor.tick()
    assert gpu.staff.killed == [seat]  # its lane was another one, and nobody waits any more
    assert len(gpu.staff.seated) == 1


def test_a_seat_of_the_right_lane_becomes_the_worker(gpu: Gpu) -> None:
    gpu.now = 5.0
    gpu.executor.tick()
    (seat,) = gpu.staff.seated
    gpu.says(seat, Prewarmed(2.0, 512 << 20))
    a = gpu.run("a", 1.0)
    assert gpu.staff.moved == {seat: a}
    stories = [report.words for report in gpu.reports if isinstance(report, Told)]
    assert stories == ["started in a process that was kept warm on cuda:0, which took 512 MiB of it and 2.0 s"]


def test_whoever_needs_all_memory_gets_that_of_the_seats_too(gpu: Gpu) -> None:
    a = gpu.run("a", 0.4)
    gpu.now = 5.0
    gpu.executor.tick()
    (seat,) = gpu.staff.seated
    gpu.says(a, READY, WorkerFailed("memory", "CUDA out of memory", 0))
    assert gpu.staff.killed == [seat]


def test_a_worker_that_sees_the_whole_gpu_starts_again_and_it_is_nobodys_fault(gpu: Gpu) -> None:
    words = "40 % were asked, 132 of 132 multiprocessors are seen: NVIDIA's MPS was not found"
    gpu.mps.is_alive = False
    key = gpu.run("a", 0.4)
    assert gpu.staff.begun == []
    gpu.mps.is_alive = True
    gpu.executor._reopen()
    key = gpu.staff.begun[-1]
    gpu.mps.is_alive = False
    gpu.says(key, WorkerFailed("lane", words))
    gpu.executor.ended(key, "exit code 3")
    assert len(gpu.staff.begun) == 1  # nobody would put it on its lane now
    gpu.mps.is_alive = True
    gpu.executor._reopen()
    assert len(gpu.staff.begun) == 2
    stories = [report.words for report in gpu.reports if isinstance(report, Told)]
    assert stories == [f"the worker on cuda:0 was not put on its lane ({words}) before it could join and is replaced"]


def test_a_service_that_fails_is_nobodys_fault_and_in_the_end_done_without(gpu: Gpu) -> None:
    words = "CUDA error: the remote procedural call between the MPS server and the MPS client failed"
    key = gpu.run("a", 0.4)
    for number in range(3):
        gpu.says(key, READY, WorkerFailed("device", words, 0))
        gpu.executor.ended(key, "exit code 3")
        key = gpu.staff.begun[-1]
        assert gpu.executor._gate.has_lanes is (number < 2)
    assert gpu.staff.environments[key] == {}
    assert not any(isinstance(f, JobFailed) for r in gpu.reports if isinstance(r, Facts) for f in r.facts)


def test_where_lanes_are_never_given_jobs_take_turns(gpu: Gpu) -> None:
    for job in ("a", "b"):
        gpu.run(job, 0.4)
    for _ in range(3):
        key = next(key for key in reversed(gpu.staff.begun) if key[0] == "a")
        gpu.says(key, WorkerFailed("lane", "40 % were asked"))
        gpu.executor.ended(key, "exit code 3")
    last = gpu.staff.begun[-1]
    assert last[0] == "a"
    assert gpu.staff.environments[last] == {}
    b = next(key for key in gpu.staff.begun if key[0] == "b")
    gpu.says(b, READY)
    gpu.says(last, READY)
    proceeds = {key[0]: message for key, message in gpu.staff.sent if isinstance(message, Proceed)}
    assert [proceeds[job].by_token for job in ("a", "b")] == [True, True]
    stories = [report.words for report in gpu.reports if isinstance(report, Told) and report.job == "b"]
    assert stories[0] == (
        "jobs that share a GPU take turns from here on: processes do not get their lanes (40 % were asked)"
    )
    assert not any(isinstance(f, JobFailed) for r in gpu.reports if isinstance(r, Facts) for f in r.facts)


def test_others_on_a_gpu_are_reported_as_facts(tmp_path: Path) -> None:
    clock, told = itertools.count(0, EVERY_S), list[Report]()
    rows = [GpuProcess(os.getppid(), 3 << 30)]
    gpu = LocalDevice(4, "cuda:1", "H200", (), 1)
    options = ExecutorOptions(mps=False)
    means = FakeStaff().means(lambda: float(next(clock)), lambda index: rows)
    executor = Executor([gpu], tmp_path, options, told.append, means)
    for _ in range(3):
        executor.tick()
    (report,) = told
    assert isinstance(report, Facts)
    (seen,) = report.facts
    assert isinstance(seen, OutsidersSeen)
    assert (seen.device, seen.processes[0].pid, seen.keeps_free) == (4, os.getppid(), False)
