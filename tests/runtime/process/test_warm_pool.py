"""Which seats are kept warm, and who gets one; processes pretended, all messages by hand."""

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
    """Notes what is asked of it."""

    def __init__(self) -> None:
        self.forked: list[WorkerKey] = []
        self.seated: dict[WorkerKey, Prewarm] = {}
        self.moved: list[tuple[WorkerKey, WorkerKey]] = []
        self.killed: list[WorkerKey] = []

    def begin(self, key: WorkerKey, begin: Begin, log: int, *beside: int) -> None:
        self.forked.append(key)

    def seat(self, key: WorkerKey, warm: Prewarm) -> None:
        self.seated[key] = warm

    def hand_over(self, seat: WorkerKey, key: WorkerKey, begin: Begin, log: int, *beside: int) -> None:
        self.moved.append((seat, key))

    def kill(self, key: WorkerKey) -> None:
        self.killed.append(key)


class World:
    """A pool on one GPU, and the time."""

    def __init__(self, size: int = 1) -> None:
        self.now = 0.0
        self.is_open = True
        self.daemon = "first"
        self.starter = FakeStarter()
        self.pool = WarmPool(self.starter, {0: GPU}, size, self.lane, lambda device: self.is_open, lambda: self.now)

    def lane(self, device: int, lane: int) -> Mapping[str, str]:
        return {"pipe": self.daemon, "percent": str(lane)}

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.pool.tick()

    def warmed(self) -> WorkerKey:
        """The newest seat has become warm."""
        seat = list(self.starter.seated)[-1]
        self.pool.heard(seat, Prewarmed(2.0, 500 << 20))
        return seat

    def start(self, job: str, lane: int = 100, sets: str = "") -> str:
        program = {"environment": {sets: "1"} if sets else {}}
        return self.pool.begin((job, 1), 0, lane, Begin(job, program, "cuda:0", environment=self.lane(0, lane)), 3, 4)

    def lanes(self) -> list[str]:
        """Of all seats ever made."""
        return [warm.environment["percent"] for warm in self.starter.seated.values()]


def test_a_job_gets_the_warm_seat_and_another_is_made_behind_it() -> None:
    world = World()
    world.later(1.0)
    seat = world.warmed()
    assert world.start("a") == "started in a process that was kept warm on cuda:0, which took 500 MiB of it and 2.0 s"
    assert world.starter.moved == [(seat, ("a", 1))]
    assert world.starter.forked == []
    world.later(0.5)
    assert len(world.starter.seated) == 1  # not in the way of the one that has just started
    world.later(0.6)
    assert len(world.starter.seated) == 2
    world.later(5.0)
    assert len(world.starter.seated) == 2  # one at a time, and no more than are kept


def test_who_comes_before_a_seat_is_warm_does_not_wait_for_it() -> None:
    world = World()
    world.start("a")
    world.later(1.0)
    world.start("b")
    assert world.starter.forked == [("a", 1), ("b", 1)]


