"""Worlds in which profiles, or any other beliefs, are the truth."""

from dataclasses import replace
from pathlib import Path

import pytest

from carpool.backends.online_estimator import OnlineEstimator
from carpool.core.errors import InputError
from carpool.core.estimates import DeclaredEstimator
from carpool.core.messages import ProgressReported
from carpool.core.model import Allocation, Job, JobId, JobSpec, Kind, Phase
from carpool.core.topology import Cluster, Placement
from carpool.policies.registry import parse_policy
from carpool.predictors.profiles.profile import Costs, Measurement, Profile, read_profile, write_profile
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds import parse_world
from carpool.sim.worlds.estimated import EstimatorWorld
from carpool.sim.worlds.profiled import ProfileWorld

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One training of 100 steps of 0.1 s; two devices halve them. Another one as fast, with another name."""
    seen = (
        Measurement("cpu1", 1, 32, step_s=0.1, held_bytes=100 * MIB),
        Measurement("cpu1", 2, 32, step_s=0.05),
    )
    for name in ("net.py:mlp", "net.py:cnn"):
        profile = Profile(name, {}, "", 32, 320, stop_steps=100, measurements=seen)
        write_profile(profile, tmp_path / f"{profile.key}.json")
    return tmp_path


def makespan(world: object, cluster: Cluster, *specs: JobSpec) -> float:
    assert isinstance(world, ProfileWorld | EstimatorWorld)
    arrivals, cluster = world.prepare([Arrival(0.0, spec) for spec in specs], cluster)
    return simulate(arrivals, cluster, parse_policy("fifo"), world).summary().makespan_s


def test_jobs_take_as_long_as_their_profiles_say(folder: Path) -> None:
    world = parse_world(f"profile:{folder}")
    one, two = Cluster.build([(1, 1, "cpu1")]), Cluster.build([(1, 2, "cpu1")])
    assert makespan(world, one, JobSpec(JobId("a"), model="net.py:mlp")) == pytest.approx(10.0)
    assert makespan(world, two, JobSpec(JobId("a"), 2, model="mlp")) == pytest.approx(5.0)
    assert makespan(world, one, JobSpec(JobId("a"), model="mlp", work=3.0)) == pytest.approx(3.0)


def test_memory_is_filled_in_with_its_margin(folder: Path) -> None:
    world = ProfileWorld.load(folder)
    arrivals, _ = world.prepare([Arrival(0.0, JobSpec(JobId("a"), model="mlp"))], Cluster.build([(1, 1, "cpu1")]))
    assert arrivals[0].spec.memory_bytes > 100 * MIB


def test_a_trace_without_models_means_the_only_profile(folder: Path) -> None:
    world = ProfileWorld.load(next(folder.glob("*.json")))
    assert makespan(world, Cluster.build([(1, 1, "cpu1")]), JobSpec(JobId("a"))) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("model", "kind", "words"),
    [("resnet", "cpu1", "resnet"), ("", "cpu1", "model"), ("mlp", "H200", "H200")],
)
def test_what_was_never_measured_is_refused(folder: Path, model: str, kind: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        makespan(ProfileWorld.load(folder), Cluster.build([(1, 1, kind)]), JobSpec(JobId("a"), model=model))


def test_an_empty_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no profiles"):
        ProfileWorld.load(tmp_path)


def test_luck_makes_a_job_faster_than_those_who_plan_believe() -> None:
    job = JobSpec(JobId("a"), work=10.0)
    cluster = Cluster.build([(1, 1, "cpu1")])
    assert makespan(EstimatorWorld(DeclaredEstimator(), {job.id: 2.0}), cluster, job) == pytest.approx(5.0)
    with pytest.raises(InputError, match="no length"):
        makespan(EstimatorWorld(DeclaredEstimator()), cluster, JobSpec(JobId("b")))


@pytest.mark.parametrize(("known", "length"), [({}, 11.5), ({"start_s": 3.0}, 13.5), ({"end_s": 2.0}, 13.0)])
def test_starts_and_ends_cost_what_is_known_of_a_job_else_what_is_usual(known: dict[str, float], length: float) -> None:
    job, cluster = JobSpec(JobId("a"), work=10.0), Cluster.build([(1, 1, "cpu1")])
    world = EstimatorWorld(DeclaredEstimator(), costs={job.id: Costs(**known)}, usual=Costs(1.0, 0.2, 0.5))
    assert makespan(world, cluster, job) == pytest.approx(length)


def test_profiles_charge_starts_and_ends_as_they_were_seen(folder: Path) -> None:
    path = next(folder.glob("*.json"))
    write_profile(replace(read_profile(path), start_s=2.0, resize_s=0.5, end_s=0.25), path)
    world, job = ProfileWorld.load(path), JobSpec(JobId("a"))
    assert makespan(world, Cluster.build([(1, 1, "cpu1")]), job) == pytest.approx(12.25)
    one, two = (Placement(((Kind("cpu1"), count),)) for count in (1, 2))
    assert (world.change_s(job, None, one), world.change_s(job, one, two)) == (2.0, 0.5)


def test_what_is_learned_in_a_believed_world_does_not_change_its_truth() -> None:
    cluster, job = Cluster.build([(1, 1, "V100")]), JobSpec(JobId("a"), 1, 10.0)
    world = EstimatorWorld(OnlineEstimator(cluster), {job.id: 0.5})
    placement = Placement(((Kind("V100"), 1),))
    before = world.pace(job, 0.0, placement)
    held = Allocation.of(0)
    running = Job(job, 0, 0.0, Phase.RUNNING, held, 1, held, 1)
    world.estimator().learn(1.0, running, ProgressReported(job.id, 1, 0.5, 0.5))
    assert world.pace(job, 0.0, placement) == before
