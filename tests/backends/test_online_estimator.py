"""Beliefs from reports: measured where measured, scaled where not, honest about the rest."""

from dataclasses import replace

import pytest

from carpool.backends.online_estimator import OnlineEstimator, initial_speeds
from carpool.core.messages import JobFinished, JobSubmitted, ProgressReported, Record
from carpool.core.model import Allocation, Job, JobId, JobSpec, Kind, Phase
from carpool.core.topology import Cluster, Link, Neighbour, Placement
from carpool.jobs.devices import LocalDevice
from carpool.policies.estimator_queries import memory_of
from carpool.policies.iadeep.batch_tuning import best_step
from carpool.predictors.loss.curve import LossTarget
from carpool.predictors.profiles.profile import Measurement, NoiseSeen, Profile
from carpool.predictors.profiles.rate_model import ProfileRateModel
from carpool.runtime.executor.reports import Sized
from carpool.testing import EstimatorContract
from carpool.testing.rig import Rig

CLUSTER = Cluster.build([(1, 4, "cpu1")])
SPEC = JobSpec(JobId("a"), max_devices=4)
OTHER = JobSpec(JobId("b"), max_devices=4)


def running(spec: JobSpec, *devices: int, done: float = 0.0, fraction: float = 1.0) -> Job:
    held = Allocation.of(*devices, fraction=fraction)
    return Job(spec, 0, 0.0, Phase.RUNNING, held, 1, held, 1, done=done)


def on(count: int, fraction: float = 1.0, kind: str = "cpu1") -> Placement:
    return Placement(((Kind(kind), count),), fraction)


def learned(live: OnlineEstimator, spec: JobSpec, rate: float, *devices: int) -> None:
    live.learn(1.0, running(spec, *devices), ProgressReported(spec.id, 1, 5.0, rate))


def test_nothing_known_is_told_as_unsure() -> None:
    live = OnlineEstimator(CLUSTER)
    one, two = live.rate(SPEC, on(1)), live.rate(SPEC, on(2))
    assert (one.mean, one.std) == (1.0, 0.5)
    assert one.mean < two.mean < 2.0  # more devices help, but not twice
    assert live.rate(SPEC, on(1, 0.5)).mean == 1.0  # on a CPU a share is no cap


def test_a_plan_says_whose_speed_nobody_knows_until_they_have_run() -> None:
    live = OnlineEstimator(CLUSTER)
    rig = Rig(cluster=CLUSTER, estimator=live)
    rig.say(0.0, JobSubmitted(SPEC))
    learned(live, OTHER, 10.0, 0)
    rig.say(1.0, JobSubmitted(OTHER))
    assert [record.planned.guessed for record in rig.records if record.planned] == [(SPEC.id,), ()]


def test_a_measured_rate_is_believed_where_it_was_measured() -> None:
    live = OnlineEstimator(CLUSTER)
    learned(live, SPEC, 10.0, 0)
    assert live.rate(SPEC, on(1)).mean == 10.0
    learned(live, SPEC, 20.0, 0)
    assert live.rate(SPEC, on(1)).mean == pytest.approx(14.0)
    assert live.version == 2
    assert live.rate(OTHER, on(1)).mean == 1.0  # what one job does says nothing of another's steps


def test_other_widths_are_scaled_until_they_are_measured_too() -> None:
    live = OnlineEstimator(CLUSTER)
    learned(live, SPEC, 10.0, 0)
    assert live.rate(SPEC, on(2)).mean == pytest.approx(10.0 * 2 / 1.1)
    learned(live, SPEC, 9.0, 0, 1)  # two devices turn out to be slower than one: nothing is assumed to be monotone
    assert live.rate(SPEC, on(2)).mean == 9.0
    assert live.rate(SPEC, on(1)).mean == 10.0


def test_speeds_of_kinds_are_a_first_guess() -> None:
    live = OnlineEstimator(CLUSTER, {Kind("cpu1"): 1.0, Kind("cpu2"): 2.0})
    learned(live, SPEC, 10.0, 0)
    assert live.rate(SPEC, on(1, kind="cpu2")).mean == 20.0


