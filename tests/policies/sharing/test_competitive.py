"""Competitive sharing: the search against brute force, verification, falling back to turns, and its notes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.backends.online_estimator import OnlineEstimator
from carpool.core.errors import InputError, UnknownName
from carpool.core.estimates import DeclaredEstimator, Estimate, Estimator
from carpool.core.model import DeviceId, Job, JobId, JobSpec, Kind, Phase
from carpool.core.topology import Cluster, Neighbour, Placement
from carpool.policies.sharing.competitive import Competitive, contrasted
from carpool.policies.sharing.share_search import Setting, ShareSearch, Tenant, fair, raw
from carpool.policies.sharing.trial_log import Mark, Trial, Trials, Tried
from carpool.policies.sharing.trial_model import Slowdown
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.base import Pace, PlainWorld, TrainingSignals
from carpool.sim.worlds.contention import Contender, Contention
from carpool.testing import drive

KIND = Kind("H200")
LEVELS = (0.25, 0.4, 0.5, 0.75, 1.0)
USES = {"light": (0.2, 0.05), "middle": (0.5, 0.3), "heavy": (0.9, 0.6)}


class Contended(Estimator):
    """An estimator that knows the contention rule."""

    version = 0

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        own = Contender(*USES[spec.model], placement.fraction)
        others = [Contender(*USES[n.spec.model], n.fraction) for n in placement.neighbours]
        batch = placement.batch_size or spec.batch_size or 1
        return Estimate(Contention().speed(own, others) * (batch / (spec.batch_size or 1)) ** 0.5)

    def remaining(self, job: object, at: float) -> Estimate:
        return Estimate(1.0)

    def learn(self, at: float, job: object, report: object) -> None:
        """Nothing."""


def tenants(*models: str, **options: object) -> list[Tenant]:
    return [Tenant(JobSpec(JobId(f"{m}{i}"), 1, 10.0, m, **options)) for i, m in enumerate(models)]  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(sorted(USES)), min_size=2, max_size=3), st.sampled_from(["fair", "raw"]))
def test_the_search_comes_close_to_the_best_of_all_vectors(models: list[str], objective: str) -> None:
    search = ShareSearch(Contended(), KIND, tenants(*models), LEVELS, objective)
    _, values = search.best()
    everything = [tuple(map(Setting, levels)) for levels in product(LEVELS, repeat=len(models))]
    best = max(search.value(row) for row in search.believed(everything))
    equal = max(search.value(row) for row in search.believed([search.equal(level) for level in LEVELS]))
    assert equal - 1e-9 <= search.value(values) <= best + 1e-9
    assert search.value(values) >= (0.97 if objective == "fair" else 0.95) * best


def test_the_search_looks_at_few_vectors() -> None:
    search = ShareSearch(Contended(), KIND, tenants("light", "middle", "heavy", "light"), LEVELS)
    search.best()
    assert search.asked < 150


def test_batch_sizes_move_only_where_they_may_and_fit() -> None:
    free = tenants("light", "heavy", batch_size=64, batch_range=(32, 256), memory_bytes=100)
    assert {s.batch_size for s in ShareSearch(Contended(), KIND, free, LEVELS).best()[0]} == {256}
    tight = ShareSearch(Contended(), KIND, free, LEVELS, memory_bytes=300).best()[0]
    assert sorted(s.batch_size for s in tight) in ([0, 128], [64, 128])
    bound = ShareSearch(Contended(), KIND, tenants("light", "heavy", batch_size=64), LEVELS).best()[0]
    assert {s.batch_size for s in bound} == {0}


def test_a_fixed_setting_stays() -> None:
    light, heavy = tenants("light", "heavy")
    vector, _ = ShareSearch(Contended(), KIND, [light, heavy._replace(fixed=Setting(0.4))], LEVELS).best()
    assert vector[1] == Setting(0.4)


def test_of_vectors_that_are_as_good_the_first_stays() -> None:
    values = (0.50, 0.600, 0.604, 0.59)
    tried = [Tried((Setting(value),), value) for value in values]
    assert Trial((JobId("a"),), (Setting(1.0),), 0.0, tuple(tried)).best == (Setting(0.600),)
    better = (*tried, Tried((Setting(0.62),), 0.62))
    assert Trial((JobId("a"),), (Setting(1.0),), 0.0, better).best == (Setting(0.62),)


def test_objectives() -> None:
    assert fair([1.0, 1.0], [0.25, 1.0]) == pytest.approx(0.5)
    assert raw([1.0, 3.0], [0.2, 0.6]) == pytest.approx(0.5)
    assert fair([1.0, 1.0], [0.5, 0.5]) > fair([1.0, 1.0], [0.2, 0.9])


def test_notes_survive_json() -> None:
    tried = (Tried((Setting(0.4),) * 2, 0.7, (0.5, 0.9)),)
    trial = Trial((JobId("a"), JobId("b")), (Setting(0.5), Setting(1.0, 64)), 6.0, tried, {}, ((Mark(3.0, 4.0),) * 2,))
    trials = Trials({3: trial}, {3: [(JobId("a"), JobId("c"))]})  # type: ignore[dict-item]
    assert json.loads(json.dumps(trials.note())) == trials.note()
    assert Trials.of(trials.note()).get(DeviceId(3)) == trial


def test_notes_of_older_versions_are_read() -> None:
    trial = Trial((JobId("a"),), (Setting(0.5),), 6.0, (Tried((Setting(0.4),), 0.7),))
    note = Trials({3: trial}, {}).note()  # type: ignore[dict-item]
    entry = note["trials"]["3"]
    entry["tried"] = [[[[0.4, 0]], 0.7]]
    for key in ("marks", "rates", "looks", "is_measured", "has_probed"):
        del entry[key]
    assert Trials.of(note).get(DeviceId(3)) == trial


def test_a_judged_vector_corrects_beliefs() -> None:
    search = ShareSearch(Contended(), KIND, tenants("light", "heavy"), LEVELS)
    vector = search.equal(0.5)
    believed = search.believed([vector])[0]
    mix = tuple(tenant.spec.id for tenant in search.tenants)
    trial = Trial(mix, vector, 0.0).judged(search, [believed[0] * 0.5, believed[1]])
    assert [round(factor, 6) for factor in trial.corrections.values()] == [0.5, 1.0]
    assert trial.best == vector


class Unlucky(PlainWorld):
    """Sharing is far worse than anybody believes."""

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        return Pace(0.1 if placement.neighbours else 1.0)


class Hopeful(DeclaredEstimator):
    """Believes that neighbours do no harm."""

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        return Estimate(1.0 if placement.fraction > 0.3 else placement.fraction)


def stream(count: int, work: float = 60.0) -> Sequence[Arrival]:
    return [Arrival(0.0, JobSpec(JobId(f"j{i}"), 1, work)) for i in range(count)]


def test_what_is_slower_than_turns_is_given_up() -> None:
    cluster = Cluster.build([(1, 1, "H200")])
    policy = Competitive(settle_s=1.0, tries=1, most=2)
    shared = simulate(stream(3), cluster, policy, Unlucky(), estimator=Hopeful(), report_every_s=0.5).summary()
    assert shared.finished == 3
    assert shared.makespan_s < 3 * 60.0 + 10.0


def test_a_better_vector_is_found_by_measuring() -> None:
    """The estimator believes that more share is more; equal moderate ones are really twice as good."""

    class Moderate(PlainWorld):
        def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
            if not placement.neighbours:
                return Pace(1.0)
            return Pace(0.9 if placement.load <= 1.5 else 0.55)

        def estimator(self) -> Estimator:
            return MoreIsMore()

    class MoreIsMore(DeclaredEstimator):
        def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
            return Estimate(placement.fraction)

    cluster = Cluster.build([(1, 1, "H200")])
    policy = Competitive(settle_s=1.0, most=2)
    run = drive(policy, cluster, stream(2), Moderate(), report_every_s=0.5)
    kept = [record.planned.reason for record in run.records if record.planned and "keeps" in record.planned.reason]
    assert [reason for reason in kept if "60%/60%" in reason], kept


def test_alone_a_job_has_the_whole_device() -> None:
    run = drive(Competitive(), Cluster.build([(1, 2, "V100")]), stream(2), PlainWorld())
    assert {order.allocation.fractions for _, order in run.orders if hasattr(order, "allocation")} == {(1.0,)}


def test_a_free_device_takes_over_a_sharer() -> None:
    """Of three jobs on two devices the short one ends first: its device goes to one of the two that share."""
    works = (60.0, 10.0, 60.0)
    arrivals = [Arrival(0.0, JobSpec(JobId(f"j{i}"), 1, work)) for i, work in enumerate(works)]
    run = drive(Competitive(), Cluster.build([(1, 2, "V100")]), arrivals, Lenient())
    moves = [record.planned.reason for record in run.records if record.planned and "moves" in record.planned.reason]
    assert len(moves) == 1
    assert run.summary.makespan_s < 70.0


class Lenient(PlainWorld):
    """Neighbours cost a quarter of the speed, and everybody knows."""

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        return Pace(0.75 if placement.neighbours else 1.0)

    def estimator(self) -> Estimator:
        return Hopeful()


@pytest.mark.parametrize(
    "options", [{"objective": "loud"}, {"most": 0}, {"levels": (0.5, 0.2)}, {"tries": 0}, {"levels": ()}]
)
def test_bad_parameters_are_refused(options: dict[str, object]) -> None:
    with pytest.raises((InputError, UnknownName)):
        Competitive(**options)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------ where nothing is known beforehand
class Law(PlainWorld):
    """A world in which slowdowns follow a law, and an estimator that has to find out."""

    hungers = (0.6, 0.3, 0.1)
    harms = (1.2, 0.6, 0.3)
    whole = (200.0, 600.0, 300.0)  # steps per second alone
    beside: ClassVar[dict[JobId, tuple[Neighbour, ...]]] = {}

    def speed(self, place: int, shares: Sequence[float]) -> float:
        others = sum(self.harms[i] * share**1.5 for i, share in enumerate(shares) if i != place)
        return float(1.0 / (1.0 + self.hungers[place] * (1.0 / shares[place] - 1.0) + others))

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        if placement.neighbours:  # not while a probe runs
            self.beside[spec.id] = placement.neighbours
        place = _number(spec)
        shares = [0.0, 0.0, 0.0]
        shares[place] = placement.fraction
        for other in placement.neighbours:
            shares[_number(other.spec)] = other.fraction
        return Pace(self.whole[place] * self.speed(place, shares))

    def estimator(self) -> Estimator:
        live = OnlineEstimator(Cluster.build([(1, 1, "H200")]))
        live.neighbours_of = lambda job: self.beside.get(job.id, ())
        return live


def _number(spec: JobSpec) -> int:
    return int(spec.id.removeprefix("j"))


def test_shares_are_found_where_nothing_is_known() -> None:
    law, steps = Law(), 60_000.0
    run = drive(Competitive(), Cluster.build([(1, 1, "H200")]), stream(3, steps), law, report_every_s=0.2)
    told = [record.planned.reason for record in run.records if record.planned]
    assert any("measures j0, j1, j2 alone" in reason for reason in told), told
    kept = next(reason for reason in told if "keeps" in reason)
    chosen = [float(part) / 100.0 for part in kept.split()[1].replace("%", "").split("/")]
    found, best = (
        fair([1.0] * 3, [law.speed(place, shares) for place in range(3)])
        for shares in (chosen, max(((e,) * 3 for e in Competitive().levels), key=lambda s: _fair_of(law, s)))
    )
    assert found >= 0.99 * best
    assert f"measured {found:.2f}" in kept
    assert next(record.at for record in run.records if record.planned and "keeps" in record.planned.reason) < 12.0


def test_unlike_shares_are_found_where_nothing_is_known() -> None:
    class Skewed(Law):
        """One wants most of the device; the others want little, and harm it where they have much."""

        hungers = (0.9, 0.05, 0.05)
        harms = (0.3, 0.6, 0.6)

    law = Skewed()
    run = drive(Competitive(), Cluster.build([(1, 1, "H200")]), stream(3, 60_000.0), law, report_every_s=0.2)
    kept = next(r.planned.reason for r in run.records if r.planned and "keeps" in r.planned.reason)
    chosen = [float(part) / 100.0 for part in kept.split()[1].replace("%", "").split("/")]
    equal = max(_fair_of(law, (level,) * 3) for level in Competitive().levels)
    assert _fair_of(law, chosen) > 1.05 * equal


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(PlainWorld):
    """Two jobs: the second computes for `part` of each step with all it may have, and waits for its input otherwise."""

    hunger: float
    part: float

    def speeds(self, first: float, second: float) -> tuple[float, float]:
        """Relative to alone; where caps overlap while both compute, the first has what is left of it."""
        kept = 1.0 if not second else min(1.0, second / self.part)
        busy = min(1.0, kept * self.part / second) if second else 0.0
        left = max(0.05, min(first, 1.0 - second))
        made = [1.0 / (1.0 + self.hunger * (1.0 / share - 1.0)) for share in (first, left)] if first else [0.0, 0.0]
        return (1.0 - busy) * made[0] + busy * made[1], kept

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        place = _number(spec)
        shares = [0.0, 0.0]
        shares[place] = placement.fraction
        for other in placement.neighbours:
            shares[_number(other.spec)] = other.fraction
        return Pace(200.0 * self.speeds(*shares)[place])

    def estimator(self) -> Estimator:
        return Law().estimator()


@pytest.mark.parametrize("hunger", [0.3, 0.5])
def test_a_job_that_waits_for_its_input_is_capped_where_that_costs_it_nothing(hunger: float) -> None:
    world = Waiting(hunger=hunger, part=0.3)
    run = drive(Competitive(), Cluster.build([(1, 1, "H200")]), stream(2, 60_000.0), world, report_every_s=0.2)
    kept = next(r.planned.reason for r in run.records if r.planned and "keeps" in r.planned.reason)
    first, second = (float(part) / 100.0 for part in kept.split()[1].replace("%", "").split("/"))
    assert second < first
    equal = max(fair([1.0] * 2, world.speeds(level, level)) for level in Competitive().levels)
    assert fair([1.0] * 2, world.speeds(first, second)) > 1.05 * equal


@pytest.mark.parametrize(
    ("hungers", "whole", "moderate", "wanted"),
    [
        ((0.5, 0.0), (0.5, 0.5), (0.6, 0.6), (0.8, 0.33)),  # far hungrier
        ((0.5, 0.0), (0.7, 0.6), (0.6, 0.6), (1.0, 0.33)),  # and whole shares were better than moderate ones
        ((0.07, 0.0), (0.5, 0.9), (0.52, 0.96), (0.8, 0.33)),  # loses far more
        ((0.0, 0.07), (0.9, 0.5), (0.96, 0.52), (0.33, 0.8)),
        ((0.1, 0.0), (0.6, 0.6), (0.6, 0.65), None),
        ((0.0, 0.0), (0.9, 0.9), (0.96, 0.98), None),  # nobody loses what matters
        ((0.44, 0.12, 0.1), (0.75, 0.42, 0.33), (0.57, 0.55, 0.54), (0.6, 0.33, 0.33)),
        ((0.07, 0.0, 0.0), (0.68, 0.58, 0.58), (0.63, 0.61, 0.61), None),
    ],
)
def test_a_contrast_is_for_the_job_that_equal_shares_hurt(
    hungers: tuple[float, ...],
    whole: tuple[float, ...],
    moderate: tuple[float, ...],
    wanted: tuple[float, ...] | None,
) -> None:
    search = ShareSearch(Contended(), KIND, tenants(*["light"] * len(hungers)), Competitive().levels)
    found = contrasted(search, hungers, {search.equal(1.0): whole, search.moderate(): moderate})
    assert wanted == (None if found is None else tuple(setting.fraction for setting in found))


@given(st.data(), st.integers(2, 4))
def test_a_contrast_favours_one_job_and_isolates_the_others(data: st.DataObject, count: int) -> None:
    def drawn(low: float, high: float) -> list[float]:
        return data.draw(st.lists(st.floats(low, high), min_size=count, max_size=count))

    search = ShareSearch(Contended(), KIND, tenants(*["light"] * count), Competitive().levels)
    tried = {search.equal(1.0): drawn(0.01, 1.0), search.moderate(): drawn(0.01, 1.0)}
    found = contrasted(search, drawn(0.0, 2.0), tried)
    if found is not None:
        *others, most = sorted(setting.fraction for setting in found)
        assert most > search.moderate()[0].fraction
        assert len(set(others)) == 1
        assert sum(others) < 1.0
        assert others[0] <= 1.0 / 3.0


def _fair_of(law: Law, shares: Sequence[float]) -> float:
    return fair([1.0] * 3, [law.speed(place, shares) for place in range(3)])


class Roomy(Law):
    """Larger batches of the small jobs cost little time, and their gradients are noisy."""

    fixed = (0.1, 0.9, 0.8)

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        fixed, own = self.fixed[_number(spec)], spec.batch_size
        longer = fixed + (1.0 - fixed) * (placement.batch_size or own) / own
        return Pace(super().pace(spec, done, placement).rate / longer)

    def signals(self, spec: JobSpec, done: float, placement: Placement) -> TrainingSignals:
        return TrainingSignals(noise=8.0 * spec.batch_size)


def test_shares_and_batches_are_found_together_where_nothing_is_known() -> None:
    def value_of(**options: object) -> float:
        specs = [JobSpec(JobId(f"j{i}"), 1, 1e5, batch_size=64, **options) for i in range(3)]  # type: ignore[arg-type]
        arrivals = [Arrival(0.0, spec) for spec in specs]
        run = drive(Competitive(), Cluster.build([(1, 1, "H200")]), arrivals, Roomy(), report_every_s=0.2)
        kept = next(r.planned.reason for r in run.records if r.planned and "keeps" in r.planned.reason)
        if options:
            assert "with batch size" in kept
        return float(kept.rpartition(" ")[2])

    assert value_of(batch_range=(64, 512)) > 1.3 * value_of()


def test_a_mix_of_which_nothing_is_known_is_given_up_when_it_is_slower_than_turns() -> None:
    class Bad(Law):
        harms = (8.0, 8.0, 8.0)

    run = drive(Competitive(), Cluster.build([(1, 1, "H200")]), stream(2, 20_000.0), Bad(), report_every_s=0.2)
    told = [record.planned.reason for record in run.records if record.planned]
    assert any("waits: sharing" in reason for reason in told), told
    assert run.summary.finished == 2


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(LEVELS), min_size=3, max_size=3), st.integers(2, 5))
def test_slowdowns_are_learned_from_a_few_vectors(shares: list[float], count: int) -> None:
    law = Law()
    tried = [(1.0, 1.0, 1.0), (0.5, 0.5, 0.5), (0.4, 0.75, 0.4), (0.75, 0.4, 0.5), (0.4, 0.4, 1.0)][:count]
    model = Slowdown().fit(tried, [[law.speed(place, vector) for place in range(3)] for vector in tried])
    for place, speed in enumerate(model.predict(tuple(shares))):
        assert 0.0 < speed <= 1.0
        assert speed == pytest.approx(law.speed(place, shares), rel=0.45 if count < 5 else 0.25)


def looked_at(*dones: float) -> Trial:
    """A trial of one job, seen every second with so much work done."""
    spec = JobSpec(JobId("a"))
    trial = Trial((spec.id,), (Setting(0.5),), 0.0)
    for at, done in enumerate(dones):
        trial = trial.seen([Job(spec, 0, 0.0, Phase.RUNNING, done=done, as_of=float(at))])
    return trial


def test_a_vector_is_measured_when_two_windows_agree() -> None:
    assert not looked_at(0.0, 10.0).is_measured
    assert not looked_at(0.0, 10.0, 50.0, 60.0).is_measured  # it began slowly, and stood still for a while
    steady = looked_at(0.0, 10.0, 50.0, 91.0)
    assert steady.is_measured
    assert steady.rates == (40.5,)


def test_windows_grow_where_reports_come_at_odd_moments() -> None:
    """Short windows differ by 14 % though the rate is the same; twice as long ones agree."""
    spec = JobSpec(JobId("a"))
    trial, looks = Trial((spec.id,), (Setting(0.5),), 0.0), 0
    while not trial.is_measured:
        late = 0.03 if looks % 2 else 0.0
        trial = trial.seen([Job(spec, 0, 0.0, Phase.RUNNING, done=40.0 * looks, as_of=0.4 * looks + late)])
        looks += 1
    assert looks == 5
    assert trial.rates == pytest.approx((100.0,))


def test_a_note_of_one_look_is_measured_anew() -> None:
    note = Trials({3: Trial((JobId("a"),), (Setting(0.5),), 6.0)}, {}).note()  # type: ignore[dict-item]
    note["trials"]["3"]["marks"] = [[3.0, 4.0]]
    found = Trials.of(note).get(DeviceId(3))
    assert found is not None
    assert found.marks == ()


def test_a_window_begins_when_shares_hold_and_not_at_the_next_look() -> None:
    """Shares hold after 1.5 s; two windows later they are measured."""
    late, policy = Law(start_s=1.5), Competitive(settle_s=5.0)
    run = drive(policy, Cluster.build([(1, 1, "H200")]), stream(3, 1e5), late, report_every_s=0.2)
    first = next(record.at for record in run.records if record.planned and "measures" in record.planned.reason)
    assert first == pytest.approx(1.5 + 2 * 5.0)


def test_a_window_goes_on_while_a_job_has_not_reported() -> None:
    specs = JobSpec(JobId("quick")), JobSpec(JobId("slow"))
    trial = Trial(tuple(spec.id for spec in specs), (Setting(0.5),) * 2, 0.0)
    for at, slow_at in enumerate((0.0, 0.0, 2.0, 2.0, 4.0)):
        done = (10.0 * at, slow_at), (slow_at, slow_at)
        jobs = zip(specs, done, (float(at), slow_at), strict=True)
        trial = trial.seen([Job(s, 0, 0.0, Phase.RUNNING, done=d[0], as_of=as_of, rate=99.0) for s, d, as_of in jobs])
    assert trial.rates == (10.0, 1.0)
    assert trial.is_measured


def test_jobs_that_never_report_are_believed_after_a_while() -> None:
    silent = Job(JobSpec(JobId("a")), 0, 0.0, Phase.RUNNING, rate=7.0)
    trial, looks = Trial((silent.id,), (Setting(0.5),), 0.0), 0
    while not trial.is_measured:
        trial, looks = trial.seen([silent]), looks + 1
    assert trial.rates == (7.0,)
    assert looks > 4


def test_nobody_is_believed_whose_rate_is_a_guess() -> None:
    """The first step may take long: what it finds out then is waited for, and does not count as a look."""
    job = Job(JobSpec(JobId("a")), 0, 0.0, Phase.RUNNING, rate=7.0)
    trial = Trial((job.id,), (Setting(0.5),), 0.0)
    for _ in range(100):
        trial = trial.seen([job], is_guess=True)
    assert not trial.is_measured
    for look in range(1, 4):
        moved = Job(job.spec, 0, 0.0, Phase.RUNNING, done=40.0 * look, as_of=float(look))
        trial = trial.seen([moved], is_guess=True)
    assert trial.rates == (40.0,)


def test_a_few_slow_first_steps_are_no_rate() -> None:
    """Steps that are made twice to prove a recording are alike, and say nothing of those that follow."""
    spec = JobSpec(JobId("a"))
    trial = Trial((spec.id,), (Setting(0.5),), 0.0)
    for look, done in enumerate((0.0, 1.0, 2.0, 3.0, 40.0, 80.0, 120.0)):
        job = Job(spec, 0, 0.0, Phase.RUNNING, done=done, as_of=float(look))
        trial = trial.seen([job], is_guess=True)
        assert trial.is_measured == (look == 6), look
    assert trial.rates == (40.0,)


def test_rates_that_never_settle_are_taken_in_the_end() -> None:
    wild = [1.2**look for look in range(30)]
    assert not looked_at(*wild[:11]).is_measured
    assert looked_at(*wild).is_measured
