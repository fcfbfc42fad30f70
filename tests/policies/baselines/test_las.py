"""Least attained service: queues, crossings, promotion, and a memory that never changes a decision."""

import json
from typing import cast

import pytest
from hypothesis import given, settings

from carpool.core.errors import InputError
from carpool.core.messages import Assign
from carpool.core.policy import Plan, Snapshot
from carpool.core.topology import Cluster
from carpool.policies.baselines.las import Las
from carpool.policies.registry import parse_policy
from carpool.testing import Driven, check_state, drive
from carpool.testing.scenarios import job
from carpool.testing.strategies import Scenario, random_scenarios

ONE = Cluster.build([(1, 1, "V100")])


def moves(run: Driven) -> list[tuple[float, str, list[int]]]:
    return [
        (at, order.job, list(order.allocation.devices()) if isinstance(order, Assign) else [])
        for at, order in run.orders
    ]


def test_a_job_is_displaced_when_it_crosses_a_threshold() -> None:
    arrivals = [job("a", work=20.0), job("b", work=20.0, at=4.0)]
    assert moves(drive(Las(thresholds=(10.0,), promote=0.0), ONE, arrivals)) == [
        (0.0, "a", [0]),
        (10.0, "a", []),  # crosses: b is in the first queue
        (10.0, "b", [0]),
        (20.0, "b", []),  # both in the last queue: first submitted, first served
        (20.0, "a", [0]),
        (30.0, "b", [0]),
    ]


def test_width_counts() -> None:
    two = Cluster.build([(1, 2, "V100")])
    arrivals = [job("wide", 2, 20.0), job("b", 1, 5.0, at=1.0)]
    assert moves(drive(Las(thresholds=(10.0,), promote=0.0), two, arrivals))[1:3] == [
        (5.0, "wide", []),
        (5.0, "b", [0]),
    ]


def test_newcomers_do_not_displace_their_own_queue() -> None:
    arrivals = [job("a", work=9.0), job("b", work=1.0, at=4.0)]
    assert moves(drive(Las(thresholds=(10.0,)), ONE, arrivals)) == [(0.0, "a", [0]), (9.0, "b", [0])]


def test_a_starved_job_starts_again_in_the_first_queue() -> None:
    stream = [job(f"s{i}", work=6.0, at=2.0 + 6.0 * i) for i in range(10)]
    arrivals = [job("a", work=20.0), *stream]
    starved = moves(drive(Las(thresholds=(8.0,), promote=0.0), ONE, arrivals))
    assert [at for at, name, devices in starved if name == "a" and devices] == [0.0, 68.0]
    promoted = moves(drive(Las(thresholds=(8.0,), promote=3.0), ONE, arrivals))
    # it has run 8 s when it is displaced at 8, so it is promoted 24 s later, and crosses again after 8 s more
    assert [(at, bool(devices)) for at, name, devices in promoted if name == "a"][:4] == [
        (0.0, True),
        (8.0, False),
        (32.0, True),
        (40.0, False),
    ]


def test_a_gang_starts_as_soon_as_what_it_lacked_is_free() -> None:
    three = Cluster.build([(1, 3, "V100")])
    arrivals = [job("a", 1, 5.0), job("b", 1, 9.0), job("c", 1, 20.0), job("wide", 2, 3.0, at=1.0)]
    assert moves(drive(Las(thresholds=(100.0,)), three, arrivals))[3:] == [(9.0, "wide", [0, 1])]


def test_says_nothing_while_nobody_waits() -> None:
    run = drive(Las(thresholds=(1.0, 2.0, 3.0)), ONE, [job("a", work=50.0)])
    assert [record.at for record in run.records if record.planned is not None] == [0.0]


def test_the_form_of_the_pollux_study_can_be_written_down() -> None:
    policy = parse_policy("las:thresholds=57600:promote=0:placement=emptiest")
    assert policy == Las(thresholds=(57600.0,), promote=0.0, placement="emptiest")


@pytest.mark.parametrize("thresholds", [(2.0, 1.0), (0.0, 1.0), (1.0, 1.0)])
def test_thresholds_ascend(thresholds: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="do not ascend"):
        Las(thresholds=thresholds)


class Forgetful(Las):
    """Decides a second time without what the plan before had found out, and compares."""

    def plan(self, view: Snapshot) -> Plan:
        plan = Las.plan(self, view)
        note = view.note
        assert json.loads(json.dumps(note)) == note
        if note is not None:
            *_, due, _, fresh, _ = cast(list[object], note)
            view.note = [1_000, [1_000, 0], 0.0, due, -1, fresh, []]
        again = Las.plan(self, view)
        view.note = note
        assert plan.changes == again.changes
        return plan


@settings(max_examples=60)
@given(random_scenarios(14, elastic=False, trouble=False))
def test_memory_saves_time_and_changes_nothing(ground: Scenario) -> None:
    drive(Forgetful(thresholds=(6.0, 20.0), promote=3.0), ground.cluster, ground.arrivals, check=check_state)
