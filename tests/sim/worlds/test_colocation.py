"""Co-locations as a world: measured groups as measured, others as predicted, turns, prices, and what may be known."""

from __future__ import annotations

import pytest

from carpool.core.errors import InputError, UnknownName
from carpool.core.model import JobId, JobSpec, Kind
from carpool.core.topology import Cluster, Neighbour, Placement
from carpool.policies.registry import parse_policy
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds import parse_world
from carpool.sim.worlds.colocation import ColocationWorld

H200 = Kind("H200")


@pytest.fixture(scope="module")
def path(request: pytest.FixtureRequest) -> str:
    return str(request.config.rootpath / "benchmarks" / "results" / "gpu_colocation.json")


@pytest.fixture(scope="module")
def world(path: str) -> ColocationWorld:
    found = parse_world(f"colocation:{path}")
    assert isinstance(found, ColocationWorld)
    return found


def job(name: str, model: str, batch: int, work: float = 100.0) -> JobSpec:
    return JobSpec(JobId(name), 1, work, model, batch)


def at(fraction: float = 1.0, *others: Neighbour, batch: int = 0, turn: int = 0) -> Placement:
    return Placement(((H200, 1),), fraction, batch, others, turn)


def test_alone_on_a_whole_device_the_rate_is_one(world: ColocationWorld) -> None:
    assert world.pace(job("a", "vgg16", 128), 0.0, at()).rate == pytest.approx(1.0)


def test_a_measured_group_goes_as_measured(world: ColocationWorld) -> None:
    group = next(group for group in world.table.groups if len(group) == 3)
    for place, tenant in enumerate(group):
        others = [
            Neighbour(job(f"o{i}", other.model, other.batch_size), other.share)
            for i, other in enumerate(group)
            if i != place
        ]
        rate = world.pace(job("a", tenant.model, tenant.batch_size), 0.0, at(tenant.share, *others)).rate
        alone = world.table.profile(tenant.model, tenant.batch_size)
        assert rate == pytest.approx(tenant.steps_per_s * alone.step_s)


def test_other_groups_are_slower_than_alone(world: ColocationWorld) -> None:
    beside = Neighbour(job("b", "bert_base", 16), 0.7)
    assert 0.05 < world.pace(job("a", "yolo", 16), 0.0, at(0.7, beside)).rate < 1.0


def test_a_higher_turn_fills_what_lower_ones_leave(world: ColocationWorld) -> None:
    light, heavy = job("a", "ncf", 1024), job("b", "resnet50", 128)
    first = world.pace(heavy, 0.0, at(1.0, Neighbour(light, turn=1))).rate
    filler = world.pace(light, 0.0, at(1.0, Neighbour(heavy), turn=1)).rate
    assert first == pytest.approx(1.0)
    assert 0.0 < filler < 0.2


def test_a_larger_batch_makes_less_progress_for_each_sample(world: ColocationWorld) -> None:
    spec = job("a", "vgg16", 128)
    small, large = world.table.profile("vgg16", 128), world.table.profile("vgg16", 512)
    faster = (512 / large.step_s) / (128 / small.step_s)
    rate = world.pace(spec, 0.0, at(batch=512)).rate
    assert rate == pytest.approx(faster * (8 * 128 + 128) / (8 * 128 + 512))


def test_memory_is_filled_in_and_unknown_models_are_named(world: ColocationWorld) -> None:
    cluster = Cluster.build([(1, 1, "H200")])
    arrivals, furnished = world.prepare([Arrival(0.0, job("a", "vgg16", 128))], cluster)
    assert arrivals[0].spec.memory_bytes == world.table.profile("vgg16", 128).memory_bytes
    assert furnished.bank_of(0).memory_bytes == world.table.memory_bytes
    with pytest.raises(UnknownName, match="Did you mean"):
        world.prepare([Arrival(0.0, job("a", "vgg17", 128))], cluster)
    with pytest.raises(InputError, match="no length"):
        world.prepare([Arrival(0.0, JobSpec(JobId("a"), model="vgg16"))], cluster)


def test_the_scheduler_knows_less_than_the_truth(world: ColocationWorld) -> None:
    estimates = world.estimator()
    errors = []
    for group in world.table.groups:
        if len(group) != 2 or group[0].model == group[1].model:
            continue
        own, other = group
        placement = at(own.share, Neighbour(job("b", other.model, other.batch_size), other.share))
        spec = job("a", own.model, own.batch_size)
        errors.append(abs(estimates.rate(spec, placement).mean / world.pace(spec, 0.0, placement).rate - 1.0))
    assert 0.01 < sum(errors) / len(errors) < 0.15


def test_work_is_conserved_under_sharing(world: ColocationWorld) -> None:
    tasks = [("vgg16", 128), ("ncf", 1024), ("bert_small", 8), ("resnet18", 128), ("gcn", 140)]
    arrivals = [Arrival(float(i), job(f"j{i}", model, batch, 60.0)) for i, (model, batch) in enumerate(tasks)]
    prepared, cluster = world.prepare(arrivals, Cluster.build([(1, 1, "H200")]))
    alone = simulate(prepared, cluster, parse_policy("fifo"), world).summary()
    shared = simulate(prepared, cluster, parse_policy("competitive"), world).summary()
    assert alone.finished == shared.finished == len(tasks)
    assert alone.makespan_s == pytest.approx(5 * 60.5, abs=3.0)
    assert shared.makespan_s < 0.85 * alone.makespan_s