def test_remaining_is_what_the_training_said_less_what_is_done() -> None:
    live = OnlineEstimator(CLUSTER)
    unknown = live.remaining(running(SPEC, 0), 0.0)
    assert unknown.std == unknown.mean > 0
    live.expect(SPEC.id, 100.0)
    assert live.remaining(running(SPEC, 0, done=30.0), 0.0) == (70.0, 0.0)
    assert live.remaining(running(SPEC, 0, done=130.0), 0.0).mean == 0.0


def test_an_unknown_length_is_that_of_the_average_known_job() -> None:
    live = OnlineEstimator(CLUSTER)
    live.expect(SPEC.id, 100.0)
    learned(live, SPEC, 10.0, 0)  # ten seconds alone
    learned(live, OTHER, 4.0, 0)
    assert live.remaining(running(OTHER, 0), 0.0).mean == pytest.approx(40.0)


@pytest.mark.parametrize("rate", [0.0, float("inf"), float("nan")])
def test_rates_that_are_none_are_not_learned(rate: float) -> None:
    live = OnlineEstimator(CLUSTER)
    learned(live, SPEC, rate, 0)
    assert live.version == 0


# ------------------------------------------------------------------------------------------------------------- profiles
def profiled(**speeds: float) -> OnlineEstimator:
    """Job a was measured: a tenth of a second on one device, 0.06 s on two."""
    seen = (Measurement("cpu1", 1, 32, step_s=0.1, held_bytes=1000), Measurement("cpu1", 2, 32, step_s=0.06))
    profile = Profile("n.py:n", {}, "", 32, 320, stop_epochs=2, measurements=seen)
    return OnlineEstimator(
        CLUSTER, {Kind(kind): speed for kind, speed in speeds.items()}, {SPEC.id: ProfileRateModel.of(profile)}
    )


def test_a_profile_is_believed_before_anything_is_reported() -> None:
    live = profiled()
    assert live.rate(SPEC, on(1)).mean == pytest.approx(10.0)
    assert live.rate(SPEC, on(2)).mean == pytest.approx(1 / 0.06)
    assert live.first_belief(SPEC, on(1)).basis == "measured"
    assert live.first_belief(OTHER, on(1)).basis == "guessed"


def test_reports_correct_a_profile_everywhere() -> None:
    live = profiled()
    learned(live, SPEC, 5.0, 0)  # half as fast as the profile says
    assert live.rate(SPEC, on(1)).mean == 5.0
    assert live.rate(SPEC, on(2)).mean == pytest.approx(0.5 / 0.06)


def test_a_width_that_an_earlier_run_measured_counts_more_than_scaling_from_another() -> None:
    seen = (Measurement("cpu1", 1, 32, steps=1000, step_s=0.002),)
    profile = Profile("n.py:n", {}, "", 32, 320, stop_epochs=2, measurements=seen)
    live = OnlineEstimator(CLUSTER, {}, {SPEC.id: ProfileRateModel.of(profile)})
    assert live.rate(SPEC, on(2)).mean > live.rate(SPEC, on(1)).mean, "wider is expected to be faster"
    learned(live, SPEC, 90.0, 0, 1)
    assert live.rate(SPEC, on(2)).mean == pytest.approx(90.0)
    assert live.rate(SPEC, on(1)).mean == pytest.approx(500.0)


def test_a_kind_without_measurements_is_compared_with_one_that_has_some() -> None:
    live = profiled(cpu1=1.0, cpu2=2.0)
    assert live.rate(SPEC, on(1, kind="cpu2")).mean == pytest.approx(20.0)
    assert live.first_belief(SPEC, on(1, kind="cpu2")).basis == "guessed from another kind"


def test_lengths_of_profiled_jobs_are_lengths_for_the_others() -> None:
    live = profiled()
    live.expect(SPEC.id, 100.0)  # ten seconds
    learned(live, OTHER, 4.0, 0)
    assert live.remaining(running(OTHER, 0), 0.0).mean == pytest.approx(40.0)


def test_memory_is_known_from_a_profile() -> None:
    assert memory_of(profiled(), SPEC) >= 1000
    assert memory_of(profiled(), OTHER) == 0


