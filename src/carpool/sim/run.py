"""One simulated run from its parts: trace, cluster, policy, world."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from carpool.core.estimates import Estimator
from carpool.core.metrics import Metrics
from carpool.core.policy import Policy
from carpool.core.ports import Observer
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.sim.engine import Engine
from carpool.sim.failures import Failures
from carpool.sim.machines import Machines
from carpool.sim.timeline import Timeline
from carpool.sim.traces.trace import Arrival
from carpool.sim.world import PlainWorld, ReportsRegularly, World


def simulate(
    arrivals: Iterable[Arrival],
    cluster: Cluster,
    policy: Policy,
    world: World | None = None,
    *,
    estimator: Estimator | None = None,
    round_s: float = 0.0,
    report_every_s: float | None = None,
    failures: Sequence[Failures] = (),
    observers: Sequence[Observer] = (),
    progress: Callable[[float], None] | None = None,
) -> Metrics:
    """Run a policy over a trace in a world to the end; the metrics of the run.

    `round_s` above 0 lets the policy decide only at multiples of it. Without `estimator` the policy is told what the
    world itself would answer; without `report_every_s` running jobs report as often as the world says.
    """
    world = world or PlainWorld()
    if report_every_s is None:
        report_every_s = world.report_every_s if isinstance(world, ReportsRegularly) else 0.0
    sharing = policy.may_share
    metrics = Metrics(cluster, sharing=sharing)
    timeline = Timeline()
    machines = Machines(cluster, world, timeline, sharing=sharing, report_every_s=report_every_s)
    estimator = estimator or world.estimator()
    follows = (estimator,) if isinstance(estimator, Observer) else ()  # one that learns from orders and their effect
    scheduler = Scheduler(
        cluster,
        policy,
        estimator=estimator,
        cadence=replace(policy.cadence, round_s=round_s) if round_s else None,
        observers=(metrics, *follows, *observers),
    )
    with _no_cycles_expected():
        Engine(scheduler, machines, timeline, arrivals, failures, progress).run()
    return metrics


@contextmanager
def _no_cycles_expected() -> Iterator[None]:
    """Pause the cycle collector: a run makes millions of small values and no cycles, and walking them costs a third."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
