"""Which jobs stay on a device under a cap."""

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
    """A capacity, needs, residents, the running job (which fits), the coming and the recent ones."""
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
def test_capacity_is_never_exceeded_and_the_running_job_stays(
    situation: tuple[int, dict[str, MemoryNeed], Residents[str], str | None, list[str], list[str]],
) -> None:
    capacity, needs, now, running, coming, recent = situation
    found = plan_residents(capacity, needs, now, running=running, coming=coming, recent=recent)
    assert found.taken(needs) <= capacity
    assert found.scratches <= found.states
    if running is not None:
        assert running in found.scratches


@given(situations())
def test_the_next_job_goes_before_recent_ones(
    situation: tuple[int, dict[str, MemoryNeed], Residents[str], str | None, list[str], list[str]],
) -> None:
    capacity, needs, now, running, coming, recent = situation
    found = plan_residents(capacity, needs, now, running=running, coming=coming, recent=recent)
    if coming:
        held = needs[running].whole if running else 0
        room = capacity - sum(need.fixed for need in needs.values()) - held
        assert (coming[0] in found.scratches) >= (needs[coming[0]].whole <= room)
    assert found.states <= now.states | set(coming) | {running}, "no other job is brought in"


@given(situations())
def test_the_coldest_is_evicted_first(
    situation: tuple[int, dict[str, MemoryNeed], Residents[str], str | None, list[str], list[str]],
) -> None:
    """An evicted job does not fit beside those with higher priority."""
    capacity, needs, now, running, coming, recent = situation
    found = plan_residents(capacity, needs, now, running=running, coming=coming, recent=recent)
    order = [name for name in dict.fromkeys((*coming, *recent)) if name != running]
    for place, name in enumerate(order):
        if name in now.states and name not in found.states:
            before = set(order[:place]) & found.states
            taken = sum(needs[other].state for other in before) + sum(need.fixed for need in needs.values())
            taken += sum(needs[other].scratch for other in before & set(coming[:1]))
            taken += needs[running].whole if running else 0
            assert taken + needs[name].state > capacity


def test_a_state_is_brought_in_before_its_scratch_fits() -> None:
    needs = {"a": MemoryNeed(4, 6), "b": MemoryNeed(4, 6)}
    found = plan_residents(
        14, needs, Residents(frozenset("a"), frozenset("a")), running="a", coming=["b"], recent=["a"]
    )
    assert found == Residents(frozenset("ab"), frozenset("a"))


def test_scratch_is_evicted_before_any_state() -> None:
    needs = {"a": MemoryNeed(4, 4), "b": MemoryNeed(4, 4), "c": MemoryNeed(4, 4)}
    now = Residents(frozenset("abc"), frozenset("a"))
    found = plan_residents(16, needs, now, running=None, coming=["b"], recent=["a", "c"])
    assert found == Residents(frozenset("abc"), frozenset("b"))
