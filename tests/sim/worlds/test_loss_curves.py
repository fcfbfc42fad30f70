"""Trainings that end at a loss: when they end, how fast they go, what they show, and what is believed of them."""

from dataclasses import replace

import numpy as np
import pytest

from carpool.core.errors import InputError, UnknownName
from carpool.core.estimates import Estimator
from carpool.core.messages import ProgressReported
from carpool.core.model import Allocation, Job, JobId, JobSpec, Kind, Phase
from carpool.core.topology import Cluster, Placement
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.loss_curves import LossModel, LossWorld
from carpool.testing import EstimatorContract, drive

LEARNER = LossModel(0.001, 0.5, 0.2, target=0.6, noise=0.05, steps_per_s=10.0, speeds=(0.6, 0.5, 1.0))
SPEC = JobSpec(JobId("a"), 3, model="vgg")


def on(count: int, fraction: float = 1.0) -> Placement:
    return Placement(((Kind("V100"), count),), fraction)


class TestContract(EstimatorContract):
    models = ("vgg",)
    examples = 10

    def make_estimator(self) -> Estimator:
        return LossWorld({"vgg": LEARNER}).estimator()


def test_a_job_ends_with_the_first_window_whose_mean_is_at_the_target() -> None:
    world = LossWorld({"vgg": LEARNER}, seed=3)
    end = int(world.work(SPEC))
    heard = np.array([world.signals(SPEC, float(step), on(1)).loss for step in range(1, end + 1)])
    means = np.convolve(heard, np.full(10, 0.1), "valid")
    assert means[-1] <= LEARNER.target
    assert (means[:-1] > LEARNER.target).all()


def test_histories_differ_by_seed_and_job_and_by_nothing_else() -> None:
    def loss(seed: int, name: str) -> float | None:
        return LossWorld({"vgg": LEARNER}, seed).signals(replace(SPEC, id=JobId(name)), 50.0, on(2)).loss

    assert loss(1, "a") == loss(1, "a")
    assert len({loss(1, "a"), loss(2, "a"), loss(1, "b")}) == 3


def test_speeds_follow_the_table_and_the_share() -> None:
    world = LossWorld({"vgg": LEARNER})
    assert [world.rate(SPEC, on(count)) for count in (1, 2, 3, 5)] == [6.0, 5.0, 10.0, 10.0]
    assert world.rate(SPEC, on(3, 0.5)) == 5.0


def test_a_pre_trained_model_needs_less() -> None:
    world = LossWorld({"vgg": LEARNER, "trained": replace(LEARNER, behind=1000.0)})
    assert world.work(replace(SPEC, id=JobId("b"), model="trained")) < world.work(SPEC) - 500.0


def test_mistakes_are_told() -> None:
    with pytest.raises(UnknownName, match="vgg"):
        LossWorld({"vgg": LEARNER}).work(replace(SPEC, model="vg"))
    with pytest.raises(InputError, match="floor"):
        LossWorld({"vgg": replace(LEARNER, target=0.1)}).work(SPEC)


def test_a_run_takes_as_long_as_its_curve() -> None:
    world = LossWorld({"vgg": LEARNER}, start_s=2.0)
    arrivals, cluster = world.prepare([Arrival(0.0, SPEC)], Cluster.build([(1, 3, "V100")]))
    run = drive(Fifo(), cluster, arrivals, world, report_every_s=1.0)
    assert run.summary.makespan_s == pytest.approx(2.0 + world.work(SPEC) / 10.0)


def test_the_estimator_is_near_the_truth_in_the_middle_of_a_run() -> None:
    world = LossWorld({"vgg": LEARNER})
    estimator = world.estimator()
    held = Allocation.of(0, 1, 2)
    job = Job(SPEC, 0, 0.0, Phase.RUNNING, held, 1, held, 1)
    end = world.work(SPEC)
    assert estimator.remaining(job, 0.0).std > 0.0  # a guess
    for step in range(10, int(0.6 * end), 10):
        loss = world.signals(SPEC, float(step), on(3)).loss
        estimator.learn(0.0, job, ProgressReported(job.id, 1, float(step), 10.0, loss))
    left = estimator.remaining(job._replace(done=0.6 * end), 0.0)
    assert left.mean == pytest.approx(0.4 * end, rel=0.35)
    assert LossWorld({"vgg": LEARNER}, knows_lengths=True).estimator().remaining(job, 0.0).mean == end
