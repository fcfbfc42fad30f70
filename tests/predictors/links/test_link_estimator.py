"""An estimator that knows the links: the contract, and what reports of some placements say of others."""

from __future__ import annotations

import pytest

from carpool.core.messages import ProgressReported
from carpool.core.model import Allocation, Job, JobId, JobSpec, Kind, Phase
from carpool.core.topology import Cluster, Placement
from carpool.predictors.links.estimator import LinkEstimator
from carpool.predictors.links.fabric import representative_devices
from carpool.testing import EstimatorContract

CLUSTER = Cluster.build([(2, 4, "V100"), (2, 4, "K80")])
V100, K80 = Kind("V100"), Kind("K80")


class TestContract(EstimatorContract):
    examples = 10
    models = ("m",)

    def make_estimator(self) -> LinkEstimator:
        return LinkEstimator(CLUSTER)


def spec(name: str, model: str = "m") -> JobSpec:
    return JobSpec(JobId(name), 2, 100.0, model, 64, min_devices=1, max_devices=8)


def step_s(width: int, nodes: int, kind: Kind = V100) -> float:
    """Samples, and a ring over the bus or the network."""
    slowness = 2.0 if kind == K80 else 1.0
    speed = 1e9 if nodes > 1 else 1e10
    return slowness * (0.02 + 0.64 / width) + 2.0 * (width - 1) / width * 2e8 / speed


def teach(estimator: LinkEstimator, job: JobSpec, *devices: int) -> None:
    held = Allocation.of(*devices)
    groups = CLUSTER.placement(held).groups
    seconds = step_s(len(devices), len(groups), groups[0][0])
    running = Job(job, 0, 0.0, Phase.RUNNING, held, 1, held, 1)
    estimator.learn(0.0, running, ProgressReported(job.id, 1, 1.0, 0.5 / seconds, step_s=seconds))


def test_before_any_report_devices_count() -> None:
    estimator = LinkEstimator(CLUSTER)
    one, two = (estimator.rate(spec("a"), Placement(((V100, count),))) for count in (1, 2))
    assert (one.mean, two.mean) == (0.5, 1.0)
    assert one.std > 0.0


def test_places_never_tried() -> None:
    estimator = LinkEstimator(CLUSTER)
    for devices in ((0,), (0, 1), (0, 1, 2, 3), (0, 4), (0, 1, 4, 5), (8,), (8, 9)):
        teach(estimator, spec("a"), *devices)
    for groups in (((V100, 3),), ((V100, 1), (V100, 3)), ((V100, 4), (V100, 4)), ((K80, 4),)):
        width = sum(count for _, count in groups)
        found = estimator.rate(spec("a"), Placement(groups))
        assert found.mean == pytest.approx(0.5 / step_s(width, len(groups), groups[0][0]), rel=0.2), groups


def test_links_are_learned_from_other_jobs() -> None:
    """Job b has never left its node, but a has: so what the network would cost it is known."""
    estimator = LinkEstimator(CLUSTER)
    for devices in ((0,), (0, 1), (0, 4), (0, 1, 4, 5)):
        teach(estimator, spec("a", "one"), *devices)
    for devices in ((0,), (0, 1), (0, 1, 2, 3)):
        teach(estimator, spec("b", "other"), *devices)
    near = estimator.rate(spec("b", "other"), Placement(((V100, 4),))).mean
    apart = estimator.rate(spec("b", "other"), Placement(((V100, 2), (V100, 2)))).mean
    assert apart < 0.8 * near
    assert apart == pytest.approx(0.5 / step_s(4, 2), rel=0.35)


def test_a_new_job_of_a_known_model_is_compared_by_its_steps() -> None:
    estimator = LinkEstimator(CLUSTER)
    for devices in ((0,), (0, 1), (0, 1, 2, 3)):
        teach(estimator, spec("a"), *devices)
    fresh = spec("b")
    assert estimator.rate(fresh, Placement(((V100, 2),))).mean == pytest.approx(1.0)
    four = estimator.rate(fresh, Placement(((V100, 4),))).mean
    assert four == pytest.approx(step_s(2, 1) / step_s(4, 1), rel=0.1)


def test_the_version_grows_with_what_is_learned() -> None:
    estimator = LinkEstimator(CLUSTER)
    question = Placement(((V100, 2),))
    before = estimator.version, estimator.rate(spec("a"), question)
    teach(estimator, spec("a"), 0)
    assert estimator.version > before[0]
    assert estimator.rate(spec("a"), question) != before[1]


def test_devices_that_stand_for_a_placement() -> None:
    assert representative_devices(CLUSTER, ((V100, 2), (V100, 3))) == (0, 1, 2, 4, 5)
    assert representative_devices(CLUSTER, ((K80, 1), (V100, 1))) == (0, 8)
    assert representative_devices(CLUSTER, ((V100, 5),)) is None
    assert representative_devices(CLUSTER, ((V100, 1),) * 3) is None
