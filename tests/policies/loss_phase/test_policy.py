"""Devices by learning phase: the printed rule for two jobs, and the one that counts what is left."""

from dataclasses import replace

import pytest

from carpool.core.errors import InputError
from carpool.core.messages import Assign
from carpool.core.model import JobId, JobSpec
from carpool.core.policy import Policy
from carpool.core.topology import Cluster
from carpool.policies.loss_phase.literal import LossPhaseLiteral
from carpool.policies.loss_phase.policy import LossPhase
from carpool.policies.registry import parse_policy
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.loss_curves import LossModel, LossWorld
from carpool.testing import Driven, PolicyContract, check_state, drive
from carpool.testing.scenarios import job

PER_JOB, PER_DEVICE = (0.66, 0.60, 0.83, 1.0), (0.12, 0.42, 0.73, 1.0)
VGG = LossModel(0.00095, 0.476, 0.2, target=0.6, noise=0.03, steps_per_s=10.0, speeds=PER_JOB)
LEARNERS = {
    "vgg": VGG,
    "trained": replace(VGG, behind=1200.0),
    "device": replace(VGG, speeds=PER_DEVICE),
    "large": replace(VGG, b0=VGG.b0 / 50, b1=VGG.b1 / 50, floor=10.0, target=30.0, noise=0.0),
}


def run(policy: Policy, *jobs: tuple[float, str], devices: int = 4, batch_size: int = 0) -> Driven:
    world = LossWorld(LEARNERS, seed=1)
    specs = [JobSpec(JobId(f"j{i}"), devices, None, model, batch_size) for i, (_, model) in enumerate(jobs)]
    arrivals = [Arrival(at, spec) for (at, _), spec in zip(jobs, specs, strict=True)]
    prepared, cluster = world.prepare(arrivals, Cluster.build([(1, devices, "V100")]))
    driven = drive(policy, cluster, prepared, world, report_every_s=1.0, check=check_state)
    assert driven.summary.finished == len(jobs)
    return driven


def widths(driven: Driven, name: str) -> list[int]:
    return [
        order.allocation.num_devices for _, order in driven.orders if isinstance(order, Assign) and order.job == name
    ]


# ------------------------------------------------------------------------------------------------------------- literal
def test_the_printed_rule_splits_watches_and_gives_the_older_three() -> None:
    driven = run(LossPhaseLiteral(), (0.0, "vgg"), (80.0, "vgg"))
    assert widths(driven, "j0") == [4, 2, 3]
    assert widths(driven, "j1") == [2, 1, 4]
    decided = next(at for at, order in driven.orders if at > 80.0)
    assert 0.0 <= decided - (80.0 + 100 / 6.0) <= 2.5  # 100 iterations at 0.60 of ten a second, and their reports
    reasons = [record.planned.reason for record in driven.records if record.planned is not None]
    assert any("j1 is younger: its loss fell by" in reason for reason in reasons)


def test_the_printed_rule_is_misled_by_losses_of_another_scale() -> None:
    driven = run(LossPhaseLiteral(), (0.0, "large"), (80.0, "vgg"))
    assert widths(driven, "j0")[:3] == [4, 2, 1]  # its loss is fifty times that of the other, and falls more


def test_more_than_two_wait_and_the_reason_says_so() -> None:
    driven = run(LossPhaseLiteral(), (0.0, "vgg"), (10.0, "vgg"), (20.0, "vgg"), (30.0, "vgg"))
    started = {str(order.job): at for at, order in reversed(driven.orders) if isinstance(order, Assign)}
    ended = [record.at for record in driven.records if any(type(f).__name__ == "JobFinished" for f in record.facts)]
    assert started["j2"] >= ended[0]
    assert started["j3"] >= ended[1]
    assert any(record.planned and "2 more wait" in record.planned.reason for record in driven.records)


def test_without_losses_who_came_first_is_older() -> None:
    jobs = [job("a", 4, 300.0, between=(1, 4)), job("b", 4, 300.0, at=1.0, between=(1, 4))]
    driven = drive(LossPhaseLiteral(), Cluster.build([(1, 4, "V100")]), jobs, check=check_state)
    assert widths(driven, "a")[:3] == [4, 2, 3]


def test_the_batch_of_a_device_can_be_kept() -> None:
    sizes = {}
    for batch in ("job", "device"):
        driven = run(parse_policy(f"loss-phase-literal:batch={batch}"), (0.0, "vgg"), (80.0, "vgg"), batch_size=512)
        sizes[batch] = [order.allocation.batch_size for _, order in driven.orders if isinstance(order, Assign)]
    assert set(sizes["job"]) == {0}
    assert set(sizes["device"]) == {0, 256, 384, 128}  # 0: four devices, the job's own 512


def test_a_batch_of_anything_else_is_refused() -> None:
    with pytest.raises(InputError, match="batch=job"):
        LossPhaseLiteral(batch="node")


# --------------------------------------------------------------------------------------------------------- loss-phase
def test_the_older_gets_three_at_once() -> None:
    driven = run(LossPhase(), (0.0, "vgg"), (80.0, "vgg"))
    assert widths(driven, "j0") == [4, 3]
    assert widths(driven, "j1") == [1, 4]


def test_where_sharing_costs_too_much_one_runs_after_the_other() -> None:
    driven = run(LossPhase(), (0.0, "device"), (80.0, "device"))
    assert widths(driven, "j0") == widths(driven, "j1") == [4]


def test_a_pre_trained_newcomer_is_old_at_once() -> None:
    driven = run(LossPhase(), (0.0, "vgg"), (20.0, "trained"))
    assert 3 in widths(driven, "j1")
    assert widths(driven, "j0")[-1] == 4
    turned = next(
        at
        for at, order in driven.orders
        if isinstance(order, Assign) and order.job == "j1" and order.allocation.num_devices == 3
    )
    assert turned <= 20.0 + 15.0


def test_the_scale_of_a_loss_does_not_matter() -> None:
    driven = run(LossPhase(), (0.0, "large"), (80.0, "vgg"))
    assert widths(driven, "j0") == [4, 3]


def test_the_end_of_the_last_can_be_the_aim() -> None:
    early, late = (run(policy, (0.0, "vgg"), (80.0, "vgg")) for policy in (LossPhase(objective="total"), LossPhase()))
    assert early.summary.makespan_s < late.summary.makespan_s
    assert early.summary.avg_jct_s > late.summary.avg_jct_s
    with pytest.raises(InputError, match="objective=total"):
        LossPhase(objective="makespan")


def test_many_jobs_on_many_devices_beat_one_after_another() -> None:
    jobs = [(10.0 * i, ("vgg", "trained")[i % 2]) for i in range(6)]
    shared, queued = run(LossPhase(), *jobs), run(parse_policy("fifo"), *jobs)
    assert shared.summary.avg_jct_s < 0.8 * queued.summary.avg_jct_s
    reason = next(record.planned.reason for record in shared.records if record.at >= 30.0 and record.planned)
    assert "by remaining work: " in reason


class TestTotal(PolicyContract):
    """The other objective keeps the contract too."""

    policy = LossPhase(objective="total")
    examples = 4