class TestProfiledContract(EstimatorContract):
    kinds = ("cpu1", "cpu2")

    def make_estimator(self) -> OnlineEstimator:
        return profiled(cpu1=1.0, cpu2=2.0)


def test_a_job_that_stops_at_a_loss_has_left_what_its_curve_says() -> None:
    live = OnlineEstimator(CLUSTER)
    live.curves.aim(SPEC.id, LossTarget(0.5))
    for step in range(10, 1000, 10):
        loss = 1.0 / (0.001 * step + 0.5) + 0.2
        live.learn(1.0, running(SPEC, 0), ProgressReported(SPEC.id, 1, float(step), 10.0, loss))
    job = running(SPEC, 0, done=990.0)
    assert live.remaining(job, 0.0).mean == pytest.approx(2833.0 - 990.0, rel=0.05)
    live.expect(SPEC.id, 1500.0)  # the first of both ends it
    assert live.remaining(job, 0.0).mean == pytest.approx(510.0)
    assert live.learning(SPEC.id, 100.0) == pytest.approx((0.048, 0.871), abs=0.002)
    assert live.learning(OTHER.id, 100.0) is None


# ------------------------------------------------------------------------------------------------ links and moves
def test_widths_between_measured_ones_follow_the_steps() -> None:
    """A step of 0.02 s + 0.32 s over the devices, on one, two and four: three take 0.127 s."""
    live = OnlineEstimator(CLUSTER)
    for width in (1, 2, 4):
        learned(live, SPEC, 1.0 / (0.02 + 0.32 / width), *range(width))
    three = live.rate(SPEC, on(3))
    assert three.mean == pytest.approx(1.0 / (0.02 + 0.32 / 3), rel=0.15)
    assert three.std < 0.5 * three.mean, "it is more than a guess"


def test_one_width_alone_tells_nothing_of_others() -> None:
    live = OnlineEstimator(CLUSTER)
    learned(live, SPEC, 10.0, 0)
    learned(live, OTHER, 5.0, 0)
    learned(live, OTHER, 9.0, 0, 1)
    assert live.rate(SPEC, on(2)).mean == pytest.approx(10.0 * 2 / 1.1)


def test_what_moves_cost_is_learned_from_the_records() -> None:
    live = OnlineEstimator(CLUSTER)
    rig = Rig(estimator=live)
    assert live.move_s(SPEC) is None
    rig.say(0.0, JobSubmitted(SPEC))
    rig.answered(4.0)
    for record in rig.records:
        live.record(record)
    assert live.moves.cost.seconds_ == [4.0]
    price = live.move_s(SPEC)
    assert price is not None
    assert 0.0 < price < 8.0


def test_what_is_measured_beside_others_says_nothing_of_alone() -> None:
    live = OnlineEstimator(CLUSTER)
    live.neighbours_of = lambda job: (Neighbour(OTHER),)
    beside = Placement(((Kind("cpu1"), 1),), 1.0, 0, (Neighbour(OTHER),))
    learned(live, SPEC, 4.0, 0)
    assert live.rate(SPEC, beside).mean == 4.0
    alone = live.rate(SPEC, on(1))
    assert alone.std >= 0.25 * alone.mean  # a guess
    live.learn(2.0, running(SPEC, 0), ProgressReported(SPEC.id, 1, 9.0, 10.0, alone=True))  # a probe: they stood still
    alone = live.rate(SPEC, on(1))
    assert alone.mean == 10.0
    assert alone.std < 0.05 * alone.mean
    assert live.rate(SPEC, beside).mean == 4.0
    assert [placement.fraction for placement in live.rates(SPEC.id)] == [1.0]


TUNED = JobSpec(JobId("t"), batch_size=32, batch_range=(8, 128))
KIND = Kind("cpu1")


