"""What Pollux's agents learn from reports."""

from math import inf

import pytest

from carpool.core.errors import UnknownName
from carpool.core.estimates import Estimator
from carpool.core.messages import ProgressReported
from carpool.core.model import Allocation, Job, JobId, JobSpec, Kind, Phase
from carpool.core.topology import Cluster, Placement
from carpool.predictors.loss.goodput import BatchLimits, PolluxAgents
from carpool.testing import EstimatorContract

CLUSTER = Cluster.build([(2, 4, "V100")])
LIMITS = {"toy": BatchLimits(16, 256, 4, 64)}
SPEC = JobSpec(JobId("a"), 1, model="toy", batch_size=64, min_devices=1, max_devices=8, batch_range=(16, 256))


class TestContract(EstimatorContract):
    models = ("toy",)

    def make_estimator(self) -> Estimator:
        return PolluxAgents(Cluster.build([(2, 4, "V100")]), LIMITS)


def tell(
    agents: PolluxAgents,
    spec: JobSpec,
    *devices: int,
    batch: int,
    step_s: float,
    sync_s: float = 0.0,
    noise: float = 100.0,
) -> None:
    held = Allocation.of(*devices, batch_size=batch)
    job = Job(spec, 0, 0.0, Phase.RUNNING, held, 1, held, 1)
    agents.learn(0.0, job, ProgressReported(spec.id, 1, 0.0, 1.0, None, noise, step_s, sync_s))


def test_before_the_first_report_more_devices_are_believed_to_help_in_proportion() -> None:
    agents = PolluxAgents(CLUSTER, LIMITS)
    assert agents.goodputs(SPEC, [1, 2, 8], [False, False, True]) == [(1.0, 16), (2.0, 16), (8.0, 32)]
    assert agents.rate(SPEC, Placement(((Kind("V100"), 1),))) == (0.0, inf)


def test_a_measured_configuration_is_believed_as_measured() -> None:
    agents = PolluxAgents(CLUSTER, LIMITS)
    tell(agents, SPEC, 0, batch=16, step_s=0.1)
    tell(agents, SPEC, 0, batch=128, step_s=0.5)  # two passes of 64: 0.25 s each
    rate = agents.rate(SPEC, Placement(((Kind("V100"), 1),), batch_size=16)).mean
    assert rate == pytest.approx(10.0, rel=0.02)
    twice = agents.rate(SPEC, Placement(((Kind("V100"), 1),), batch_size=128)).mean
    assert twice == pytest.approx(128 / 16 * 116 / 228 / 0.5, rel=0.02)


def test_the_noise_is_the_latest_and_moves_the_best_batch() -> None:
    agents = PolluxAgents(CLUSTER, LIMITS)
    tell(agents, SPEC, 0, 1, batch=32, step_s=0.2, sync_s=0.05, noise=20.0)
    small = agents.goodputs(SPEC, [2], [False])[0][1]
    version = agents.version
    tell(agents, SPEC, 0, 1, batch=32, step_s=0.2, sync_s=0.05, noise=20_000.0)
    assert agents.goodputs(SPEC, [2], [False])[0][1] > small
    assert agents.version > version


def test_the_first_sample_of_a_configuration_counts() -> None:
    agents = PolluxAgents(CLUSTER, LIMITS)
    tell(agents, SPEC, 0, batch=16, step_s=0.1)
    before, version = agents.goodputs(SPEC, [1, 2], [False, False]), agents.version
    tell(agents, SPEC, 3, batch=16, step_s=9.9)
    assert agents.goodputs(SPEC, [1, 2], [False, False]) == before
    assert agents.version == version


def test_nodes_are_told_apart() -> None:
    agents = PolluxAgents(CLUSTER, LIMITS)
    tell(agents, SPEC, 0, 1, batch=32, step_s=0.2, sync_s=0.05)
    tell(agents, SPEC, 3, 4, batch=32, step_s=1.2, sync_s=1.05)
    (near, _), (far, _) = agents.goodputs(SPEC, [2, 2], [False, True])
    assert near > 1.5 * far


def test_jobs_learn_for_themselves() -> None:
    agents = PolluxAgents(CLUSTER, LIMITS)
    tell(agents, SPEC, 0, batch=16, step_s=0.1)
    other = JobSpec(JobId("b"), 1, model="toy", batch_range=(16, 256))
    assert agents.goodputs(other, [2], [False]) == [(2.0, 16)]


def test_a_job_that_is_not_tuned_keeps_its_batch() -> None:
    agents = PolluxAgents(CLUSTER, LIMITS)
    fixed = JobSpec(JobId("c"), 1, model="toy", batch_size=64)
    assert agents.goodputs(fixed, [1], [False]) == [(1.0, 64)]
    tell(agents, fixed, 0, batch=0, step_s=0.4)
    assert [batch for _, batch in agents.goodputs(fixed, [1, 4], [False, True])] == [64, 64]


def test_unknown_applications_are_named() -> None:
    with pytest.raises(UnknownName, match="Did you mean toy"):
        PolluxAgents(CLUSTER, LIMITS).goodputs(JobSpec(JobId("d"), model="toyy"), [1], [False])
