"""Grants that wait for room on a device."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from carpool.runtime.memory.eviction_policy import MemoryNeed
from carpool.runtime.memory.memory_arbiter import Admit, Evict, MemoryArbiter
from carpool.runtime.sharing.stride_scheduler import TurnGrant


def grant(who: str, number: int = 1) -> TurnGrant[str]:
    return TurnGrant(who, 1, number, number - 1)


def with_(capacity: int, **needs: MemoryNeed) -> MemoryArbiter[str]:
    berths: MemoryArbiter[str] = MemoryArbiter(capacity)
    for who, need in needs.items():
        berths.measured(who, need)
    return berths


def test_the_next_one_waits_until_the_coldest_has_left() -> None:
    berths = with_(10, a=MemoryNeed(4), b=MemoryNeed(4), c=MemoryNeed(4))
    for number, who in enumerate("ab"):
        berths.want(grant(who, number))
        assert [each.who for each in berths.moves(None).told] == [who]
    berths.want(grant("c", 3))
    moves = berths.moves("b")
    assert (moves.told, moves.leave) == ([], [Evict("a", wholly=True)])
    assert berths.moves("b").leave == [], "it is told once"
    berths.left("a", wholly=True)
    assert [each.who for each in berths.moves("b").told] == ["c"]
    assert berths.counts["c"].hits == 0


def test_scratch_of_the_one_that_computes_is_enough_where_the_next_one_fits_into_it() -> None:
    berths = with_(14, a=MemoryNeed(4, 6), b=MemoryNeed(4, 6))
    berths.want(grant("a"))
    berths.moves(None)
    berths.want(grant("b", 2))
    assert berths.moves("a").leave == [Evict("a", wholly=False)]
    berths.left("a", wholly=False)
    assert [each.who for each in berths.moves("b").told] == ["b"]


def test_without_early_release_the_one_that_computes_is_asked_when_it_is_through() -> None:
    berths = with_(14, a=MemoryNeed(4, 6), b=MemoryNeed(4, 6))
    berths.leaves_early = False
    berths.want(grant("a"))
    berths.moves(None)
    berths.want(grant("b", 2))
    assert berths.moves("a").leave == []
    assert berths.moves("b").leave == [Evict("a", wholly=False)]


def test_a_newcomer_has_the_device_for_itself_until_it_is_measured() -> None:
    berths = with_(10, a=MemoryNeed(1))
    berths.want(grant("a"))
    berths.moves(None)
    berths.want(grant("new", 2))
    assert berths.moves("new").leave == [Evict("a", wholly=True)]
    berths.left("a", wholly=True)
    assert [each.who for each in berths.moves("new").told] == ["new"]
    berths.want(grant("a", 3))
    assert berths.moves("new").told == []
    berths.measured("new", MemoryNeed(5))
    berths.left("new", wholly=True)
    assert [each.who for each in berths.moves("a").told] == ["a"]


def test_who_comes_soon_is_let_in_before_its_turn_but_never_for_the_one_that_computes() -> None:
    berths = with_(8, a=MemoryNeed(4), b=MemoryNeed(4), c=MemoryNeed(6))
    berths.want(grant("a"))
    berths.moves(None)
    assert berths.moves("a", soon="c").come == []
    assert berths.moves("a", soon="b").come == [Admit("b", wholly=True)]
    berths.want(grant("b", 2))
    assert [each.who for each in berths.moves("a").told] == ["b"]
    assert berths.counts["b"].hits == 1


def test_who_fits_only_into_the_scratch_of_the_one_that_computes_brings_its_state_in_before() -> None:
    berths = with_(14, a=MemoryNeed(4, 6), b=MemoryNeed(4, 6))
    berths.want(grant("a"))
    berths.moves(None)
    assert berths.moves("a", soon="b").come == [Admit("b", wholly=False)]
    assert berths.taken == 14
    berths.want(grant("b", 2))
    assert berths.counts["b"].hits == 1
    assert berths.moves("a").leave == [Evict("a", wholly=False)], "its state may stay"
    berths.left("a", wholly=False)
    assert [each.who for each in berths.moves("b").told] == ["b"]


def test_those_who_rest_make_room_while_another_computes() -> None:
    berths = with_(12, a=MemoryNeed(4), b=MemoryNeed(4), c=MemoryNeed(10))
    for number, who in enumerate("ab"):
        berths.want(grant(who, number))
        berths.moves(None)
    moves = berths.moves("b", soon="c")
    assert (moves.come, moves.leave) == ([], [Evict("a", wholly=True)]), "never the one that computes"
    berths.left("a", wholly=True)
    berths.want(grant("c", 3))
    assert berths.moves("b").leave == [Evict("b", wholly=True)], "so this is all that is left to do"


def test_nobody_makes_room_before_it_is_asked_without_speculation() -> None:
    berths = with_(12, a=MemoryNeed(4), b=MemoryNeed(4), c=MemoryNeed(10))
    berths.speculates = False
    for number, who in enumerate("ab"):
        berths.want(grant(who, number))
        berths.moves(None)
    assert berths.moves("b", soon="c").leave == []


def test_who_has_been_told_to_leave_comes_back_when_it_has_left() -> None:
    berths = with_(8, a=MemoryNeed(4), b=MemoryNeed(6))
    berths.want(grant("a"))
    berths.moves(None)
    berths.want(grant("b", 2))
    assert berths.moves("b").leave == [Evict("a", wholly=True)]
    berths.give_up("b")
    berths.want(grant("a", 3))
    assert berths.moves("a").told == [], "else its memory would go while it computes"
    berths.left("a", wholly=True)
    assert [each.who for each in berths.moves("a").told] == ["a"]


def test_one_that_is_larger_than_the_cap_has_the_device_alone() -> None:
    berths = with_(8, a=MemoryNeed(4), b=MemoryNeed(10))
    berths.want(grant("a"))
    berths.moves(None)
    berths.want(grant("b", 2))
    assert berths.moves("b").leave == [Evict("a", wholly=True)]
    berths.left("a", wholly=True)
    assert [each.who for each in berths.moves("b").told] == ["b"]


NEEDS = st.builds(MemoryNeed, st.integers(0, 8), st.integers(0, 8))


@given(
    st.fixed_dictionaries(dict.fromkeys("abcd", NEEDS)),
    st.integers(16, 24),
    st.lists(st.sampled_from("abcd"), max_size=12),
    st.booleans(),
    st.booleans(),
)
def test_every_turn_comes_and_the_cap_holds_at_every_moment(
    needs: dict[str, MemoryNeed], capacity: int, order: list[str], speculates: bool, leaves_early: bool
) -> None:
    """Play the workers: each leaves when it is told to, as soon as it does not compute."""
    berths: MemoryArbiter[str] = MemoryArbiter(capacity, speculates, leaves_early, dict(needs))
    running: str | None = None
    told: list[str] = []
    leaving: list[Evict[str]] = []
    for number, who in enumerate(order):
        berths.want(grant(who, number))
        for now in (running, who):  # the last step of the one before, and then its end
            while True:
                moves = berths.moves(now, soon=order[number + 1] if order[number + 1 :] else None)
                assert berths.taken <= capacity
                told += [each.who for each in moves.told]
                leaving += moves.leave
                free = [each for each in leaving if each.who != now or now == who]
                if not free:
                    break
                leaving = [each for each in leaving if each not in free]
                for each in free:
                    berths.left(each.who, wholly=each.wholly)
        running = who
        assert told == order[: number + 1]
