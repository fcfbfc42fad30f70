"""What is kept from plan to plan changes no plan, and what is known already is not asked again."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from carpool.backends.online_estimator import OnlineEstimator
from carpool.core.estimates import Estimate, Estimator
from carpool.core.messages import JobSubmitted, ProgressReported
from carpool.core.model import Job, JobId, JobSpec, Kind
from carpool.core.policy import Plan, Snapshot
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster, Placement
from carpool.policies.market.policy import Carpool
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival
from tests.support.scaling_world import ScalingWorld

CLUSTER = Cluster.build([(2, 4, "V100"), (2, 4, "K80")])
SPEEDS = {"V100": 1.0, "K80": 0.4}
WORLD = ScalingWorld(exponent=0.8, speeds=SPEEDS, resize_s=1.0)


class Doubted(Carpool):
    """The default, whose every plan is compared with that of one who remembers nothing."""

    plans = 0

    def plan(self, view: Snapshot) -> Plan:
        planned, afresh = super().plan(view), Carpool().plan(view)
        assert (planned.changes, planned.reason, planned.wake_at, planned.note) == (
            afresh.changes,
            afresh.reason,
            afresh.wake_at,
            afresh.note,
        )
        Doubted.plans += 1
        return planned


class Unlike(Estimator):
    """An estimator that does not say which jobs are alike, and changes its mind at every report."""

    version = 0

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        return Estimate(WORLD.rate(spec, placement) * (1.0 + 0.01 * self.version), 0.1)

    def remaining(self, job: Job, at: float) -> Estimate:
        return Estimate(job.remaining_at(at))

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        self.version += 1


class Counted(OnlineEstimator):
    """Counts what it is asked."""

    asked = 0

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        self.asked += 1
        return super().rate(spec, placement)


def arrivals(tuned: bool = False) -> list[Arrival]:
    random, at, found = Random(2), 0.0, []
    for number in range(12):
        at += random.expovariate(0.1)
        spec = JobSpec(JobId(f"j{number}"), random.choice((1, 2, 4)), random.lognormvariate(4.0, 1.0), "m", 64)
        if random.random() < 0.6:
            spec = replace(spec, devices=1, min_devices=1, max_devices=random.choice((4, 8)))
        found.append(Arrival(at, replace(spec, batch_range=(16, 256)) if tuned else spec))
    return found


@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize(
    "estimator",
    [WORLD.estimator, lambda: OnlineEstimator(CLUSTER, {Kind(kind): speed for kind, speed in SPEEDS.items()}), Unlike],
)
def test_what_is_remembered_changes_no_plan(estimator: Callable[[], Estimator], tuned: bool) -> None:
    Doubted.plans = 0
    simulate(arrivals(tuned), CLUSTER, Doubted(), WORLD, estimator=estimator(), report_every_s=40.0)
    assert Doubted.plans >= 24


def test_of_jobs_that_nobody_knows_one_is_asked_for() -> None:
    asked = []
    for jobs in (20, 60):
        live = Counted(CLUSTER)
        scheduler = Scheduler(CLUSTER, Carpool(together=1), estimator=live)
        scheduler.handle(0.0, [JobSubmitted(JobSpec(JobId(f"j{number}"))) for number in range(jobs)])
        first, live.asked = live.asked - scheduler.num_running, 0  # what starts is asked for by the scheduler
        scheduler.handle(1.0, [JobSubmitted(JobSpec(JobId("new")))])
        asked.append((first, live.asked))
    (few, more), (again, after) = asked
    assert few == again == 2, "one of each kind, however many jobs there are"
    assert more == after == 0


def test_limits_that_change_are_obeyed_by_who_is_known_already() -> None:
    scheduler = Scheduler(CLUSTER, Carpool(), estimator=WORLD.estimator())
    scheduler.handle(0.0, [JobSubmitted(JobSpec(JobId("a"), 1, 100.0, min_devices=1, max_devices=4))])
    view = scheduler.snapshot()
    job = scheduler.jobs[JobId("a")]
    assert job.desired is not None
    assert job.desired.num_devices == 4
    narrow = Snapshot(
        scheduler.policy,
        view.occupancy,
        {job.id: job._replace(spec=replace(job.spec, max_devices=2))},
        view.waiting,
        view.running_jobs,
        view.estimates,
    )
    (change,) = scheduler.policy.plan(narrow).changes
    assert change.allocation is not None
    assert change.allocation.num_devices == 2
