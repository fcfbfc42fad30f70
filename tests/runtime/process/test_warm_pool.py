"""Which prewarmed processes are kept, and which worker gets one; with fake processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.jobs.devices import LocalDevice
from carpool.runtime.process.protocol import Begin, Prewarm, Prewarmed, WorkerFailed
from carpool.runtime.process.warm_pool import WarmPool
from carpool.runtime.process.worker_pool import WorkerKey
from carpool.runtime.sharing.lanes import MAX_MPS_CLIENTS

GPU = LocalDevice(0, "cuda:0", "H200", (), 0)


class FakeStarter:
    """Records its calls."""

    def __init__(self) -> None:
        self.started: dict[WorkerKey, Prewarm] = {}
        self.killed: list[WorkerKey] = []

    def prewarm(self, key: WorkerKey, prewarm: Prewarm) -> None:
        self.started[key] = prewarm

    def kill(self, key: WorkerKey) -> None:
        self.killed.append(key)


class Rig:
    """A pool on one GPU, with a clock."""

    def __init__(self, size: int = 1) -> None:
        self.now = 0.0
        self.is_allowed = True
        self.daemon = "first"
        self.starter = FakeStarter()
        self.taken: list[tuple[WorkerKey, str]] = []
        self.pool = WarmPool(self.starter, {0: GPU}, size, self.lane, lambda device: self.is_allowed, lambda: self.now)

    def lane(self, device: int, lane: int) -> Mapping[str, str]:
        return {"pipe": self.daemon, "percent": str(lane)}

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.pool.tick()

    def warmed(self) -> WorkerKey:
        """Report that the newest process is warm."""
        process = list(self.starter.started)[-1]
        self.pool.on_message(process, Prewarmed(2.0, 500 << 20))
        return process

    def start(self, job: str, lane: int = 100, sets: str = "") -> WorkerKey | None:
        """Start a worker; the prewarmed process it gets."""
        program = {"environment": {sets: "1"} if sets else {}}
        taken = self.pool.take((job, 1), 0, lane, Begin(job, program, "cuda:0", environment=self.lane(0, lane)))
        self.taken += [taken] if taken else []
        return taken[0] if taken else None

    def lanes(self) -> list[str]:
        """Of all processes ever started."""
        return [warm.environment["percent"] for warm in self.starter.started.values()]


def test_a_worker_gets_the_warm_process_and_another_one_is_started() -> None:
    rig = Rig()
    rig.later(1.0)
    process = rig.warmed()
    assert rig.start("a") == process
    assert all(part in rig.taken[0][1] for part in ("cuda:0", "500 MiB", "2.0 s"))
    rig.later(0.5)
    assert len(rig.starter.started) == 1  # not while the worker starts
    rig.later(0.6)
    assert len(rig.starter.started) == 2
    rig.later(5.0)
    assert len(rig.starter.started) == 2  # one at a time, up to the size of the pool


def test_a_worker_does_not_wait_for_a_process_to_become_warm() -> None:
    rig = Rig()
    assert rig.start("a") is None
    rig.later(1.0)
    assert rig.start("b") is None


@pytest.mark.parametrize("name", ["CUDA_LAUNCH_BLOCKING", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS"])
def test_variables_read_when_cuda_starts_need_a_new_process(name: str) -> None:
    rig = Rig()
    rig.later(1.0)
    rig.warmed()
    assert rig.start("a", sets=name) is None
    assert rig.start("b", sets="DATA") is not None


def test_a_process_fits_one_lane_and_is_replaced_for_a_requested_one() -> None:
    rig = Rig()
    rig.later(1.0)
    process = rig.warmed()
    assert rig.start("a", lane=40) is None
    rig.later(5.0)
    assert rig.starter.killed == []  # a policy that searches for shares would replace it each time
    rig.later(5.0)
    assert rig.starter.killed == [process]
    assert rig.lanes() == ["100"]  # the old one has not exited yet
    assert rig.pool.on_exit(process, "killed by SIGKILL") == (0, "")
    rig.later(0.1)
    assert rig.lanes() == ["100", "40"]
    rig.warmed()
    assert rig.start("b", lane=40) is not None


def test_clear_kills_all_processes_for_a_while() -> None:
    rig = Rig(size=2)
    for _ in range(2):
        rig.later(1.0)
        rig.warmed()
    processes = list(rig.starter.started)
    assert rig.pool.clear(0) == processes
    assert rig.starter.killed == processes
    assert [rig.pool.on_exit(process, "killed") for process in processes] == [(0, ""), (0, "")]
    rig.later(29.0)
    assert len(rig.starter.started) == 2
    rig.later(2.0)
    assert len(rig.starter.started) == 3


def test_processes_are_killed_where_not_allowed_or_with_an_old_environment() -> None:
    rig = Rig()
    rig.later(1.0)
    process = rig.warmed()
    rig.daemon = "second"
    rig.later(0.1)
    assert rig.starter.killed == [process]
    assert rig.start("a") is None
    rig.pool.on_exit(process, "killed")
    rig.later(2.0)
    assert len(rig.starter.started) == 2
    rig.is_allowed = False
    rig.later(0.1)
    assert rig.starter.killed == list(rig.starter.started)


def test_failing_processes_are_not_started_forever() -> None:
    rig, notes = Rig(), []
    for _ in range(10):
        rig.later(20.0)
        for process in list(rig.starter.started)[-1:]:
            notes.append(rig.pool.on_message(process, WorkerFailed("device", "CUDA error: no")))
            rig.pool.on_exit(process, "exit code 0")
    assert len(rig.starter.started) == 3
    assert [bool(note) for _, note in notes[:3]] == [False, False, True]
    assert notes[2][1].endswith("CUDA error: no")


def test_processes_that_die_count_as_failures() -> None:
    rig = Rig()
    ends = []
    for _ in range(3):
        rig.later(20.0)
        ends.append(rig.pool.on_exit(list(rig.starter.started)[-1], "killed by SIGSEGV"))
    assert ends[:2] == [(0, ""), (0, "")]
    assert ends[2] is not None
    assert ends[2][1].endswith("killed by SIGSEGV")


def test_a_process_that_does_not_become_warm_is_killed() -> None:
    rig = Rig()
    rig.later(1.0)
    (process,) = rig.starter.started
    rig.later(59.0)
    assert rig.starter.killed == []
    rig.later(2.0)
    assert rig.starter.killed == [process]


def test_a_hung_process_is_killed_and_workers_are_not_owned() -> None:
    rig = Rig()
    rig.later(1.0)
    (process,) = rig.starter.started
    assert rig.pool.owns(process)
    assert not rig.pool.owns(("a", 1))
    rig.pool.on_hang(process)
    assert rig.starter.killed == [process]
    assert rig.pool.on_exit(("a", 1), "exit code 0") is None


def test_a_pool_of_size_zero_starts_nothing() -> None:
    rig = Rig(size=0)
    rig.later(100.0)
    assert rig.start("a") is None
    assert rig.starter.started == {}


def test_a_process_makes_way_for_the_last_mps_client() -> None:
    rig = Rig()
    rig.later(1.0)
    process = rig.warmed()
    for number in range(MAX_MPS_CLIENTS):
        rig.start(f"job{number}", lane=2)
    assert rig.starter.killed == [process]


@given(st.lists(st.tuples(st.sampled_from(["start", "later", "warm", "end", "clear"]), st.integers(0, 4)), max_size=60))
def test_the_size_is_never_exceeded_and_no_process_is_taken_twice(events: list[tuple[str, Any]]) -> None:
    rig, jobs = Rig(size=2), 0
    for event, number in events:
        alive = [process for process in rig.starter.started if process not in [taken for taken, _ in rig.taken]]
        if event == "start":
            jobs += 1
            rig.start(f"job{jobs}", lane=(100, 50, 33, 25, 20)[number])
        elif event == "later":
            rig.later(4.0 * number)
        elif event == "warm" and rig.starter.started:
            rig.warmed()
        elif event == "end" and alive:
            rig.pool.on_exit(alive[-1], "killed")
        elif event == "clear":
            rig.pool.clear(0)
        gpu = rig.pool._gpus[0]
        assert len(gpu.usable()) <= 2
        given_away = [taken for taken, _ in rig.taken]
        assert len(set(given_away)) == len(given_away)
        assert not set(given_away) & {process.key for process in gpu.processes}


def test_keep_quiet_starts_nothing_and_keeps_warm_processes() -> None:
    rig = Rig()
    rig.later(2.0)
    rig.pool.keep_quiet(0)  # while it warms up
    (process,) = rig.starter.started
    assert rig.starter.killed == [process]
    rig.pool.on_exit(process, "killed by SIGKILL")
    rig.later(4.9)
    assert len(rig.starter.started) == 1
    rig.later(0.2)
    assert len(rig.starter.started) == 2
    warm = rig.warmed()
    rig.pool.keep_quiet(0)
    assert warm not in rig.starter.killed
