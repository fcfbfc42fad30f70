"""Who goes next on a shared device."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from carpool.runtime.turns import Turns


def test_equal_turns_share_in_proportion_to_their_fractions() -> None:
    turns: Turns[str] = Turns(max_wait_s=1000.0)
    fractions = {"a": 0.5, "b": 0.25, "c": 0.25}
    for who, fraction in fractions.items():
        turns.ask(0.0, who, 0, fraction)
    count: Counter[str] = Counter()
    for at in range(400):
        granted = turns.next(float(at))
        assert granted is not None
        count[granted[0]] += 1
        turns.ask(at + 1.0, granted[0], 0, fractions[granted[0]])
    assert count == {"a": 200, "b": 100, "c": 100}


def test_a_lower_turn_goes_first_and_a_higher_one_while_it_waits() -> None:
    turns: Turns[str] = Turns(max_wait_s=1000.0)
    turns.ask(0.0, "later", 1, 1.0)
    turns.ask(0.0, "first", 0, 1.0)
    assert turns.next(0.0) == ("first", 1)
    assert turns.next(0.5) is None, "there is one token"
    turns.give_back(1.0, "first")
    assert turns.next(1.0) == ("later", 1)
    turns.ask(1.5, "first", 0, 1.0)
    assert turns.next(1.5) is None
    turns.ask(2.0, "later", 1, 1.0)
    assert turns.next(2.0) == ("first", 1)


def test_nobody_waits_for_longer_than_allowed() -> None:
    turns: Turns[str] = Turns(max_wait_s=3.0)
    turns.ask(0.0, "later", 1, 1.0)
    order = []
    for at in range(5):
        turns.ask(float(at), "first", 0, 1.0)
        granted = turns.next(float(at))
        assert granted is not None
        order.append(granted[0])
        turns.give_back(at + 0.9, granted[0])
    assert order == ["first", "first", "first", "later", "first"]


def test_short_steps_are_granted_in_numbers_to_those_that_work_alone() -> None:
    turns: Turns[str] = Turns(max_wait_s=1.0, quantum_s=0.02)
    turns.ask(0.0, "alone", 0, 1.0, may_take_several=True)
    assert turns.next(0.0) == ("alone", 1)
    turns.ask(0.002, "alone", 0, 1.0, may_take_several=True)
    assert turns.next(0.002) == ("alone", 10)


KINDS = st.sampled_from(["ask", "give_back", "withdraw", "leave", "next"])


@given(st.lists(st.tuples(KINDS, st.sampled_from("abc")), max_size=60))
def test_whoever_asks_gets_the_token_once_it_is_free(events: list[tuple[str, str]]) -> None:
    turns: Turns[str] = Turns(max_wait_s=2.0)
    holder = ""
    asking: set[str] = set()
    at = 0.0
    for kind, who in events:
        at += 0.5
        match kind:
            case "ask":
                turns.ask(at, who, ord(who), 0.5)
                asking.add(who)
                holder = "" if holder == who else holder
            case "give_back" if holder == who:
                turns.give_back(at, who)
                holder = ""
            case "leave" | "withdraw":
                turns.leave(at, who) if kind == "leave" else turns.withdraw(at, who)
                asking.discard(who)
                holder = "" if holder == who else holder
            case "next":
                granted = turns.next(at)
                assert (granted is None) == bool(holder or not asking)
                if granted is not None:
                    holder = granted[0]
                    asking.remove(holder)
