"""When a running job's state is mirrored."""

from __future__ import annotations

from itertools import pairwise

from carpool.runtime.job_state.actions import CopyMirror, DropMirror, Mirror, Send
from carpool.runtime.job_state.state_copies import StateCopies
from carpool.runtime.job_state.types import JobOptions, StateCopy
from carpool.runtime.process.protocol import Publish


def times_of_mirrors(took_s: float, until: float) -> list[float]:
    """When mirrors start, if each takes so long."""
    copies = StateCopies(JobOptions(mirror_s=2.0), ())
    copies.on_epoch_start(0.0)
    found: list[float] = []
    for tick in range(int(until * 10)):
        at = tick / 10
        if copies.is_publishing and at >= found[-1] + took_s:
            copies.on_published(at, 1, tick)
        actions = copies.due(at, tick + 1, 1)
        if any(isinstance(action, Send) and isinstance(action.message, Publish) for action in actions):
            found.append(at)
    return found


def test_small_states_are_mirrored_as_often_as_asked() -> None:
    found = times_of_mirrors(0.0, 20.0)  # the clock ticks every tenth, so each seems to take one
    assert all(later - earlier <= 2.7 for earlier, later in pairwise(found))
    assert len(found) >= 7


def test_large_states_are_mirrored_less_often() -> None:
    first, second, third = times_of_mirrors(0.8, 50.0)
    assert first == 2.0
    assert second - first > 15.0
    assert third - second > 15.0


def test_complete_mirrors_are_copied_to_disk_where_another_machine_fetches_them() -> None:
    for copies_mirrors in (False, True):
        copies = StateCopies(JobOptions(copies_mirrors=copies_mirrors), ())
        copies.publish(1)
        first = copies.on_published(0.0, 1, 10)
        copies.publish(1)
        second = copies.on_published(2.0, 1, 20)
        wanted = [[CopyMirror(Mirror(1))], [CopyMirror(Mirror(2))]] if copies_mirrors else [[], []]
        assert [first, second] == [wanted[0], [*wanted[1], DropMirror(Mirror(1), reusable=True)]]


def test_a_job_resumes_from_the_copy_of_a_mirror_that_counts_as_no_checkpoint() -> None:
    saved, mirrored = StateCopy(10, path="step"), StateCopy(12, path="mirror", is_mirror_file=True)
    copies = StateCopies(JobOptions(), (saved, mirrored))
    assert (copies.step, copies.saved_step) == (12, 10)
    assert copies.fall_back_from("mirror")
    assert (copies.step, copies.saved_step) == (10, 10)