def test_a_rate_alone_with_another_share_is_a_base_for_what_a_group_keeps() -> None:
    kind = Kind("H200")
    live = OnlineEstimator(Cluster.build([(1, 1, kind)]))
    other = replace(SPEC, id=JobId("other"))
    probed = running(SPEC, 0, fraction=0.8)
    live.learn(0.0, probed, ProgressReported(SPEC.id, 1, 1.0, 10.0, alone=True))
    live.neighbours_of = lambda job: (Neighbour(other, 0.25),)
    shared = running(SPEC, 0, fraction=0.25)
    for step in range(10):
        live.learn(1.0 + step, shared, ProgressReported(SPEC.id, 1, 2.0 + step, 4.0))
    base = live.rate_alone(SPEC, Placement(((kind, 1),), 0.25))
    assert base == (10.0, 0.8)
    kept = live.retention(kind, [[(SPEC, 0.25, 0), (other, 0.25, 0)]])[0][0]
    under_cap = live.predicted_retention(SPEC, Placement(((kind, 1),), 0.8))
    assert kept.mean == pytest.approx(0.4 * under_cap.mean)
    assert kept.std >= 0.4 * under_cap.std, "the cap's effect is only predicted"


def tuned(rate: float, batch_size: int = 0, noise: float | None = None) -> tuple[Job, ProgressReported]:
    held = Allocation.of(0, batch_size=batch_size)
    job = Job(TUNED, 0, 0.0, Phase.RUNNING, held, 1, held, 1)
    return job, ProgressReported(TUNED.id, 1, 5.0, rate, noise=noise)


def test_a_batch_is_judged_by_samples_and_what_they_teach_not_by_steps() -> None:
    live = OnlineEstimator(CLUSTER)
    sizes = (8, 32, 128)
    assert max(sizes, key=lambda size: live.goodput(TUNED, KIND, size).mean) == 32  # nothing is known of its noise
    live.learn(1.0, *tuned(100.0, noise=1000.0))
    live.learn(2.0, *tuned(50.0, 128))
    assert live.goodput(TUNED, KIND, 128).mean == pytest.approx(4 * 0.5 * (1000 + 32) / (1000 + 128))
    live.learn(3.0, *tuned(200.0, 8))
    assert live.goodput(TUNED, KIND, 8).mean == pytest.approx(0.25 * 2.0 * (1000 + 32) / (1000 + 8))
    live.learn(4.0, *tuned(100.0, 32, noise=1.0))  # later the gradient is clear: more samples add nothing
    assert live.goodput(TUNED, KIND, 128).mean == pytest.approx(4 * 0.5 * (1 + 32) / (1 + 128))
    assert live.goodput(TUNED, KIND, 32).mean == 1.0


def test_a_batch_that_was_never_tried_is_taken_to_take_longer() -> None:
    live = OnlineEstimator(CLUSTER)
    live.learn(1.0, *tuned(100.0, noise=50.0))
    one = Placement(((KIND, 1),), batch_size=64)
    assert live.rate(TUNED, one).mean == pytest.approx(100.0 / 1.5)
    assert live.rate(TUNED, Placement(((KIND, 1),), batch_size=32)).mean == 100.0


def test_from_two_batches_on_others_follow_their_line() -> None:
    live = OnlineEstimator(CLUSTER)
    live.learn(1.0, *tuned(1.0 / 0.12, noise=50.0))
    live.learn(2.0, *tuned(1.0 / 0.18, 128))  # 0.1 s a step and 0.000625 s a sample
    guess = live.rate(TUNED, Placement(((KIND, 1),), batch_size=64))
    assert guess.mean == pytest.approx(1.0 / 0.14)
    assert guess.std > 0.1 * guess.mean


def test_what_remains_is_counted_with_the_own_batch() -> None:
    live = OnlineEstimator(CLUSTER)
    live.expect(TUNED.id, 100.0)
    job, report = tuned(10.0, 128, noise=96.0)
    live.learn(1.0, job, replace(report, done=5.0))
    assert live.remaining(job._replace(done=5.0), 0.0).mean == 80.0  # five steps of four times the samples
    for step in range(5, 200, 5):
        live.learn(2.0, job, replace(report, done=float(step), loss=1.0 / (0.01 * step + 0.5)))
    live.curves.aim(TUNED.id, LossTarget(0.2))
    live.expect(TUNED.id, 1e9)
    job = job._replace(done=195.0)
    steps = live.curves.remaining(TUNED.id, 195.0)
    assert steps is not None
    assert live.remaining(job, 0.0).mean == pytest.approx(4 * (96 + 32) / (96 + 128) * steps.mean)


