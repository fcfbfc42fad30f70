"""Known properties of transfers that the simulation must reproduce."""

from __future__ import annotations

from math import isclose
from random import Random

from wiring.flows import Transfers, max_min
from wiring.steps import Made, Session


def check() -> None:
    """Stop unless fair shares and the steps of simple machines come out as they must."""
    assert max_min([(0, 1), (0,)], [10.0, 4.0]) == {(0, 1): 4.0, (0,): 6.0}, "who is held up elsewhere leaves the rest"
    assert max_min([(0,), (0,), (1,)], [10.0, 4.0]) == {(0,): 5.0, (1,): 4.0}
    assert isclose(_step_s("ring", 4, 1), 0.1 + 2 * 3 / 4), "a ring moves 2(n - 1)/n of the gradients"
    assert isclose(_step_s("server", 4, 1), 0.1 + 3.0 + 3.0), "a server takes in and gives out all gradients of all"
    assert isclose(_step_s("tree", 4, 1), 0.1 + 1.0 + 1.0 + 2.0 + 1.0), "two levels up; the root sends twice at once"
    assert isclose(_step_s("ring", 2, 4, compute_s=10.0), 10.25), "only the last of four buckets is not hidden"


def _step_s(exchange: str, num: int, buckets: int, compute_s: float = 0.1) -> float:
    """A gigabyte of gradients over a switch with a gigabyte a second to and from each device."""
    transfers = Transfers([1e9] * (2 * num), [0.0] * (2 * num))
    made = Made("m", compute_s, 0.0, 1e9, 0.0, exchange, buckets, noise=0.0)
    session = Session(
        transfers, made, range(num), [1.0] * num, 1.0, lambda start, end: (2 * start, 2 * end + 1), Random(0)
    )
    transfers.run(lambda: len(session.ends) > 3)
    return session.ends[3] - session.ends[2]
