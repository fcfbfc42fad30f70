"""Pollux's profiles as a world, on profiles made up here."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from carpool.core.errors import CarpoolError, InputError, UnknownName
from carpool.core.estimates import Estimator
from carpool.core.journal import record_to_json
from carpool.core.messages import Assign, AssignApplied, Fact, JobFinished, ProgressReported, Record
from carpool.core.model import Allocation, JobId, JobSpec, Kind
from carpool.core.topology import Cluster, Neighbour, Placement
from carpool.policies.registry import parse_policy
from carpool.sim.backend import SimulatedBackend
from carpool.sim.engine import simulate
from carpool.sim.event_queue import EventQueue
from carpool.sim.traces.reader import read_trace
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds import parse_world
from carpool.sim.worlds.pollux import ApplicationRules, PolluxWorld
from carpool.testing import EstimatorContract

V100 = Kind("V100")
TOY = JobSpec(JobId("toy"), 2, model="toy", batch_size=16)


def compute_s(micro: int) -> float:
    return 0.1 + 0.01 * micro


def sync_s(placement: str) -> float:
    return 0.0 if placement == "1" else 0.05 * len(placement)


def write(folder: Path, *, epochs: int = 3) -> Path:
    """Profiles of one application: batches 8, 16 and 32, passes of 2 to 8 samples, up to 3 nodes."""
    toy = folder / "profiles" / "toy"
    toy.mkdir(parents=True)
    rows = ["placement,local_bsz,step_time,sync_time"]
    for placement in ("1", "2", "4", "11", "12", "22", "112", "121"):
        extra = 1.0 if placement == "121" else 0.0
        for micro in (2, 4, 8):
            sync = sync_s(placement) + extra
            rows.append(f"{placement},{micro},{compute_s(micro) + sync},{sync}")
    (toy / "placements.csv").write_text("\n".join(rows) + "\n")
    rows = ["num_nodes,num_replicas,local_bsz,step_time,sync_time"]
    rows += [f"{n},{n},{micro},{compute_s(micro) + 0.1 * n},{0.1 * n}" for n in (6, 16) for micro in (2, 8)]
    (toy / "scalability.csv").write_text("\n".join(rows) + "\n")
    for batch, faster in ((8, 1.0), (16, 0.9), (32, 0.8)):
        rows = ["progress,iteration,metric,grad_sqr,grad_var"]
        for epoch in range(1, epochs + 1):
            sqr = 0.0 if batch == 32 and epoch == 3 else 1.0
            rows.append(f"{100.0 * epoch * faster},{800 // batch * epoch},0.5,{sqr},{epoch * batch / 8}")
        (toy / f"validation-{batch}.csv").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture
def world(tmp_path: Path) -> PolluxWorld:
    return PolluxWorld.load(write(tmp_path))


def on(*counts: int, batch: int = 0, fraction: float = 1.0, beside: tuple[Neighbour, ...] = ()) -> Placement:
    return Placement(tuple((V100, count) for count in counts), fraction, batch, beside)


# -------------------------------------------------------------------------------------------------------- profiles
def test_limits_come_from_what_was_measured(world: PolluxWorld) -> None:
    limits = world.profiles["toy"].limits
    assert (limits.reference, limits.largest, limits.micro_min, limits.micro_max) == (8, 32, 2, 8)
    assert world.profiles["toy"].ends == pytest.approx([80.0, 160.0, 240.0])  # the least progress of any batch


@pytest.mark.parametrize("inner", [False, True])
def test_either_folder_will_do(tmp_path: Path, inner: bool) -> None:
    folder = write(tmp_path)
    world = parse_world(f"pollux:{folder / 'profiles' if inner else folder}")
    assert isinstance(world, PolluxWorld)
    assert list(world.profiles) == ["toy"]


def test_published_rules_overrule_the_profile(tmp_path: Path) -> None:
    rules = {"toy": ApplicationRules(2, micro_max=4, most_devices=1, batch_size=32)}
    world = PolluxWorld.load(write(tmp_path), rules=rules)
    assert world.work(TOY) == pytest.approx(160.0)
    assert world.profiles["toy"].limits.micro_max == 4
    (arrival,), _ = world.prepare([Arrival(0.0, TOY)], Cluster.build([(1, 4, "V100")]))
    assert (arrival.spec.max_devices, arrival.spec.batch_range) == (2, (32, 32))  # never below what it asks for


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("placements.csv", "placement,local_bsz\n1,2\n", "no column 'step_time'"),
        (
            "placements.csv",
            "placement,local_bsz,step_time,sync_time\n1,2,fast,0\n",
            "line 2, step_time: 'fast' is not a",
        ),
        ("validation-16.csv", "progress,iteration,grad_sqr,grad_var\n9,1,1,1\n9,2,1,1\n9,3,1,1\n", "does not grow"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, text: str, problem: str) -> None:
    folder = write(tmp_path)
    (folder / "profiles" / "toy" / name).write_text(text)
    with pytest.raises(InputError, match=problem):
        PolluxWorld.load(folder)


def test_folders_without_profiles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no profile of any application"):
        PolluxWorld.load(tmp_path)
    with pytest.raises(InputError, match="is not a folder"):
        PolluxWorld.load(tmp_path / "nowhere")


def test_too_few_epochs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has 3 epochs, needs 4"):
        PolluxWorld.load(write(tmp_path), rules={"toy": ApplicationRules(4)})


# ---------------------------------------------------------------------------------------------------------- truth
@pytest.mark.parametrize(
    ("counts", "batch", "samples", "seconds"),
    [
        ((1,), 8, 8, 0.1 + 0.08),
        ((2,), 12, 12, 0.1 + 0.06 + 0.05),  # between two measured passes
        ((1,), 16, 16, 2 * 0.18),  # above the reference one device takes two passes
        ((2,), 32, 32, 2 * 0.18 + 0.05),  # 16 each do not fit: two passes, one synchronisation
        ((1, 2), 12, 12, 0.1 + 0.04 + 0.1),
        ((2, 1, 1), 16, 16, 0.1 + 0.04 + 0.15),  # known by its smallest rotation
        ((2,), 15, 16, 0.1 + 0.08 + 0.05),  # rounded up to equal parts
        ((4, 4), 4, 4, 0.1 + 0.02 + 0.05),  # 4 samples are cut for 2 devices at most; the others stand idle
    ],
)
def test_step_times(world: PolluxWorld, counts: tuple[int, ...], batch: int, samples: int, seconds: float) -> None:
    step = world.step(TOY, on(*counts, batch=batch))
    assert step.batch == samples
    assert step.seconds == pytest.approx(seconds)


def test_placements_that_were_not_measured_lie_between_their_neighbours(world: PolluxWorld) -> None:
    step = world.step(TOY, on(1, 1, 1, 1, batch=16))
    assert compute_s(4) + 0.15 < step.seconds < compute_s(4) + 0.6
    far = world.step(TOY, on(*[4] * 4, batch=32))  # outside of all that was measured
    assert far.seconds > 0.0


def test_pace_is_gain_over_step_time_until_the_end_of_the_epoch(world: PolluxWorld) -> None:
    assert world.pace(TOY, 0.0, on(1, batch=8)) == pytest.approx((1 / 0.18, 80.0))
    assert world.pace(TOY, 80.0, on(1, batch=8)) == pytest.approx((1 / 0.18, 160.0))
    for epoch, done in enumerate((0.0, 80.0), start=1):
        var = epoch * 16 / 8
        gain = (var + 1.0) / (var / 2.0 + 1.0)
        assert world.pace(TOY, done, on(2, batch=16)).rate == pytest.approx(gain / (0.18 + 0.05))


def test_the_spec_s_batch_is_used_unless_the_placement_names_one(world: PolluxWorld) -> None:
    assert world.pace(TOY, 0.0, on(2)) == world.pace(TOY, 0.0, on(2, batch=16))
    assert world.pace(replace(TOY, batch_size=0), 0.0, on(2)) == world.pace(TOY, 0.0, on(2, batch=8))


def test_signs_are_noise_and_step_times(world: PolluxWorld) -> None:
    signs = world.signals(TOY, 80.0, on(2, batch=32))
    assert signs == pytest.approx((None, 8 * 8.0, 0.41, 0.05))  # reference 8 · variance 8 / square 1
    assert world.signals(TOY, 80.0, on(2, batch=24)).noise == pytest.approx(8 * 6.0)  # between two batch sizes
    assert world.signals(TOY, 200.0, on(2, batch=32)).noise == 1e12  # no gradient at all: JSON knows no infinity


def test_sharing_is_by_fraction(world: PolluxWorld) -> None:
    whole = world.pace(TOY, 0.0, on(2)).rate
    assert world.pace(TOY, 0.0, on(2, fraction=0.5)).rate == pytest.approx(whole / 2)
    beside = (Neighbour(TOY, 1.0),)
    assert world.pace(TOY, 0.0, on(2, beside=beside)).rate == pytest.approx(whole / 2)


def test_prices(world: PolluxWorld) -> None:
    assert world.change_s(TOY, None, on(2)) == 30.0
    assert world.change_s(TOY, on(2), on(1, 1)) == 30.0
    assert world.change_s(TOY, on(2, batch=16), on(2, batch=16)) == 30.0  # other devices of the same shape
    assert world.change_s(TOY, on(2, batch=16), on(2, batch=32)) == 0.0


def test_jobs_become_elastic(world: PolluxWorld) -> None:
    cluster = Cluster.build([(2, 4, "V100")])
    (arrival,), same = world.prepare([Arrival(5.0, TOY)], cluster)
    assert same is cluster
    assert (arrival.submit_s, arrival.spec.devices, arrival.spec.batch_size) == (5.0, 2, 16)
    assert (arrival.spec.min_devices, arrival.spec.max_devices, arrival.spec.batch_range) == (1, 16, (8, 32))


def test_unknown_applications_are_refused(world: PolluxWorld) -> None:
    with pytest.raises(UnknownName, match=r"unknown application 'toi'.*Did you mean toy"):
        world.prepare([Arrival(0.0, JobSpec(JobId("x"), model="toi"))], Cluster.build([(1, 1, "V100")]))


# --------------------------------------------------------------------------------------------------------- machines
def orders(world: PolluxWorld, *told: tuple[float, Allocation]) -> list[tuple[float, Fact]]:
    """What machines of two nodes say when one job is ordered about."""
    timeline = EventQueue()
    machines = SimulatedBackend(Cluster.build([(2, 4, "V100")]), world, timeline)
    machines.introduce(TOY)
    facts: list[tuple[float, Fact]] = []
    for generation, (at, allocation) in enumerate(told, start=1):
        while (due := timeline.next_at) is not None and due <= at:
            facts += [(due, fact) for fact in timeline.happen(due)]
        facts += [(at, fact) for fact in machines.apply(at, [Assign(JobId("toy"), allocation, generation)])]
    while (due := timeline.next_at) is not None:
        facts += [(due, fact) for fact in timeline.happen(due)]
    return facts


def applied(facts: Sequence[tuple[float, Fact]]) -> list[float]:
    return [at for at, fact in facts if isinstance(fact, AssignApplied)]


def test_a_new_batch_costs_nothing_and_is_reported(world: PolluxWorld) -> None:
    facts = orders(world, (0.0, Allocation.of(0, 1, batch_size=16)), (40.0, Allocation.of(0, 1, batch_size=32)))
    assert applied(facts) == [30.0, 40.0]
    report = next(fact for at, fact in facts if at == 40.0 and isinstance(fact, ProgressReported))
    assert report.step_s == pytest.approx(0.41)


def test_a_move_costs_the_standstill_even_with_a_new_batch(world: PolluxWorld) -> None:
    facts = orders(world, (0.0, Allocation.of(0, 1, batch_size=16)), (40.0, Allocation.of(4, 5, batch_size=32)))
    assert applied(facts) == [30.0, 70.0]


def test_a_new_batch_does_not_end_a_standstill(world: PolluxWorld) -> None:
    facts = orders(world, (0.0, Allocation.of(0, 1, batch_size=16)), (10.0, Allocation.of(0, 1, batch_size=32)))
    assert applied(facts) == [30.0]


def test_a_job_ends_after_its_last_epoch(world: PolluxWorld) -> None:
    at, last = orders(world, (0.0, Allocation.of(0, batch_size=8)))[-1]
    assert isinstance(last, JobFinished)
    assert at == pytest.approx(30.0 + 240.0 * 0.18)


# -------------------------------------------------------------------------------------------------------- estimates
class TestEstimator(EstimatorContract):
    examples = 10
    models = ("toy",)

    @pytest.fixture(autouse=True)
    def _world(self, world: PolluxWorld) -> None:
        self.world = world

    def make_estimator(self) -> Estimator:
        self.world.prepare([], Cluster.build([(2, 4, "V100")]))
        return self.world.estimator()


def test_the_estimator_needs_to_know_the_cluster(world: PolluxWorld) -> None:
    with pytest.raises(CarpoolError, match="has named the cluster"):
        world.estimator()


class Keep:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def record(self, record: Record) -> None:
        self.records.append(record)


def replay(folder: Path, policy: str) -> list[str]:
    """The journal of a small run, line by line."""
    world, keep = PolluxWorld.load(folder), Keep()
    jobs = [Arrival(70.0 * index, replace(TOY, id=JobId(f"j{index}"))) for index in range(5)]
    arrivals, cluster = world.prepare(jobs, Cluster.build([(2, 4, "V100")]))
    summary = simulate(arrivals, cluster, parse_policy(policy), world, round_s=60.0, observers=[keep]).summary()
    assert summary.finished == 5
    return [json.dumps(record_to_json(record)) for record in keep.records]


@pytest.mark.parametrize("policy", ["pollux:seed=3", "optimus", "las:thresholds=100:promote=0:placement=emptiest"])
def test_equal_runs_give_equal_journals(tmp_path: Path, policy: str) -> None:
    folder = write(tmp_path)
    journal = replay(folder, policy)
    assert journal == replay(folder, policy)
    assert any('"step_s"' in line for line in journal)  # jobs report without being asked


def test_tiresias_on_the_published_workload(shared_data: Path) -> None:
    """The published simulator prints 3469.69 s."""
    folder = shared_data / "pollux"
    world = PolluxWorld.load(folder)
    trace = read_trace(folder / "workloads" / "workload-6.csv")
    arrivals, cluster = world.prepare(trace.arrivals, Cluster.build([(16, 4, "V100")]))
    policy = parse_policy("las:thresholds=57600:promote=0:placement=emptiest")
    summary = simulate(arrivals, cluster, policy, world, round_s=60.0).summary()
    assert summary.finished == 160
    assert summary.avg_jct_s == pytest.approx(3469.69, rel=0.02)
