"""The cycle collector in a daemon: what has survived a long walk is put aside, and looked at again in time."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from carpool.service.daemon.gc_tuning import GcFreezer


class Clock:
    """Time that goes on by so much whenever somebody looks."""

    def __init__(self, step_s: float) -> None:
        self.now = 0.0
        self.step_s = step_s

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


class Node:
    """Something that can refer to itself."""

    me: "Node"


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    callbacks = list(gc.callbacks)
    yield
    assert gc.callbacks == callbacks
    gc.unfreeze()


def ring() -> Node:
    node = Node()
    node.me = node
    return node


@pytest.mark.parametrize(("step_s", "is_put_aside"), [(1.0, True), (0.001, False)])
def test_what_survives_a_long_walk_is_put_aside(step_s: float, is_put_aside: bool) -> None:
    with GcFreezer(slow_s=0.5, clock=Clock(step_s)):
        before = gc.get_freeze_count()
        new = [[number] for number in range(1000)]
        gc.collect()
        assert (gc.get_freeze_count() > before + 900) == is_put_aside
        assert len(new) == 1000
    assert gc.get_freeze_count() == 0


def test_a_short_walk_over_new_things_is_no_occasion() -> None:
    with GcFreezer(slow_s=0.5, clock=Clock(1.0)):
        before = gc.get_freeze_count()
        gc.collect(1)
        assert gc.get_freeze_count() == before


def test_cycles_among_what_was_put_aside_are_found_in_time() -> None:
    clock, node = Clock(0.0), ring()
    gone = weakref.ref(node)
    with GcFreezer(rescan_s=100.0, clock=clock):
        del node
        gc.collect()
        assert gone() is not None, "it lies where nobody walks"
        clock.now = 101.0
        gc.collect()
        assert gone() is None


def test_what_is_put_aside_is_freed_when_nobody_needs_it() -> None:
    node = Node()
    gone = weakref.ref(node)
    with GcFreezer():
        del node
        assert gone() is None
