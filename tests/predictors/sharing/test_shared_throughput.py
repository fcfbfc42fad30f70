"""Rates of jobs that share a device: the estimator's contract, and what running groups teach."""

from __future__ import annotations

import pytest

from carpool.core.errors import UnknownName
from carpool.core.messages import ProgressReported
from carpool.core.model import Allocation, Job, JobId, JobSpec, Kind, Phase
from carpool.core.topology import Neighbour, Placement
from carpool.predictors.sharing.colocation import Solo
from carpool.predictors.sharing.interference import Interference
from carpool.predictors.sharing.shared_throughput import SharedThroughput
from carpool.testing import EstimatorContract

H200 = Kind("H200")
PROFILES = {
    "light": (Solo(32, 0.004, 1e-5, fill=0.3, memory_bytes=10, scaling=((0.25, 0.9), (1.0, 1.0))),),
    "heavy": (
        Solo(64, 0.02, 4e-5, fill=0.9, memory_bytes=50, scaling=((0.25, 0.3), (1.0, 1.0))),
        Solo(128, 0.036, 4e-5, fill=0.9, memory_bytes=90, scaling=((0.25, 0.3), (1.0, 1.0))),
    ),
}


def fresh(**options: int) -> SharedThroughput:
    return SharedThroughput(PROFILES, Interference("gp"), **options)


class TestContract(EstimatorContract):
    models = ("light", "heavy")

    def make_estimator(self) -> SharedThroughput:
        return fresh(refit_every=2)


def spec(name: str, model: str, batch_size: int = 0) -> JobSpec:
    return JobSpec(JobId(name), 1, 100.0, model, batch_size)


def running(name: str, model: str, fraction: float) -> Job:
    held = Allocation.of(0, fraction=fraction)
    return Job(spec(name, model), 0, 0.0, Phase.RUNNING, held, 1, held, 1)


def report(estimator: SharedThroughput, at: float, job: Job, rate: float) -> None:
    estimator.learn(at, job, ProgressReported(job.id, 1, 0.0, rate))


def test_alone_the_profile_says_it_all() -> None:
    estimator = fresh()
    assert estimator.rate(spec("a", "light"), Placement(((H200, 1),))).mean == pytest.approx(1.0)
    assert estimator.rate(spec("a", "light"), Placement(((H200, 1),), 0.25)).mean == pytest.approx(0.9)


def test_a_larger_batch_does_more_but_less_for_each_sample() -> None:
    estimator = SharedThroughput(PROFILES, Interference("gp"), noise=2.0)
    rate = estimator.rate(spec("a", "heavy", 64), Placement(((H200, 1),), batch_size=128)).mean
    assert rate == pytest.approx((128 / 0.036) / (64 / 0.02) * (128 + 64) / (128 + 128))


def test_a_group_that_was_measured_is_believed() -> None:
    estimator = fresh()
    light, heavy = running("a", "light", 0.25), running("b", "heavy", 1.0)
    beside = Placement(((H200, 1),), 0.25, neighbours=(Neighbour(heavy.spec),))
    before, version = estimator.rate(light.spec, beside).mean, estimator.version
    for at in (1.0, 2.0, 3.0):
        report(estimator, at, light, 0.2)
        report(estimator, at, heavy, 0.9)
    assert before != pytest.approx(0.2)
    assert estimator.rate(light.spec, beside).mean == pytest.approx(0.2)
    assert estimator.version > version
    other = Placement(((H200, 1),), 0.25, neighbours=(Neighbour(spec("z", "heavy")),))
    assert estimator.rate(spec("y", "light"), other).mean == pytest.approx(0.2), "names do not matter"


def test_who_has_gone_is_no_neighbour() -> None:
    estimator = fresh()
    light, heavy = running("a", "light", 0.25), running("b", "heavy", 1.0)
    for at in (1.0, 2.0, 3.0):
        report(estimator, at, light, 0.45)
        report(estimator, at, heavy, 0.9)
    version = estimator.version
    for at in (3.5, 4.0, 5.0, 6.0):  # the other has ended: alone it is twice as fast
        report(estimator, at, light, 0.9)
    assert estimator.version == version


def test_whole_mixes_get_the_answers_of_single_questions() -> None:
    estimator = fresh()
    a, b = spec("a", "light"), spec("b", "heavy")
    (mixed,) = estimator.mixed(H200, [[(a, 0.5, 0), (b, 1.0, 128)]])
    assert mixed[0] == estimator.rate(a, Placement(((H200, 1),), 0.5, neighbours=(Neighbour(b, 1.0, 128),)))
    assert mixed[1] == estimator.rate(b, Placement(((H200, 1),), 1.0, 128, (Neighbour(a, 0.5),)))


def test_memory_and_use_come_from_the_profile() -> None:
    estimator = fresh()
    assert estimator.memory(spec("a", "heavy", 64), 128) == 90
    assert estimator.use(spec("a", "light"), H200).sm == 0.3


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(UnknownName, match="Did you mean heavy"):
        fresh().rate(spec("a", "heavi"), Placement(((H200, 1),)))
