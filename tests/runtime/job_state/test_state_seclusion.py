"""When a team asks its neighbours to stand still, and when it lets them go on: once each."""

from __future__ import annotations

from carpool.runtime.job_state.actions import ReleaseExclusive, RequestExclusive
from carpool.runtime.job_state.state import ExclusiveRequest
from carpool.runtime.job_state.types import Target, WorkerSlot

PROBE = Target(7, (WorkerSlot(2),), probe=5)


def test_a_probe_asks_for_quiet_once_and_ends_it_when_it_was_measured() -> None:
    seclusion = ExclusiveRequest()
    assert (seclusion.ask_for_probe(PROBE), seclusion.is_awaited) == ([RequestExclusive(2, clears=False)], True)
    assert seclusion.ask_for_probe(PROBE) == []
    seclusion.granted()
    assert (seclusion.is_awaited, seclusion.is_probing(7)) == (False, True)
    assert not seclusion.is_probing(6)
    assert seclusion.measured(7) == [ReleaseExclusive()]
    assert not seclusion.is_probing(7)
    assert (seclusion.probe_of(PROBE), seclusion.ask_for_probe(PROBE)) == (0, []), "it has been made"


def test_what_spans_devices_is_not_measured_alone() -> None:
    wide = Target(7, (WorkerSlot(0), WorkerSlot(1)), probe=5)
    seclusion = ExclusiveRequest()
    assert (seclusion.ask_for_probe(wide), seclusion.probe_of(wide)) == ([], 5)


def test_a_probe_that_is_no_longer_wanted_ends_the_quiet_before_it_came() -> None:
    seclusion = ExclusiveRequest()
    seclusion.ask_for_probe(PROBE)
    assert (seclusion.end_probe(), seclusion.is_awaited) == ([ReleaseExclusive()], False)
    assert seclusion.end_probe() == []


def test_neighbours_go_on_when_the_step_that_ran_short_is_made() -> None:
    seclusion = ExclusiveRequest()
    assert (seclusion.ask_for_memory(3, 1), seclusion.is_second_try) == ([RequestExclusive(1)], True)
    assert seclusion.progressed(4) == [], "they have not even come to a standstill"
    seclusion.granted()
    assert seclusion.progressed(3) == []
    assert (seclusion.progressed(4), seclusion.is_second_try) == ([ReleaseExclusive()], False)
    assert seclusion.progressed(5) == []


def test_the_end_lets_everybody_go_on() -> None:
    seclusion = ExclusiveRequest()
    assert seclusion.end() == []
    seclusion.ask_for_memory(3, 1)
    assert (seclusion.end(), seclusion.is_awaited) == ([ReleaseExclusive()], False)
    assert seclusion.end() == []
