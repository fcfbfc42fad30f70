"""Event loop of the simulator: feeds events to the scheduler and its orders to the simulated backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from carpool.core.errors import CarpoolError
from carpool.core.estimates import Estimator
from carpool.core.messages import Fact, JobSubmitted, Observer, Woke
from carpool.core.metrics import Metrics
from carpool.core.policy import Policy
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.sim.backend import SimulatedBackend
from carpool.sim.event_queue import ARRIVALS, EventQueue
from carpool.sim.failures import Failures
from carpool.sim.traces.trace import Arrival, gc_paused
from carpool.sim.worlds.base import PlainWorld, World

# Consecutive wake-ups and failures with nothing running and no arrivals left, after which waiting jobs count as
# starved.
_PATIENCE = 10_000


class Engine:
    """Drives a scheduler through a trace in simulated time."""

    def __init__(
        self,
        scheduler: Scheduler,
        machines: SimulatedBackend,
        timeline: EventQueue,
        arrivals: Iterable[Arrival],
        failures: Sequence[Failures] = (),
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._machines = machines
        self._timeline = timeline
        self._arrivals: Iterator[Arrival] = iter(arrivals)
        self._progress = progress
        self._has_all = False  # whether every job of the trace has arrived
        self._submitted_s = 0.0  # of the newest arrival in the heap
        self._arrive_next()
        for plan in failures:
            plan.start(scheduler, machines, timeline)

    def run(self) -> None:
        """Run until every job is over, or nothing will ever happen again."""
        scheduler, timeline, machines = self._scheduler, self._timeline, self._machines
        idle = 0  # consecutive wake-ups and events without effect while no job runs
        while True:
            next_at = timeline.next_at
            wake_at = scheduler.wake_at
            if self._is_over(next_at, wake_at):
                return
            is_wake = next_at is None or (wake_at is not None and wake_at <= next_at)
            if scheduler.num_running or not self._has_all:
                idle = 0
            elif next_at is None or not is_wake:  # a wake-up before a pending event does not count
                idle += 1
                if idle > _PATIENCE + len(timeline):  # events in the heap may be void
                    return
            if not is_wake:
                assert next_at is not None
                at = next_at
            else:
                assert wake_at is not None
                at = wake_at
            facts: Sequence[Fact] = timeline.happen(at)
            if not facts:
                if at != wake_at:
                    continue
                facts = (Woke(),)
            while facts:
                orders = scheduler.handle(at, facts)
                facts = ()
                if orders:
                    idle = 0
                    facts = machines.apply(at, orders)

    def _is_over(self, next_at: float | None, wake_at: float | None) -> bool:
        if next_at is None and wake_at is None:
            return True
        return self._has_all and not self._scheduler.jobs  # random failures never end

    def _arrive_next(self) -> None:
        """Add only the next arrival to the heap, since a trace may be long."""
        arrival = next(self._arrivals, None)
        if arrival is None:
            self._has_all = True
            return
        if arrival.submit_s < self._submitted_s:
            raise CarpoolError(
                f"job {arrival.spec.id!r} is submitted at {arrival.submit_s} s but listed after one of "
                f"{self._submitted_s} s. Sort the arrivals."
            )
        self._submitted_s = arrival.submit_s
        self._timeline.add(arrival.submit_s, ARRIVALS, lambda at: self._arrive(arrival))

    def _arrive(self, arrival: Arrival) -> Fact:
        self._machines.introduce(arrival.spec)
        self._arrive_next()
        if self._progress is not None:
            self._progress(arrival.submit_s)
        return JobSubmitted(arrival.spec)


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
    """Run a policy over a trace in a world to the end; returns the metrics.

    `round_s` above 0: plan only at multiples of it. The estimator and the report interval default to the world's.
    """
    world = world or PlainWorld()
    if report_every_s is None:
        report_every_s = world.report_every_s
    sharing = policy.may_share
    metrics = Metrics(cluster, sharing=sharing)
    timeline = EventQueue()
    machines = SimulatedBackend(cluster, world, timeline, sharing=sharing, report_every_s=report_every_s)
    estimator = estimator or world.estimator()
    follows = (estimator,) if isinstance(estimator, Observer) else ()  # one that learns from orders and their effect
    scheduler = Scheduler(
        cluster,
        policy,
        estimator=estimator,
        cadence=replace(policy.cadence, round_s=round_s) if round_s else None,
        observers=(metrics, *follows, *observers),
    )
    with gc_paused():
        Engine(scheduler, machines, timeline, arrivals, failures, progress).run()
    return metrics
