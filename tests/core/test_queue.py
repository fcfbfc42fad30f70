"""Queue, running_jobs and the sorted index against plain sorted lists."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core import queue
from carpool.core.model import Job, JobId, JobSpec, Kind, Phase
from carpool.core.queue import Demand, Entry, Queue, RunningJobs, Sorted, demand_of

Steps = list[tuple[str, int, int]]  # (what, job, key)
steps = st.lists(st.tuples(st.sampled_from(("put", "put", "discard")), st.integers(0, 30), st.integers(0, 5)))


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "_CHUNK", 3)


def job(number: int) -> Job:
    kinds = (Kind("V100"),) if number % 3 == 0 else ()
    return Job(JobSpec(JobId(f"j{number}"), 1 + number % 4, kinds=kinds), number, 0.0, Phase.WAITING)


def replayed(walk: Steps, put: Callable[[Job, int], None], discard: Callable[[JobId], None]) -> list[Entry]:
    """Play the steps and return what must be there, in order."""
    entries: dict[int, Entry] = {}
    for what, number, key in walk:
        if what == "put":
            put(job(number), key)
            entries[number] = (key, number, JobId(f"j{number}"))
        else:
            discard(JobId(f"j{number}"))
            entries.pop(number, None)
    return sorted(entries.values())


@settings(max_examples=100)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12))))
def test_sorted_like_a_sorted_list(walk: list[tuple[bool, int]]) -> None:
    index, naive = Sorted(), set[Entry]()
    for adds, number in walk:
        entry: Entry = (number % 5, number, JobId(str(number)))
        if adds and entry not in naive:
            index.add(entry)
            naive.add(entry)
        elif not adds and entry in naive:
            index.remove(entry)
            naive.discard(entry)
        ordered = sorted(naive)
        assert list(index) == ordered
        assert list(reversed(index)) == ordered[::-1]
        assert bool(index) == bool(naive)
        if naive:
            assert (index.first, index.last) == (ordered[0], ordered[-1])
        middle: Entry = (2, 6, JobId(""))
        assert list(index.starting_at(middle)) == [each for each in ordered if each >= middle]


def test_removing_what_is_not_there_is_our_own_bug() -> None:
    index = Sorted()
    index.add((0, 1, JobId("a")))
    with pytest.raises((AssertionError, IndexError)):
        index.remove((0, 2, JobId("b")))


@settings(max_examples=100)
@given(steps)
def test_queue_like_a_sorted_list(walk: Steps) -> None:
    waiting = Queue()
    expected = replayed(walk, waiting.put, waiting.discard)
    assert list(waiting.entries()) == expected
    assert list(waiting) == [entry[2] for entry in expected]
    assert len(waiting) == len(expected)
    assert waiting.head == (expected[0] if expected else None)
    assert waiting.narrowest == min((1 + seq % 4 for _, seq, _ in expected), default=0)
    assert all(JobId(f"j{n}") in waiting for _, n, _ in expected)


@settings(max_examples=100)
@given(steps, st.sets(st.sampled_from([demand_of(job(n)) for n in range(12)])), st.integers(1, 4))
def test_refused_demands_are_passed_over(walk: Steps, refused: set[Demand], every: int) -> None:
    """Refusals before the walk and during it; what is offered stays in order."""
    waiting = Queue()
    expected = replayed(walk, waiting.put, waiting.discard)
    so_far, offered, wanted = set(refused), list[Entry](), list[Entry]()
    for entry in expected:
        demand = demand_of(job(entry[1]))
        if demand not in so_far:
            wanted.append(entry)
            if len(wanted) % every == 0:
                so_far.add(demand)
    live = set(refused)
    for entry in waiting.entries(live):
        offered.append(entry)
        if len(offered) % every == 0:
            live.add(waiting.demand(entry[2]))
    assert offered == wanted


@settings(max_examples=100)
@given(steps)
def test_ordered_roster_like_a_sorted_list(walk: Steps) -> None:
    running_jobs = RunningJobs(ordered=True)
    expected = replayed(walk, running_jobs.put, running_jobs.discard)
    assert list(running_jobs.entries()) == expected
    assert list(running_jobs) == [entry[2] for entry in expected]
    assert list(reversed(running_jobs)) == [entry[2] for entry in expected][::-1]
    assert running_jobs.tail == (expected[-1] if expected else None)
    assert len(running_jobs) == len(expected)


def test_unordered_roster_keeps_the_order_of_starts() -> None:
    running_jobs = RunningJobs(ordered=False)
    for number in (3, 1, 2, 3):
        running_jobs.put(job(number), 0)
    assert list(running_jobs) == ["j3", "j1", "j2"]
    running_jobs.discard(JobId("j3"))
    running_jobs.discard(JobId("j3"))
    running_jobs.put(job(3), 0)
    assert list(running_jobs) == ["j1", "j2", "j3"]
    assert list(reversed(running_jobs)) == ["j3", "j2", "j1"]
    assert running_jobs.tail is None
