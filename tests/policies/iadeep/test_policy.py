"""IADeep: co-locate or wait, order, regulation, and tuning of all batch sizes by measuring."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log2

import numpy as np
import pytest

from carpool.core.errors import InputError
from carpool.core.estimates import Estimate, Estimator, Use
from carpool.core.messages import Assign
from carpool.core.model import Allocation, Job, JobId, JobSpec, Kind, Phase
from carpool.core.topology import Cluster, Placement
from carpool.policies.iadeep.batch_tuning import BatchTuning, best_alone
from carpool.policies.iadeep.policy import IADeep
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.base import Pace, PlainWorld
from carpool.testing import drive

KIND = Kind("H200")
CURVE = {32: 0.8, 64: 1.0, 128: 1.25, 256: 1.1}  # goodput by batch; the job's own is 64


class Known(Estimator):
    """Believes in a fixed speed for each number of residents, and in a curve over batches."""

    predicts_goodput = True
    version = 0

    def __init__(self, kept: tuple[float, ...] = (1.0, 0.9), curve: dict[int, float] | None = None) -> None:
        self.kept, self.curve = kept, curve or CURVE

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        kept = self.kept[min(len(placement.neighbours), len(self.kept) - 1)]
        harm = 0.2 if any(n.spec.model == "harmful" for n in placement.neighbours) else 1.0
        return Estimate(kept * harm * self.goodput(spec, KIND, placement.batch_size).mean)

    def remaining(self, job: Job, at: float) -> Estimate:
        return Estimate(job.remaining_at(at))

    def learn(self, at: float, job: Job, report: object) -> None:
        """Nothing."""

    def goodput(self, spec: JobSpec, kind: Kind, batch_size: int) -> Estimate:
        sizes, values = list(self.curve), list(self.curve.values())
        return Estimate(float(np.interp(log2(batch_size or 64), np.log2(sizes), values)))

    def memory(self, spec: JobSpec, batch_size: int = 0) -> int:
        return (batch_size or 64) * 10

    def use(self, spec: JobSpec, kind: Kind) -> Use:
        return Use(0.9 if spec.model == "busy" else 0.1, 0.0)


@dataclass(frozen=True)
class Truth(PlainWorld):
    """What the estimator believes is true, unless another curve is."""

    beside: tuple[float, ...] = (1.0, 0.9)
    curve: dict[int, float] = field(default_factory=lambda: CURVE)

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        return Pace(Known(self.beside, self.curve).rate(spec, placement).mean)

    def estimator(self) -> Estimator:
        return Known(self.beside)


def job(name: str, work: float, at: float = 0.0, model: str = "", **options: object) -> Arrival:
    return Arrival(at, JobSpec(JobId(name), 1, work, model, 64, **options))  # type: ignore[arg-type]


def starts(policy: IADeep, arrivals: list[Arrival], world: PlainWorld, devices: int = 1) -> dict[str, float]:
    run = drive(policy, Cluster.build([(1, devices, KIND)]), arrivals, world)
    assert run.summary.finished == len(arrivals)
    found: dict[str, float] = {}
    for at, order in run.orders:
        if isinstance(order, Assign):
            found.setdefault(order.job, at)
    return found


def test_a_job_joins_where_sharing_pays() -> None:
    found = starts(IADeep(), [job("old", 100.0), job("new", 100.0, at=1.0)], Truth(beside=(1.0, 0.9)))
    assert found == {"old": 0.0, "new": 1.0}


def test_a_job_waits_where_sharing_does_not_pay() -> None:
    found = starts(IADeep(), [job("old", 100.0), job("new", 100.0, at=1.0)], Truth(beside=(1.0, 0.3)))
    assert found["new"] == pytest.approx(100.0, abs=1.0)


def test_without_prediction_nobody_waits_for_a_better_place() -> None:
    found = starts(IADeep(predictor=False), [job("old", 100.0), job("new", 100.0, at=1.0)], Truth(beside=(1.0, 0.3)))
    assert found["new"] == 1.0


def test_a_neighbour_that_does_no_harm_is_chosen() -> None:
    arrivals = [job("a", 100.0, model="harmful"), job("b", 100.0), job("new", 100.0, at=1.0)]
    run = drive(IADeep(), Cluster.build([(1, 2, KIND)]), arrivals, Truth(beside=(1.0, 0.9)))
    first = {o.job: o.allocation for _, o in reversed(run.orders) if isinstance(o, Assign)}
    assert first[JobId("new")].same_devices(first[JobId("b")])


def test_the_device_that_is_used_less_is_chosen() -> None:
    arrivals = [job("a", 100.0, model="busy"), job("b", 100.0), job("new", 100.0, at=1.0)]
    run = drive(IADeep(), Cluster.build([(1, 2, KIND)]), arrivals, Truth(beside=(1.0, 0.9)))
    first = {o.job: o.allocation for _, o in reversed(run.orders) if isinstance(o, Assign)}
    assert first[JobId("new")].same_devices(first[JobId("b")])


def test_a_short_job_passes_a_long_one_but_not_for_ever() -> None:
    """With patience 1 a job of 1000 s is overtaken by short ones submitted up to 1000 s after it, not by later ones."""
    shorts = [job(f"s{i:02}", 90.0, at=10.0 + 80.0 * i) for i in range(20)]
    found = starts(IADeep(most=1, patience=1.0), [job("first", 100.0), job("long", 1000.0, at=1.0), *shorts], Truth())
    assert found["s00"] < found["long"]
    assert found["long"] < found["s19"]


def test_caps_are_equal_and_alone_a_job_has_the_whole_device() -> None:
    run = drive(
        IADeep(virtual=1.5),
        Cluster.build([(1, 1, KIND)]),
        [job("a", 50.0), job("b", 100.0, at=1.0)],
        Truth(beside=(1.0, 0.9)),
    )
    assigned = [order for _, order in run.orders if isinstance(order, Assign)]
    assert {order.allocation.fractions for order in assigned if order.job == "b"} == {(0.75,), (1.0,)}
    assert assigned[-1].allocation.fractions == (1.0,)


def batches(policy: IADeep, arrivals: list[Arrival], world: PlainWorld) -> dict[str, list[int]]:
    run = drive(policy, Cluster.build([(1, 1, KIND)]), arrivals, world, report_every_s=1.0)
    found: dict[str, list[int]] = {}
    for _, order in run.orders:
        if isinstance(order, Assign):
            found.setdefault(order.job, []).append(order.allocation.batch_size)
    return found


def test_every_job_that_may_is_tuned_and_no_other() -> None:
    arrivals = [job("a", 900.0, batch_range=(32, 256)), job("b", 900.0, batch_range=(32, 256)), job("c", 900.0)]
    found = batches(IADeep(settle_s=2.0), arrivals, Truth(beside=(1.0, 0.9, 0.8)))
    near = [min(CURVE, key=lambda size: abs(size - found[name][-1])) for name in ("a", "b")]
    assert near == [128, 128]
    assert set(found["c"]) == {0}


def test_measurements_overrule_what_was_believed() -> None:
    """Believed best is 128; really 64 is: the tuner finds that by measuring, in at most fifteen settings."""
    truth = Truth(curve={32: 0.8, 64: 1.6, 128: 1.0, 256: 0.6})
    found = batches(IADeep(settle_s=2.0), [job("a", 900.0, batch_range=(32, 256))], truth)["a"]
    assert min(CURVE, key=lambda size: abs(size - found[0])) == 128
    assert min(CURVE, key=lambda size: abs(size - found[-1])) == 64
    assert len(found) <= 16


def test_without_the_tuner_batches_stay() -> None:
    assert batches(IADeep(tuner=False), [job("a", 50.0, batch_range=(32, 256))], Truth())["a"] == [0]


def test_batches_are_not_tuned_blindly() -> None:
    """An estimator that cannot say what a batch does to learning leaves it alone."""
    assert batches(IADeep(), [job("a", 50.0, batch_range=(32, 256))], PlainWorld())["a"] == [0]


def test_memory_bounds_the_batches_with_a_margin() -> None:
    spec = JobSpec(JobId("a"), 1, 1.0, "", 64, batch_range=(32, 256))
    alone = Job(spec, 0, 0.0, Phase.RUNNING, Allocation.of(0))
    assert best_alone(Known(), alone, KIND, capacity=0) in range(97, 193)
    assert best_alone(Known(), alone, KIND, capacity=990) <= 90
    both = [alone, alone._replace(spec=JobSpec(JobId("b"), 1, 1.0, "", 64, batch_range=(32, 256)))]
    vector = BatchTuning(Known(), KIND, both, 1.0, capacity=2200).propose(None, 15)
    assert vector is not None
    assert sum(setting.batch_size for setting in vector) * 10 * 1.1 <= 2200


@pytest.mark.parametrize("options", [{"most": 0}, {"evaluations": 0}, {"settle_s": 0.0}, {"window": -1}])
def test_bad_parameters_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InputError):
        IADeep(**options)  # type: ignore[arg-type]
