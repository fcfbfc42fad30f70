"""What holds in every simulated run: work is done exactly once, and nobody waits beside devices that would do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.messages import JobFinished
from carpool.core.model import Allocation, JobId, Phase
from carpool.core.placement import placement_rule
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.sim.failures import ScheduledFailures
from carpool.testing import Driven, UserActions, drive
from carpool.testing.rig import check_state
from carpool.testing.scenarios import job
from carpool.testing.strategies import Scenario, random_scenarios


def worked(run: Driven, ground: Scenario) -> dict[JobId, float]:
    """Σ rate × time of every job, from its orders alone; the plain world does count/asked units a second."""
    asked = {arrival.spec.id: arrival.spec.devices for arrival in ground.arrivals}
    done = dict.fromkeys(asked, 0.0)
    since: dict[JobId, tuple[float, float]] = {}
    ends = [
        (record.at, fact.job, None) for record in run.records for fact in record.facts if isinstance(fact, JobFinished)
    ]
    changes: list[tuple[float, JobId, Allocation | None]] = [
        *[(at, order.job, getattr(order, "allocation", None)) for at, order in run.orders],
        *ends,
    ]
    for at, name, allocation in sorted(changes, key=lambda change: change[0]):
        if name in since:
            start, rate = since.pop(name)
            done[name] += rate * (at - start)
        if allocation is not None:
            since[name] = (at, allocation.num_devices / asked[name])
    return done


@settings(max_examples=40)
@given(random_scenarios(), st.booleans())
def test_work_is_conserved(ground: Scenario, bypass: bool) -> None:
    """However often it was stopped and moved, a finished job has done its work, no more and no less."""
    failures = (ScheduledFailures(ground.mishaps), UserActions(ground.actions))
    run = drive(Fifo(bypass=bypass), ground.cluster, ground.arrivals, failures=failures, check=check_state)
    done = worked(run, ground)
    for arrival in ground.arrivals:
        if run.outcome(arrival.spec.id) is Phase.FINISHED:
            assert done[arrival.spec.id] == pytest.approx(arrival.spec.work, abs=1e-9), run.story(arrival.spec.id)


@settings(max_examples=40)
@given(random_scenarios(trouble=False), st.sampled_from(("consolidated", "pooled", "emptiest")))
def test_nobody_waits_beside_devices_that_would_do(ground: Scenario, placement: str) -> None:
    """Under fifo with bypass, whoever waits after a decision does not fit."""
    rule = placement_rule(placement)

    def nobody_fits(scheduler: Scheduler) -> None:
        check_state(scheduler)
        view = scheduler.snapshot()
        for name in view.waiting:
            spec = view.jobs[name].spec
            for kind in spec.kinds or view.cluster.kinds:
                assert rule(view.occupancy, kind, spec.devices) is None, f"{name} would fit on {kind}"

    drive(Fifo(bypass=True, placement=placement), ground.cluster, ground.arrivals, check=nobody_fits)


@settings(max_examples=40)
@given(random_scenarios(trouble=False))
def test_fifo_without_bypass_starts_in_order(ground: Scenario) -> None:
    run = drive(Fifo(), ground.cluster, ground.arrivals)
    free = {arrival.spec.id for arrival in ground.arrivals if not arrival.spec.after}
    started = [order.job for _, order in run.orders if order.job in free]
    assert started == [arrival.spec.id for arrival in ground.arrivals if arrival.spec.id in free]


def test_the_makespan_of_a_full_cluster_is_the_work_over_the_devices() -> None:
    cluster = Cluster.build([(1, 2, "V100")])
    run = drive(Fifo(bypass=True), cluster, [job(f"j{index}", work=3.0) for index in range(10)])
    assert run.summary.makespan_s == 15.0
    assert run.summary.utilisation == 1.0
