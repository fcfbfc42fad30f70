"""Grants that wait for memory on a device."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from carpool.runtime.memory.eviction_policy import MemoryNeed
from carpool.runtime.memory.memory_arbiter import Admit, Evict, MemoryArbiter
from carpool.runtime.sharing.stride_scheduler import TurnGrant


def grant(client: str, number: int = 1) -> TurnGrant[str]:
    return TurnGrant(client, 1, number, number - 1)


def with_(capacity: int, **needs: MemoryNeed) -> MemoryArbiter[str]:
    arbiter: MemoryArbiter[str] = MemoryArbiter(capacity)
    for client, need in needs.items():
        arbiter.on_measured(client, need)
    return arbiter


def test_a_grant_waits_until_the_coldest_job_is_swapped_out() -> None:
    arbiter = with_(10, a=MemoryNeed(4), b=MemoryNeed(4), c=MemoryNeed(4))
    for number, client in enumerate("ab"):
        arbiter.enqueue(grant(client, number))
        assert [each.client for each in arbiter.plan(None).granted] == [client]
    arbiter.enqueue(grant("c", 3))
    plan = arbiter.plan("b")
    assert (plan.granted, plan.swap_out) == ([], [Evict("a", wholly=True)])
    assert arbiter.plan("b").swap_out == [], "it is granted once"
    arbiter.on_swapped_out("a", wholly=True)
    assert [each.client for each in arbiter.plan("b").granted] == ["c"]
    assert arbiter.counts["c"].hits == 0


def test_only_the_scratch_of_the_running_job_is_evicted_if_that_is_enough() -> None:
    arbiter = with_(14, a=MemoryNeed(4, 6), b=MemoryNeed(4, 6))
    arbiter.enqueue(grant("a"))
    arbiter.plan(None)
    arbiter.enqueue(grant("b", 2))
    assert arbiter.plan("a").swap_out == [Evict("a", wholly=False)]
    arbiter.on_swapped_out("a", wholly=False)
    assert [each.client for each in arbiter.plan("b").granted] == ["b"]


def test_without_early_eviction_the_running_job_is_asked_after_its_turn() -> None:
    arbiter = with_(14, a=MemoryNeed(4, 6), b=MemoryNeed(4, 6))
    arbiter.evict_early = False
    arbiter.enqueue(grant("a"))
    arbiter.plan(None)
    arbiter.enqueue(grant("b", 2))
    assert arbiter.plan("a").swap_out == []
    assert arbiter.plan("b").swap_out == [Evict("a", wholly=False)]


def test_an_unmeasured_job_is_alone_on_the_device() -> None:
    arbiter = with_(10, a=MemoryNeed(1))
    arbiter.enqueue(grant("a"))
    arbiter.plan(None)
    arbiter.enqueue(grant("new", 2))
    assert arbiter.plan("new").swap_out == [Evict("a", wholly=True)]
    arbiter.on_swapped_out("a", wholly=True)
    assert [each.client for each in arbiter.plan("new").granted] == ["new"]
    arbiter.enqueue(grant("a", 3))
    assert arbiter.plan("new").granted == []
    arbiter.on_measured("new", MemoryNeed(5))
    arbiter.on_swapped_out("new", wholly=True)
    assert [each.client for each in arbiter.plan("a").granted] == ["a"]


def test_the_likely_next_job_is_swapped_in_ahead_without_evicting_the_running_one() -> None:
    arbiter = with_(8, a=MemoryNeed(4), b=MemoryNeed(4), c=MemoryNeed(6))
    arbiter.enqueue(grant("a"))
    arbiter.plan(None)
    assert arbiter.plan("a", likely_next="c").swap_in == []
    assert arbiter.plan("a", likely_next="b").swap_in == [Admit("b", wholly=True)]
    arbiter.enqueue(grant("b", 2))
    assert [each.client for each in arbiter.plan("a").granted] == ["b"]
    assert arbiter.counts["b"].hits == 1


def test_only_the_state_is_swapped_in_ahead_if_the_scratch_does_not_fit() -> None:
    arbiter = with_(14, a=MemoryNeed(4, 6), b=MemoryNeed(4, 6))
    arbiter.enqueue(grant("a"))
    arbiter.plan(None)
    assert arbiter.plan("a", likely_next="b").swap_in == [Admit("b", wholly=False)]
    assert arbiter.taken == 14
    arbiter.enqueue(grant("b", 2))
    assert arbiter.counts["b"].hits == 1
    assert arbiter.plan("a").swap_out == [Evict("a", wholly=False)], "its state stays"
    arbiter.on_swapped_out("a", wholly=False)
    assert [each.client for each in arbiter.plan("b").granted] == ["b"]


def test_idle_jobs_are_evicted_while_another_runs() -> None:
    arbiter = with_(12, a=MemoryNeed(4), b=MemoryNeed(4), c=MemoryNeed(10))
    for number, client in enumerate("ab"):
        arbiter.enqueue(grant(client, number))
        arbiter.plan(None)
    plan = arbiter.plan("b", likely_next="c")
    assert (plan.swap_in, plan.swap_out) == ([], [Evict("a", wholly=True)]), "never the running job"
    arbiter.on_swapped_out("a", wholly=True)
    arbiter.enqueue(grant("c", 3))
    assert arbiter.plan("b").swap_out == [Evict("b", wholly=True)], "the idle job is already out"


def test_without_swapping_ahead_idle_jobs_are_not_evicted_early() -> None:
    arbiter = with_(12, a=MemoryNeed(4), b=MemoryNeed(4), c=MemoryNeed(10))
    arbiter.swap_ahead = False
    for number, client in enumerate("ab"):
        arbiter.enqueue(grant(client, number))
        arbiter.plan(None)
    assert arbiter.plan("b", likely_next="c").swap_out == []


def test_a_job_that_is_being_evicted_is_admitted_after_its_eviction() -> None:
    arbiter = with_(8, a=MemoryNeed(4), b=MemoryNeed(6))
    arbiter.enqueue(grant("a"))
    arbiter.plan(None)
    arbiter.enqueue(grant("b", 2))
    assert arbiter.plan("b").swap_out == [Evict("a", wholly=True)]
    arbiter.cancel("b")
    arbiter.enqueue(grant("a", 3))
    assert arbiter.plan("a").granted == [], "its memory would be freed while it runs"
    arbiter.on_swapped_out("a", wholly=True)
    assert [each.client for each in arbiter.plan("a").granted] == ["a"]


def test_a_job_larger_than_the_cap_is_alone_on_the_device() -> None:
    arbiter = with_(8, a=MemoryNeed(4), b=MemoryNeed(10))
    arbiter.enqueue(grant("a"))
    arbiter.plan(None)
    arbiter.enqueue(grant("b", 2))
    assert arbiter.plan("b").swap_out == [Evict("a", wholly=True)]
    arbiter.on_swapped_out("a", wholly=True)
    assert [each.client for each in arbiter.plan("b").granted] == ["b"]


NEEDS = st.builds(MemoryNeed, st.integers(0, 8), st.integers(0, 8))


@given(
    st.fixed_dictionaries(dict.fromkeys("abcd", NEEDS)),
    st.integers(16, 24),
    st.lists(st.sampled_from("abcd"), max_size=12),
    st.booleans(),
    st.booleans(),
)
def test_every_grant_is_admitted_and_the_cap_always_holds(
    needs: dict[str, MemoryNeed], capacity: int, order: list[str], swap_ahead: bool, evict_early: bool
) -> None:
    """Play the workers: each leaves when it is granted to, as soon as it does not compute."""
    arbiter: MemoryArbiter[str] = MemoryArbiter(capacity, swap_ahead, evict_early, dict(needs))
    running: str | None = None
    granted: list[str] = []
    leaving: list[Evict[str]] = []
    for number, client in enumerate(order):
        arbiter.enqueue(grant(client, number))
        for now in (running, client):  # during the last step of the running job, and after it
            while True:
                plan = arbiter.plan(now, likely_next=order[number + 1] if order[number + 1 :] else None)
                assert arbiter.taken <= capacity
                granted += [each.client for each in plan.granted]
                leaving += plan.swap_out
                free = [each for each in leaving if each.client != now or now == client]
                if not free:
                    break
                leaving = [each for each in leaving if each not in free]
                for each in free:
                    arbiter.on_swapped_out(each.client, wholly=each.wholly)
        running = client
        assert granted == order[: number + 1]