def test_without_a_profile_batches_are_bounded_by_the_memory_that_was_held() -> None:
    live = OnlineEstimator(CLUSTER)
    job, report = tuned(10.0)
    live.learn(1.0, job, replace(report, memory_bytes=1000))
    assert live.memory(TUNED, 64) == 2000
    assert live.memory(TUNED) == 0  # what a neighbour leaves free is not judged by it
    unnamed = replace(TUNED, batch_size=0)
    assert live.progress(unnamed, 64) == 1.0  # as long as its own batch is not known


def test_the_default_finds_a_good_batch_by_measuring() -> None:
    """Steps take 0.1 s and 0.0002 s for each sample, which nobody knows before; φ is 300 samples."""

    def goodput(size: int) -> float:
        return size / (0.1 + 0.0002 * size) * (300 + 32) / (300 + size)

    live, spec, has = OnlineEstimator(CLUSTER), replace(TUNED, batch_range=(8, 2048)), 0
    tried = []
    for _ in range(12):
        job, report = tuned(1.0 / (0.1 + 0.0002 * (has or 32)), has, noise=300.0)
        job = job._replace(spec=spec)
        for _ in range(3):
            live.learn(1.0, job, report)
        has = best_step(live, job, Placement(((KIND, 1),)), 0, growth=4, trust=1.1)
        tried.append(has)
    assert goodput(has) >= 0.9 * max(map(goodput, range(8, 2049)))
    assert len(set(tried[-5:])) == 1, tried


def test_the_noise_of_a_profile_counts_until_a_job_tells_its_own() -> None:
    profile = Profile("t.py:t", {}, "", 32, 320, measurements=(Measurement("cpu1", 1, 32, step_s=0.01),))
    belief = ProfileRateModel.of(replace(profile, noise=NoiseSeen(300.0, 10.0, 8, 20)))
    live = OnlineEstimator(CLUSTER, profiles={TUNED.id: belief})
    assert live.noise(TUNED.id) == 300.0
    live.learn(1.0, *tuned(100.0, noise=50.0))
    assert live.noise(TUNED.id) == 50.0


def test_of_jobs_that_ended_long_ago_only_the_lengths_are_remembered() -> None:
    live = OnlineEstimator(CLUSTER)
    jobs = [JobSpec(JobId(f"j{number}")) for number in range(500)]
    for number, spec in enumerate(jobs):
        live.expect(spec.id, 100.0 * (1 + number % 3))
        learned(live, spec, 10.0, 0)
        live.curves.aim(spec.id, LossTarget(0.5))
        live.record(Record(float(number), (JobFinished(spec.id, 1),)))
    known = [spec for spec in jobs if live.rates(spec.id)]
    assert known == jobs[-200:]
    mean_s = sum(10.0 * (1 + number % 3) for number in range(500)) / 500
    assert live.remaining(running(OTHER, 0), 0.0).mean == pytest.approx(mean_s)
    assert live.total(jobs[0].id) == 100.0  # it is shown to people


def test_places_are_compared_anew_by_stages_once_there_are_many() -> None:
    live, wide = OnlineEstimator(Cluster.build([(1, 64, "cpu1")])), JobSpec(JobId("a"), max_devices=64)
    stages = []
    for width in range(1, 60):
        learned(live, wide, 1.0, *range(width))
        like = live.similarity_key(wide)
        assert isinstance(like, tuple)
        stages.append(like[-1])
    assert sorted(set(stages)) == [0, *range(2, 16), *range(16, 32, 2), *range(32, 60, 4)]


def test_jobs_of_which_nothing_is_known_are_alike_and_others_are_not() -> None:
    live = OnlineEstimator(CLUSTER)
    before = live.similarity_key(SPEC)
    assert before == live.similarity_key(OTHER) != live.similarity_key(replace(OTHER, batch_size=8))
    learned(live, SPEC, 10.0, 0)
    first = live.similarity_key(SPEC)
    assert first != live.similarity_key(OTHER) == before
    learned(live, SPEC, 12.0, 0)
    assert first != live.similarity_key(SPEC)
    learned(live, SPEC, 18.0, 0, 1)
    known = live.similarity_key(SPEC)
    learned(live, OTHER, 3.0, 0)
    assert live.similarity_key(SPEC) != known, "places compare otherwise once another job was measured"


