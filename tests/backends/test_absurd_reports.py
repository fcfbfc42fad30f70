"""Figures that the protocol accepts and no training has: the default policy goes on planning for all jobs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.backends.online_estimator import OnlineEstimator, initial_speeds
from carpool.core.messages import AssignApplied, Fact, JobSubmitted, ProgressReported
from carpool.core.model import JobId, JobSpec
from carpool.core.scheduler import Scheduler
from carpool.core.typed_fields import MAX_INT
from carpool.jobs.devices import LocalDevice, as_cluster
from carpool.policies.registry import parse_policy
from carpool.runtime.executor.reports import Sized

DEVICES = tuple(LocalDevice(number, f"cpu:{number}", "cpu1", (number,)) for number in range(4))
AMOUNTS = [0.0, 5e-324, 1e-300, 1e-9, 0.5, 1e6, float(MAX_INT)]
SIGNALS = [None, math.nan, math.inf, -math.inf, -1e308, 1e308, 0.5]
COUNTS = [0, 1, MAX_INT]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, about numbers that are too large
@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_default_policy_survives_absurd_measurements(chance: object) -> None:
    pick = chance.choice  # type: ignore[attr-defined]
    cluster = as_cluster(DEVICES)
    estimator = OnlineEstimator(cluster, initial_speeds(DEVICES))
    policy = parse_policy("carpool")
    scheduler = Scheduler(cluster, policy, estimator=estimator, find_policy=parse_policy, fallback="fifo")
    specs = [JobSpec(JobId(f"j{number}"), min_devices=1, max_devices=pick([1, 2, 4])) for number in range(6)]
    scheduler.handle(0.0, [JobSubmitted(spec) for spec in specs])
    at = 0.0
    for _ in range(12):
        at += pick([0.0, 0.01, 1.0, 100.0])
        facts: list[Fact] = []
        for job in [job for job in scheduler.jobs.values() if job.desired is not None]:
            if job.applied < job.generation:
                facts.append(AssignApplied(job.id, job.generation, pick(AMOUNTS)))
                continue
            estimator.take(
                Sized(job.id, pick([None, *COUNTS]), pick(COUNTS), pick(COUNTS), pick(SIGNALS), pick(COUNTS))
            )
            times = pick([None, *AMOUNTS]), pick([None, *AMOUNTS])
            figures = pick(AMOUNTS), pick(AMOUNTS), pick(SIGNALS), pick(SIGNALS), *times
            facts.append(ProgressReported(job.id, job.generation, *figures, pick([True, False]), pick(COUNTS)))
        scheduler.handle(at, facts)
        scheduler.check()
        assert not scheduler.policy_fault
