"""Which machines are released, and how many are asked for."""

from __future__ import annotations

import pytest

from carpool.backends.engines.scaling import NodeUse, Scaler, Unmet, missing_nodes


@pytest.mark.parametrize(
    ("free", "waiting", "size", "expected"),
    [
        ([], [], 4, Unmet(0, 0)),
        ([2], [1, 1], 4, Unmet(2, 0)),
        ([2, 2], [4], 4, Unmet(1, 1)),  # fragments do not serve a job that needs four together
        ([1], [1, 1, 1, 1, 1], 4, Unmet(5, 1)),
        ([], [8], 4, Unmet(1, 2)),
        ([0], [10], 4, Unmet(1, 3)),
    ],
)
def test_what_is_missing_for_waiting_jobs(free: list[int], waiting: list[int], size: int, expected: Unmet) -> None:
    assert missing_nodes(free, waiting, size) == expected


def test_demand_counts_when_it_lasts_for_two_decisions() -> None:
    scaler, busy = Scaler(), NodeUse("a", 2, 0)
    assert scaler.decide(0.0, [busy], [1], 2).nodes == 1
    decided = scaler.decide(1.0, [busy], [1], 2)
    assert (decided.nodes, decided.is_short) == (2, True)
    assert scaler.decide(2.0, [busy], [], 2).nodes == 1


def test_an_idle_machine_is_released_after_a_while_and_a_drained_one_at_once() -> None:
    scaler = Scaler(idle_s=10.0)
    nodes = [NodeUse("idle", 2, 2), NodeUse("busy", 2, 1), NodeUse("drained", 2, 2, is_drained=True)]
    assert scaler.decide(0.0, nodes, [], 2).release == ("drained",)
    assert scaler.decide(9.0, nodes, [], 2).release == ("drained",)
    decided = scaler.decide(10.0, nodes, [], 2)
    assert decided.release == ("drained", "idle")
    assert decided.nodes == 1


def test_time_without_jobs_counts_anew_after_a_job_and_waiting_jobs_keep_machines() -> None:
    scaler = Scaler(idle_s=10.0)
    scaler.decide(0.0, [NodeUse("a", 2, 2)], [], 2)
    scaler.decide(9.0, [NodeUse("a", 2, 1)], [], 2)
    assert scaler.decide(11.0, [NodeUse("a", 2, 2)], [], 2).release == ()
    assert scaler.decide(30.0, [NodeUse("a", 2, 2)], [3], 2).release == ()
    assert scaler.decide(31.0, [NodeUse("a", 2, 2)], [], 2).release == ("a",)


def test_without_a_limit_no_idle_machine_is_released() -> None:
    scaler = Scaler()
    for at in (0.0, 1e6):
        assert scaler.decide(at, [NodeUse("a", 1, 1)], [], 1).release == ()
