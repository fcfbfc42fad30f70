"""Turns on a time-sliced device."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from carpool.runtime.sharing.stride_scheduler import StrideScheduler, TurnGrant


def client_and_steps(granted: TurnGrant[str] | None) -> tuple[str, int] | None:
    return None if granted is None else (granted.client, granted.steps)


def test_equal_turns_share_in_proportion_to_their_fractions() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=1000.0)
    fractions = {"a": 0.5, "b": 0.25, "c": 0.25}
    for client, fraction in fractions.items():
        turns.request(0.0, client, 0, fraction)
    count: Counter[str] = Counter()
    for at in range(400):
        granted = turns.grant_next(float(at))
        assert granted is not None
        count[granted[0]] += 1
        turns.request(at + 1.0, granted[0], 0, fractions[granted[0]])
    assert count == {"a": 200, "b": 100, "c": 100}


def test_a_lower_turn_goes_first() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=1000.0)
    turns.request(0.0, "later", 1, 1.0)
    turns.request(0.0, "first", 0, 1.0)
    assert client_and_steps(turns.grant_next(0.0)) == ("first", 1)
    assert turns.grant_next(0.5) is None, "the device is held"
    turns.release(1.0, "first")
    assert client_and_steps(turns.grant_next(1.0)) == ("later", 1)
    turns.request(1.5, "first", 0, 1.0)
    assert turns.grant_next(1.5) is None
    turns.request(2.0, "later", 1, 1.0)
    assert client_and_steps(turns.grant_next(2.0)) == ("first", 1)


def test_waiting_time_is_limited() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=3.0)
    turns.request(0.0, "later", 1, 1.0)
    order = []
    for at in range(5):
        turns.request(float(at), "first", 0, 1.0)
        granted = turns.grant_next(float(at))
        assert granted is not None
        order.append(granted[0])
        turns.release(at + 0.9, granted[0])
    assert order == ["first", "first", "first", "later", "first"]


def test_a_single_rank_gets_several_short_steps_per_grant() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=1.0, quantum_s=0.02)
    turns.request(0.0, "alone", 0, 1.0, multi_step=True)
    assert client_and_steps(turns.grant_next(0.0)) == ("alone", 1)
    turns.request(0.002, "alone", 0, 1.0, multi_step=True)
    assert client_and_steps(turns.grant_next(0.002)) == ("alone", 10)


KINDS = st.sampled_from(["request", "release", "cancel", "remove", "next"])


@given(st.lists(st.tuples(KINDS, st.sampled_from("abc")), max_size=60))
def test_a_free_device_is_granted_to_a_waiting_client(events: list[tuple[str, str]]) -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=2.0)
    holder = ""
    waiting: set[str] = set()
    at = 0.0
    for kind, client in events:
        at += 0.5
        match kind:
            case "request":
                turns.request(at, client, ord(client), 0.5)
                waiting.add(client)
                holder = "" if holder == client else holder
            case "release" if holder == client:
                turns.release(at, client)
                holder = ""
            case "remove" | "cancel":
                turns.remove(at, client) if kind == "remove" else turns.cancel(at, client)
                waiting.discard(client)
                holder = "" if holder == client else holder
            case "next":
                granted = turns.grant_next(at)
                assert (granted is None) == bool(holder or not waiting)
                if granted is not None:
                    holder = granted[0]
                    waiting.remove(holder)


def request(turns: StrideScheduler[str], at: float, *names: str) -> None:
    for name in names:
        turns.request(at, name, 0, 0.5, multi_step=True, can_queue=True)


def test_the_next_grant_is_queued_during_the_last_step() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=1000.0, quantum_s=0.0)
    request(turns, 0.0, "a", "b")
    assert turns.grant_next(0.0) == TurnGrant("a", 1, 1, 0)
    assert turns.on_ending(1.0, "a", 1) == [TurnGrant("b", 1, 2, 1)]
    assert (turns.holder, turns.last_ended) == ("a", 0)
    assert turns.grant_next(1.5) is None, "it is queued already"
    turns.on_ended(2.0, "a", 1)
    assert (turns.holder, turns.last_ended) == ("b", 1)
    assert turns.on_ending(9.0, "b", 2) == [TurnGrant("a", 1, 3, 2)], "a requested a turn with its last step"


def test_a_queued_grant_that_has_begun_ends_the_one_before() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=1000.0, quantum_s=0.0)
    request(turns, 0.0, "a", "b")
    turns.grant_next(0.0)
    turns.on_ending(1.0, "a", 1)
    assert turns.on_ending(2.0, "b", 2) == [TurnGrant("b", 1, 3, 2)]
    turns.on_ended(2.1, "a", 1)  # comes late
    assert turns.holder == "b"


def test_a_client_with_less_time_may_follow_itself() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=1000.0, quantum_s=0.0)
    request(turns, 0.0, "a", "b")
    turns.grant_next(0.0)
    turns.on_ended(10.0, "a", 1)
    request(turns, 10.0, "a")
    assert turns.grant_next(10.0) == TurnGrant("b", 1, 2, 1)
    assert turns.on_ending(11.0, "b", 2) == [TurnGrant("b", 1, 3, 2)]


def test_a_cancelled_queued_grant_is_replaced_and_its_number_not_reused() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=1000.0, quantum_s=0.0)
    request(turns, 0.0, "a", "b", "c")
    turns.grant_next(0.0)
    turns.on_ending(1.0, "a", 1)
    turns.cancel(1.5, "b")
    turns.on_ended(2.0, "a", 1)
    assert turns.last_ended == 2
    assert turns.grant_next(2.0) == TurnGrant("c", 1, 3, 2)


def test_a_client_without_handoff_is_not_queued() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=1000.0, quantum_s=0.0)
    request(turns, 0.0, "a")
    turns.grant_next(0.0)
    turns.request(0.5, "session", 0, 0.5, multi_step=True)
    assert turns.on_ending(1.0, "a", 1) == []
    turns.on_ended(2.0, "a", 1)
    assert turns.grant_next(2.0) == TurnGrant("session", 1, 2, 1)


def test_two_grants_are_queued_in_order() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=0.0, quantum_s=0.0, max_queued=2)
    request(turns, 0.0, "a", "b", "c")
    turns.grant_next(0.0)
    assert turns.on_ending(1.0, "a", 1) == [TurnGrant("b", 1, 2, 1), TurnGrant("c", 1, 3, 2)]
    turns.on_ended(2.0, "a", 1)
    assert turns.on_ending(2.5, "b", 2) == [TurnGrant("a", 1, 4, 3)], "one more, behind the queued one"
    assert turns.on_ending(3.5, "c", 3) == [TurnGrant("b", 1, 5, 4)]
    assert turns.holder == "c", "it could not have begun before the others ended"
    turns.on_ended(4.0, "b", 2)  # comes late
    assert turns.holder == "c"


def test_a_late_ending_still_counts_as_a_request() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=0.0, quantum_s=0.0, max_queued=2)
    request(turns, 0.0, "a", "b", "c")
    turns.grant_next(0.0)
    turns.on_ending(1.0, "a", 1)
    turns.on_ending(2.0, "c", 3)
    assert turns.on_ending(2.1, "b", 2) == [], "the holder says client comes next"
    turns.on_ended(3.0, "c", 3)
    assert turns.on_ending(4.0, "a", 4) == [TurnGrant("b", 1, 6, 5)]


def test_a_second_grant_is_not_queued_before_a_lower_turn_that_may_request_again() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=1000.0, quantum_s=0.0, max_queued=2)
    for name, turn in (("first", 0), ("later", 1)):
        turns.request(0.0, name, turn, 1.0, can_queue=True)
    turns.grant_next(0.0)
    assert turns.on_ending(1.0, "first", 1) == [TurnGrant("first", 1, 2, 1)]


def test_two_queued_grants_keep_the_proportion_of_the_fractions() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=1000.0, quantum_s=0.0, max_queued=2)
    fractions = {"a": 0.6, "b": 0.3, "c": 0.1}
    for client, fraction in fractions.items():
        turns.request(0.0, client, 0, fraction, can_queue=True)
    count: Counter[str] = Counter()
    for at in range(500):
        turns.grant_next(float(at))
        holder, number = turns.holder, turns.last_ended + 1
        assert holder is not None
        count[holder] += 1
        turns.on_ending(at + 0.9, holder, number)
        turns.on_ended(at + 1.0, holder, number)
    assert all(abs(count[client] - 500 * fraction) <= 5 for client, fraction in fractions.items())


def test_a_cancelled_grant_in_the_middle_blocks_no_other() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=0.0, quantum_s=0.0, max_queued=2)
    request(turns, 0.0, "a", "b", "c")
    turns.grant_next(0.0)
    turns.on_ending(1.0, "a", 1)
    turns.cancel(1.5, "b")
    turns.on_ended(2.0, "a", 1)
    assert (turns.holder, turns.last_ended) == ("c", 2)


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from(["request", "ending", "ended", "cancel", "next"]), st.sampled_from("abc"))),
)
def test_grants_follow_each_other_under_any_events(max_queued: int, events: list[tuple[str, str]]) -> None:
    """A grant begins after an earlier one, and ended grants stay ended."""
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=2.0, quantum_s=0.0, max_queued=max_queued)
    newest: dict[str, int] = {}
    given: list[int] = [0]
    last_ended = 0
    for at, (kind, client) in enumerate(events):
        granted: list[TurnGrant[str]] = []
        match kind:
            case "request" if client != turns.holder:
                request(turns, float(at), client)
            case "ending":
                granted = turns.on_ending(float(at), client, newest.get(client, 0))
            case "ended":
                turns.on_ended(float(at), client, newest.get(client, 0))
            case "cancel":
                turns.cancel(float(at), client)
            case "next":
                granted = [each for each in [turns.grant_next(float(at))] if each is not None]
        for each in granted:
            assert each.after < each.number
            assert each.number > given[-1]
            given.append(each.number)
            newest[each.client] = each.number
        assert last_ended <= turns.last_ended <= given[-1]
        last_ended = turns.last_ended