class TestContract(EstimatorContract):
    """Without a profile."""

    examples = 15
    kinds = ("cpu1", "cpu2")

    def make_estimator(self) -> OnlineEstimator:
        return OnlineEstimator(Cluster.build([(2, 4, "cpu1"), (1, 4, "cpu2")]))


def test_synchronisation_over_a_measured_link_is_part_of_a_step_across_nodes() -> None:
    cluster = Cluster.build([(3, 2, "cpu1")])
    for one, other, speed in (("n0", "n1", 1e9), ("n0", "n2", 1e8), ("n1", "n2", 1e8)):
        cluster = cluster.with_link(Link((one, other), speed))
    live = OnlineEstimator(cluster)
    fast, slow = (cluster.placement(Allocation.of(*devices)) for devices in ((0, 2), (0, 4)))
    learned(live, SPEC, 2.0, 0, 1)
    assert live.rate(SPEC, fast).mean == live.rate(SPEC, slow).mean == 2.0, "before its gradients are known"
    live.take(Sized(SPEC.id, 100, gradient_bytes=100_000_000))
    assert 1.0 / live.rate(SPEC, fast).mean == pytest.approx(0.5 + 0.1, rel=0.02)
    assert 1.0 / live.rate(SPEC, slow).mean == pytest.approx(0.5 + 1.0, rel=0.05)


def test_a_step_measured_over_one_link_tells_of_another_link() -> None:
    cluster = Cluster.build([(3, 1, "cpu1")])
    for one, other, speed in (("n0", "n1", 1e9), ("n0", "n2", 1e8)):
        cluster = cluster.with_link(Link((one, other), speed))
    live = OnlineEstimator(cluster)
    live.take(Sized(SPEC.id, 100, gradient_bytes=100_000_000))
    for _ in range(20):  # twice what the link's speed says
        report = ProgressReported(SPEC.id, 1, 5.0, 1 / 2.5, step_s=2.5, sync_s=2.0)
        live.learn(1.0, running(SPEC, 0, 2), report)
    fast = cluster.placement(Allocation.of(0, 1))
    assert 1.0 / live.rate(SPEC, fast).mean == pytest.approx(0.5 + 0.2, rel=0.15)
    assert live.rate(SPEC, cluster.placement(Allocation.of(0, 2))).mean == pytest.approx(1 / 2.5), "as measured"


def test_idle_portions_are_those_measured_without_neighbours_on_these_device_types() -> None:
    cluster = Cluster.build([(1, 1, "fast"), (1, 2, "slow")])
    live, groups = OnlineEstimator(cluster), ((Kind("fast"), 1), (Kind("slow"), 2))
    assert live.idle(SPEC, groups) == {}
    live.learn(1.0, running(SPEC, 0, 1, 2), ProgressReported(SPEC.id, 1, 5.0, 1.0, step_s=1.0, busy=(0.25, 0.5, 0.75)))
    assert live.idle(SPEC, groups) == {"fast": 0.75, "slow": 0.25}
    assert live.idle(SPEC, ((Kind("fast"), 1), (Kind("slow"), 1))) == {}
    live.neighbours_of = lambda job: (Neighbour(JobSpec(JobId("other"))),)
    live.learn(1.0, running(SPEC, 0, 1, 2), ProgressReported(SPEC.id, 1, 6.0, 1.0, step_s=1.0, busy=(0.1, 0.1, 0.1)))
    assert live.idle(SPEC, groups) == {"fast": 0.75, "slow": 0.25}


def test_first_speeds_are_cores_and_portions_of_a_gpu() -> None:
    lane = LocalDevice(2, "cuda:0@25", "H200@25", (), 0, lane_percent=25)
    devices = [LocalDevice(0, "cpu:0", "cpu2", (0, 1)), LocalDevice(1, "cuda:1", "H200", (), 1), lane]
    assert initial_speeds(devices) == {"cpu2": 2.0, "H200": 1.0, "H200@25": 0.25}
