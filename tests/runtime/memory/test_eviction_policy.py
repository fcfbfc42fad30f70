"""Whose memory lies on a device under a cap."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from carpool.runtime.memory.eviction_policy import MemoryNeed, Residents, plan_residents

NAMES = "abcdef"
SIZES = st.integers(0, 10)
NEEDS = st.fixed_dictionaries({name: st.builds(MemoryNeed, SIZES, SIZES, st.integers(0, 2)) for name in NAMES})
ORDERS = st.permutations(NAMES)


@st.composite
def situations(draw: st.DrawFn) -> tuple[int, dict[str, MemoryNeed], Residents[str], str | None, list[str], list[str]]:
    """A device, what is on it, who computes, who comes and who was there last; what computes fits."""
    needs = draw(NEEDS)
    running = draw(st.none() | st.sampled_from(NAMES))
    states = draw(st.frozensets(st.sampled_from(NAMES)))
    scratches = frozenset(name for name in states if draw(st.booleans()))
    fixed = sum(need.fixed for need in needs.values())
    capacity = fixed + draw(st.integers(0, 60)) + (needs[running].whole if running else 0)
    order = draw(ORDERS)
    cut = draw(st.integers(0, len(NAMES)))
    coming = [name for name in order[:cut] if name != running]
    return capacity, needs, Residents(states, scratches), running, coming, list(draw(ORDERS))


@given(situations())
def test_never_over_capacity_and_what_computes_stays(
    situation: tuple[int, dict[str, MemoryNeed], Residents[str], str | None, list[str], list[str]],
) -> None:
    capacity, needs, now, running, coming, recent = situation
    found = plan_residents(capacity, needs, now, running=running, coming=coming, recent=recent)
    assert found.taken(needs) <= capacity
    assert found.scratches <= found.states
    if running is not None:
        assert running in found.scratches


@given(situations())
def test_the_next_one_comes_before_everybody_who_only_was_there(
    situation: tuple[int, dict[str, MemoryNeed], Residents[str], str | None, list[str], list[str]],
) -> None:
    capacity, needs, now, running, coming, recent = situation
    found = plan_residents(capacity, needs, now, running=running, coming=coming, recent=recent)
    if coming:
        held = needs[running].whole if running else 0
        room = capacity - sum(need.fixed for need in needs.values()) - held
        assert (coming[0] in found.scratches) >= (needs[coming[0]].whole <= room)
    assert found.states <= now.states | set(coming) | {running}, "nobody else is brought in"


@given(situations())
def test_the_coldest_goes_first(
    situation: tuple[int, dict[str, MemoryNeed], Residents[str], str | None, list[str], list[str]],
) -> None:
    """Whoever is let go does not fit beside all that stand before it in line."""
    capacity, needs, now, running, coming, recent = situation
    found = plan_residents(capacity, needs, now, running=running, coming=coming, recent=recent)
    line = [name for name in dict.fromkeys((*coming, *recent)) if name != running]
    for place, name in enumerate(line):
        if name in now.states and name not in found.states:
            before = set(line[:place]) & found.states
            taken = sum(needs[other].state for other in before) + sum(need.fixed for need in needs.values())
            taken += sum(needs[other].scratch for other in before & set(coming[:1]))
            taken += needs[running].whole if running else 0
            assert taken + needs[name].state > capacity


def test_a_state_comes_before_there_is_room_for_its_scratch() -> None:
    needs = {"a": MemoryNeed(4, 6), "b": MemoryNeed(4, 6)}
    found = plan_residents(
        14, needs, Residents(frozenset("a"), frozenset("a")), running="a", coming=["b"], recent=["a"]
    )
    assert found == Residents(frozenset("ab"), frozenset("a"))


def test_scratch_goes_before_any_state() -> None:
    needs = {"a": MemoryNeed(4, 4), "b": MemoryNeed(4, 4), "c": MemoryNeed(4, 4)}
    now = Residents(frozenset("abc"), frozenset("a"))
    found = plan_residents(16, needs, now, running=None, coming=["b"], recent=["a", "c"])
    assert found == Residents(frozenset("abc"), frozenset("b"))
