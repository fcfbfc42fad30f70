"""Who goes next on a shared device."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from carpool.runtime.sharing.stride_scheduler import StrideScheduler, TurnGrant


def who_and_steps(granted: TurnGrant[str] | None) -> tuple[str, int] | None:
    return None if granted is None else (granted.who, granted.steps)


def test_equal_turns_share_in_proportion_to_their_fractions() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=1000.0)
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
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=1000.0)
    turns.ask(0.0, "later", 1, 1.0)
    turns.ask(0.0, "first", 0, 1.0)
    assert who_and_steps(turns.next(0.0)) == ("first", 1)
    assert turns.next(0.5) is None, "there is one token"
    turns.give_back(1.0, "first")
    assert who_and_steps(turns.next(1.0)) == ("later", 1)
    turns.ask(1.5, "first", 0, 1.0)
    assert turns.next(1.5) is None
    turns.ask(2.0, "later", 1, 1.0)
    assert who_and_steps(turns.next(2.0)) == ("first", 1)


def test_nobody_waits_for_longer_than_allowed() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=3.0)
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
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=1.0, quantum_s=0.02)
    turns.ask(0.0, "alone", 0, 1.0, may_take_several=True)
    assert who_and_steps(turns.next(0.0)) == ("alone", 1)
    turns.ask(0.002, "alone", 0, 1.0, may_take_several=True)
    assert who_and_steps(turns.next(0.002)) == ("alone", 10)


KINDS = st.sampled_from(["ask", "give_back", "withdraw", "leave", "next"])


@given(st.lists(st.tuples(KINDS, st.sampled_from("abc")), max_size=60))
def test_whoever_asks_gets_the_token_once_it_is_free(events: list[tuple[str, str]]) -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=2.0)
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


def asked(turns: StrideScheduler[str], at: float, *names: str) -> None:
    for name in names:
        turns.ask(at, name, 0, 0.5, may_take_several=True, may_inherit=True)


def test_the_heir_is_chosen_while_the_last_step_runs_and_holds_the_token_after_it() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=1000.0, quantum_s=0.0)
    asked(turns, 0.0, "a", "b")
    assert turns.next(0.0) == TurnGrant("a", 1, 1, 0)
    assert turns.ending(1.0, "a", 1) == [TurnGrant("b", 1, 2, 1)]
    assert (turns.holder, turns.over) == ("a", 0)
    assert turns.next(1.5) is None, "it has been told already"
    turns.passed(2.0, "a", 1)
    assert (turns.holder, turns.over) == ("b", 1)
    assert turns.ending(9.0, "b", 2) == [TurnGrant("a", 1, 3, 2)], "the one before has asked with its last step"


def test_an_heir_that_has_begun_shows_that_the_one_before_is_through() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=1000.0, quantum_s=0.0)
    asked(turns, 0.0, "a", "b")
    turns.next(0.0)
    turns.ending(1.0, "a", 1)
    assert turns.ending(2.0, "b", 2) == [TurnGrant("b", 1, 3, 2)]
    turns.passed(2.1, "a", 1)  # comes late
    assert turns.holder == "b"


def test_the_one_that_has_had_less_may_come_after_itself() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=1000.0, quantum_s=0.0)
    asked(turns, 0.0, "a", "b")
    turns.next(0.0)
    turns.passed(10.0, "a", 1)
    asked(turns, 10.0, "a")
    assert turns.next(10.0) == TurnGrant("b", 1, 2, 1)
    assert turns.ending(11.0, "b", 2) == [TurnGrant("b", 1, 3, 2)]


def test_an_heir_that_rests_is_replaced_and_its_number_is_not_used_again() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=1000.0, quantum_s=0.0)
    asked(turns, 0.0, "a", "b", "c")
    turns.next(0.0)
    turns.ending(1.0, "a", 1)
    turns.withdraw(1.5, "b")
    turns.passed(2.0, "a", 1)
    assert turns.over == 2
    assert turns.next(2.0) == TurnGrant("c", 1, 3, 2)


def test_who_cannot_wait_by_itself_is_no_heir() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=1000.0, quantum_s=0.0)
    asked(turns, 0.0, "a")
    turns.next(0.0)
    turns.ask(0.5, "session", 0, 0.5, may_take_several=True)
    assert turns.ending(1.0, "a", 1) == []
    turns.passed(2.0, "a", 1)
    assert turns.next(2.0) == TurnGrant("session", 1, 2, 1)


def test_two_heirs_stand_one_behind_the_other() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=0.0, quantum_s=0.0, most_heirs=2)
    asked(turns, 0.0, "a", "b", "c")
    turns.next(0.0)
    assert turns.ending(1.0, "a", 1) == [TurnGrant("b", 1, 2, 1), TurnGrant("c", 1, 3, 2)]
    turns.passed(2.0, "a", 1)
    assert turns.ending(2.5, "b", 2) == [TurnGrant("a", 1, 4, 3)], "one more, behind the one that knows"
    assert turns.ending(3.5, "c", 3) == [TurnGrant("b", 1, 5, 4)]
    assert turns.holder == "c", "it could not have begun before the others were through"
    turns.passed(4.0, "b", 2)  # comes late
    assert turns.holder == "c"


def test_who_says_late_that_it_was_at_its_end_has_asked_all_the_same() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=0.0, quantum_s=0.0, most_heirs=2)
    asked(turns, 0.0, "a", "b", "c")
    turns.next(0.0)
    turns.ending(1.0, "a", 1)
    turns.ending(2.0, "c", 3)
    assert turns.ending(2.1, "b", 2) == [], "the holder says who comes next"
    turns.passed(3.0, "c", 3)
    assert turns.ending(4.0, "a", 4) == [TurnGrant("b", 1, 6, 5)]


def test_a_second_heir_is_not_named_before_one_with_a_lower_turn_that_may_ask_again() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=1000.0, quantum_s=0.0, most_heirs=2)
    for name, turn in (("first", 0), ("later", 1)):
        turns.ask(0.0, name, turn, 1.0, may_inherit=True)
    turns.next(0.0)
    assert turns.ending(1.0, "first", 1) == [TurnGrant("first", 1, 2, 1)]


def test_two_heirs_keep_the_proportion_of_the_fractions() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=1000.0, quantum_s=0.0, most_heirs=2)
    fractions = {"a": 0.6, "b": 0.3, "c": 0.1}
    for who, fraction in fractions.items():
        turns.ask(0.0, who, 0, fraction, may_inherit=True)
    count: Counter[str] = Counter()
    for at in range(500):
        turns.next(float(at))
        holder, number = turns.holder, turns.over + 1
        assert holder is not None
        count[holder] += 1
        turns.ending(at + 0.9, holder, number)
        turns.passed(at + 1.0, holder, number)
    assert all(abs(count[who] - 500 * fraction) <= 5 for who, fraction in fractions.items())


def test_an_heir_in_the_middle_that_rests_holds_nobody_up() -> None:
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=0.0, quantum_s=0.0, most_heirs=2)
    asked(turns, 0.0, "a", "b", "c")
    turns.next(0.0)
    turns.ending(1.0, "a", 1)
    turns.withdraw(1.5, "b")
    turns.passed(2.0, "a", 1)
    assert (turns.holder, turns.over) == ("c", 2)


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from(["ask", "ending", "passed", "withdraw", "next"]), st.sampled_from("abc"))),
)
def test_grants_come_one_after_another_whatever_happens(most_heirs: int, events: list[tuple[str, str]]) -> None:
    """A grant begins after one that was given out before it, and what is over stays over."""
    turns: StrideScheduler[str] = StrideScheduler(max_wait_s=2.0, quantum_s=0.0, most_heirs=most_heirs)
    newest: dict[str, int] = {}
    given: list[int] = [0]
    over = 0
    for at, (kind, who) in enumerate(events):
        granted: list[TurnGrant[str]] = []
        match kind:
            case "ask" if who != turns.holder:
                asked(turns, float(at), who)
            case "ending":
                granted = turns.ending(float(at), who, newest.get(who, 0))
            case "passed":
                turns.passed(float(at), who, newest.get(who, 0))
            case "withdraw":
                turns.withdraw(float(at), who)
            case "next":
                granted = [each for each in [turns.next(float(at))] if each is not None]
        for each in granted:
            assert each.after < each.number
            assert each.number > given[-1]
            given.append(each.number)
            newest[each.who] = each.number
        assert over <= turns.over <= given[-1]
        over = turns.over
