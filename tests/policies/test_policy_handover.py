"""Any policy goes on from where any other left the jobs: what it could not have given out it takes back first."""

from __future__ import annotations

import pytest

from carpool.backends.online_estimator import OnlineEstimator
from carpool.core.estimates import DeclaredEstimator, Estimator
from carpool.core.messages import Fact, JobFinished, JobSubmitted, LimitsChanged, PolicyChanged
from carpool.core.model import JobId, JobSpec
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.policies.registry import POLICIES, parse_policy
from carpool.testing.rig import FakeBackend, check_state

CLUSTER = Cluster.build([(2, 2, "v100"), (1, 2, "k80")])
LEFT_BY = {"mps-equal:slots=2": False, "competitive": True, "iadeep": False}  # and whether speeds are learned
SKIPPED = {"loss-phase-literal"}  # is for two jobs


class Floor:
    """A scheduler whose orders are carried out at once."""

    def __init__(self, policy: str, estimator: Estimator) -> None:
        self.scheduler = Scheduler(CLUSTER, parse_policy(policy), estimator=estimator, find_policy=parse_policy)
        self.backend = FakeBackend(answers_at_once=True)
        self.at = 0.0

    def say(self, *facts: Fact) -> None:
        """Tell facts, then what became of the orders, until nothing follows at this instant."""
        for _ in range(40):
            facts = tuple(self.backend.apply(self.at, self.scheduler.handle(self.at, facts)))
            check_state(self.scheduler)
            if not facts and (self.scheduler.wake_at is None or self.scheduler.wake_at > self.at):
                return
        raise AssertionError("one order after another, without end")

    def later(self, seconds: float) -> None:
        """Time goes by; whoever wants to be woken is."""
        until = self.at + seconds
        for _ in range(40):
            if self.scheduler.wake_at is None or self.scheduler.wake_at > until:
                break
            self.at = max(self.at, self.scheduler.wake_at)
            self.say()
        self.at = until


def specs() -> list[JobSpec]:
    """Exact ones, elastic ones and gangs, more than there are devices."""
    made = [JobSpec(JobId(f"exact{n}"), devices=1, work=100.0, exact=True) for n in range(3)]
    made += [JobSpec(JobId(f"elastic{n}"), devices=1, min_devices=1, max_devices=3, work=100.0) for n in range(3)]
    return [*made, *[JobSpec(JobId(f"one{n}"), devices=1, work=50.0) for n in range(3)]]


@pytest.mark.parametrize("before", LEFT_BY)
@pytest.mark.parametrize("after", sorted(set(POLICIES) - SKIPPED))
def test_every_job_ends_under_the_policy_that_takes_over(before: str, after: str) -> None:
    floor = Floor(before, OnlineEstimator(CLUSTER) if LEFT_BY[before] else DeclaredEstimator())
    floor.say(*[JobSubmitted(spec) for spec in specs()])
    floor.later(30.0)
    floor.say(PolicyChanged(after))
    floor.later(30.0)
    elastic = JobId("elastic0")
    if elastic in floor.scheduler.jobs:
        floor.say(LimitsChanged(elastic, 1, 1))
    for _ in range(60):
        floor.later(400.0)
        running = next((job for job in floor.scheduler.jobs.values() if job.observed is not None), None)
        if running is None:
            break
        floor.say(JobFinished(running.id, running.generation))
    assert not floor.scheduler.jobs, f"left for ever under {after}: {[*floor.scheduler.jobs]}"