@pytest.mark.parametrize("name", ["CUDA_LAUNCH_BLOCKING", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS"])
def test_what_is_read_when_cuda_starts_needs_a_process_of_its_own(name: str) -> None:
    world = World()
    world.later(1.0)
    world.warmed()
    world.start("a", sets=name)
    assert world.starter.forked == [("a", 1)]
    world.start("b", sets="DATA")
    assert world.starter.forked == [("a", 1)]


def test_a_seat_fits_one_lane_and_gives_way_to_the_lane_that_is_asked_for() -> None:
    world = World()
    world.later(1.0)
    seat = world.warmed()
    world.start("a", lane=40)
    assert world.starter.forked == [("a", 1)]
    world.later(5.0)
    assert world.starter.killed == []  # whoever searches for shares would make us change for ever
    world.later(5.0)
    assert world.starter.killed == [seat]
    assert world.lanes() == ["100"]  # the old one has not gone yet
    assert world.pool.ended(seat, "killed by SIGKILL") == (0, "")
    world.later(0.1)
    assert world.lanes() == ["100", "40"]
    world.warmed()
    world.start("b", lane=40)
    assert world.starter.forked == [("a", 1)]


def test_a_fault_or_a_lack_of_memory_ends_all_seats_for_a_while() -> None:
    world = World(size=2)
    for _ in range(2):
        world.later(1.0)
        world.warmed()
    seats = list(world.starter.seated)
    assert world.pool.drop(0) == seats
    assert world.starter.killed == seats
    assert [world.pool.ended(seat, "killed") for seat in seats] == [(0, ""), (0, "")]
    world.later(29.0)
    assert len(world.starter.seated) == 2
    world.later(2.0)
    assert len(world.starter.seated) == 3


def test_there_is_no_seat_where_none_may_be_nor_one_of_a_daemon_that_is_gone() -> None:
    world = World()
    world.later(1.0)
    seat = world.warmed()
    world.daemon = "second"
    world.later(0.1)
    assert world.starter.killed == [seat]
    world.start("a")
    assert world.starter.forked == [("a", 1)]
    world.pool.ended(seat, "killed")
    world.later(2.0)
    assert len(world.starter.seated) == 2
    world.is_open = False
    world.later(0.1)
    assert world.starter.killed == list(world.starter.seated)


def test_seats_that_fail_are_not_tried_for_ever() -> None:
    world, told = World(), []
    for _ in range(10):
        world.later(20.0)
        for seat in list(world.starter.seated)[-1:]:
            told.append(world.pool.heard(seat, WorkerFailed("device", "CUDA error: no")))
            world.pool.ended(seat, "exit code 0")
    assert len(world.starter.seated) == 3
    assert told[2] == (0, "no process is kept warm on cuda:0: CUDA error: no")
    assert [words for _, words in told[:2]] == ["", ""]


def test_a_seat_that_dies_without_a_word_is_told_as_well() -> None:
    world = World()
    ends = []
    for _ in range(3):
        world.later(20.0)
        ends.append(world.pool.ended(list(world.starter.seated)[-1], "killed by SIGSEGV"))
    assert ends == [(0, ""), (0, ""), (0, "no process is kept warm on cuda:0: killed by SIGSEGV")]


def test_a_seat_that_does_not_become_warm_is_given_up() -> None:
    world = World()
    world.later(1.0)
    (seat,) = world.starter.seated
    world.later(59.0)
    assert world.starter.killed == []
    world.later(2.0)
    assert world.starter.killed == [seat]


def test_a_silent_seat_is_ended_and_nobody_elses_process_is_taken_for_one() -> None:
    world = World()
    world.later(1.0)
    (seat,) = world.starter.seated
    assert world.pool.owns(seat)
    assert not world.pool.owns(("a", 1))
    world.pool.silent(seat)
    assert world.starter.killed == [seat]
    assert world.pool.ended(("a", 1), "exit code 0") is None


def test_none_are_kept_where_none_are_wanted() -> None:
    world = World(size=0)
    world.later(100.0)
    world.start("a")
    assert (world.starter.seated, world.starter.forked) == ({}, [("a", 1)])


def test_a_seat_makes_way_for_the_last_client_that_mps_takes() -> None:
    world = World()
    world.later(1.0)
    seat = world.warmed()
    for number in range(MAX_MPS_CLIENTS):
        world.start(f"job{number}", lane=2)
    assert world.starter.killed == [seat]


@given(st.lists(st.tuples(st.sampled_from(["start", "later", "warm", "end", "drop"]), st.integers(0, 4)), max_size=60))
def test_never_are_more_seats_kept_than_are_wanted_nor_one_given_twice(events: list[tuple[str, Any]]) -> None:
    world, jobs = World(size=2), 0
    for event, number in events:
        alive = [seat for seat in world.starter.seated if seat not in [taken for taken, _ in world.starter.moved]]
        if event == "start":
            jobs += 1
            world.start(f"job{jobs}", lane=(100, 50, 33, 25, 20)[number])
        elif event == "later":
            world.later(4.0 * number)
        elif event == "warm" and world.starter.seated:
            world.warmed()
        elif event == "end" and alive:
            world.pool.ended(alive[-1], "killed")
        elif event == "drop":
            world.pool.drop(0)
        place = world.pool._places[0]
        assert len(place.staying()) <= 2
        given_away = [seat for seat, _ in world.starter.moved]
        assert len(set(given_away)) == len(given_away)
        assert not set(given_away) & {seat.key for seat in place.seats}


def test_while_somebody_is_measured_no_seat_is_made_and_a_warm_one_stays() -> None:
    world = World()
    world.later(2.0)
    world.pool.hush(0)  # in the middle of warming up
    (seat,) = world.starter.seated
    assert world.starter.killed == [seat]
    world.pool.ended(seat, "killed by SIGKILL")
    world.later(4.9)
    assert len(world.starter.seated) == 1
    world.later(0.2)
    assert len(world.starter.seated) == 2
    warm = world.warmed()
    world.pool.hush(0)
    assert warm not in world.starter.killed
