"""Online estimator: rates and lengths of jobs from live reports, with profiles or guesses before the first."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from carpool.backends.batch_stats import BatchStats
from carpool.backends.group_retention import GroupRetention, RateAlone, cores_of
from carpool.core.estimates import Estimate, Estimator, MixEntry
from carpool.core.messages import JobCancelled, JobFailed, JobFinished, ProgressReported, Record
from carpool.core.model import Job, JobId, JobSpec, Kind, lane_of
from carpool.core.topology import Cluster, Neighbour, Path, Placement
from carpool.jobs.devices import LocalDevice
from carpool.predictors.links.estimator import Site, SiteRates
from carpool.predictors.links.fabric import Groups
from carpool.predictors.links.span import SpanModel, on_one_node
from carpool.predictors.loss.curve import LossCurves, LossTarget
from carpool.predictors.move_cost import MoveCostObserver
from carpool.predictors.profiles.batch_models import StepTime
from carpool.predictors.profiles.rate_model import ProfileRateModel, RateBelief
from carpool.predictors.sharing.retention import Traits
from carpool.runtime.executor.reports import Report, Sized

_LATEST = 0.4  # weight of the newest measurement
_SERIAL = 0.1  # serial fraction of a step until measured: rate(n) = n / (1 + 0.1·(n − 1))
_TYPICAL_S = 120.0  # length of an unknown job while no other is known; see `core/estimates.py`
_SEEN = "measured"  # basis of a rate of a profile in exactly that setting
_UNSURE = 0.5  # relative spread of a guess
_LEAST = 0.1  # least relative spread of a rate that was not measured
_FIXED = 0.5  # part of a step's time that is independent of its batch, until measured

# limits on reports: a job may report anything
_MOST_STEPS, _MOST_BATCH, _MOST_WINDOW, _MOST_LOSS = 1e12, 1 << 30, 10_000, 1e30
_MOST_BYTES = 1 << 50  # likewise
_REMEMBERED = 200  # ended jobs whose measurements still show how placements compare
_COMPUTES = 0.1  # least part of a step that is not synchronisation
_PROBED = 0.02  # relative spread of a probe's measurement

_LANE_S = 2.5  # of stall when a job on a GPU changes its lane, until measured

Company = tuple[tuple[JobId, float, int], ...]  # the jobs on the same devices, with share and batch size, in order
_Key = tuple[JobId, Groups, float, int, Company, Path | None]  # …, share, batch size, neighbours, way between nodes


@dataclass(slots=True)
class RateAverage:
    """A moving average of reported rates and of their deviation."""

    mean: float
    spread: float = 0.0


class OnlineEstimator(Estimator):
    """Estimates rates and lengths from the reports of running jobs, and from saved profiles before the first.

    A measured rate is the moving average of the reports with the same devices, share, batch size and co-located jobs
    (`neighbours_of`). Any other rate of a job is scaled from its nearest measured one:

    - to another number of devices: by a model of step times and links, if the job ran on several numbers (`SiteRates`);
      else by its profile; else by Amdahl's law with a tenth serial, and the speeds of the devices;
    - to several nodes with measured links: the predicted synchronisation is added to the step time (`SpanModel`);
    - to another share or other co-located jobs: by the retention model of the device type, which learns from every
      measured group (`RetentionModel`);
    - to another batch size: by `goodput`, with the reported gradient noise.

    A job that never ran and has no profile has rate 1 on the reference device and the mean of the known lengths. Of
    jobs that ended long ago only the lengths are kept, so that planning does not slow down over time.
    """

    predicts_goodput = True
    counts_steps = True
    follows_losses = True
    predicts_retention = True
    measures_idle = True

    def __init__(
        self,
        cluster: Cluster,
        speeds: Mapping[Kind, float] | None = None,
        profiles: Mapping[JobId, ProfileRateModel] | None = None,
    ) -> None:
        self._version = 0
        self._versions: Counter[JobId] = Counter()  # measurements of each job
        self.cluster = cluster  # grows with the scheduler's
        self.curves = LossCurves()  # of jobs that stop at a target loss
        self.moves = MoveCostObserver()
        self._speeds = dict(speeds or {})
        self._wholes: dict[Groups, tuple[float, int]] = {}  # mean speed and number of devices
        self._profiles = dict(profiles or {})
        self._rates: dict[_Key, RateAverage] = {}
        self._of_job: dict[JobId, list[_Key]] = {}
        self._near: dict[JobId, dict[_Key, _Key]] = {}  # see `_nearest`
        self._totals: dict[JobId, float] = {}
        self._over: deque[JobId] = deque()  # ended jobs whose measurements are kept
        self._forgotten_s = (0.0, 0)  # of other ended jobs: the sum of their lengths, and their number
        self._typical = (-1, _TYPICAL_S)  # version and value, see `_typical_s`
        self._settings = 0  # measured so far, over all jobs
        self._sites: tuple[Cluster, int, SiteRates] | None = None  # with the cluster and stage it was fitted to
        self.neighbours_of: Callable[[Job], Sequence[Neighbour] | None] = lambda job: ()  # None: about to change
        self._placements: dict[_Key, Placement] = {}  # of measured keys
        self._groups = GroupRetention(self)
        self._batches = BatchStats()
        self._spans = SpanModel()
        self._idle: dict[JobId, dict[Groups, dict[Kind, float]]] = {}

    @property
    def version(self) -> int:
        return self._version + self.curves.version

    def expect(self, job: JobId, total: float) -> None:
        if self._totals.get(job) != total:
            self._totals[job] = total
            self._version += 1

    def believe(self, spec: JobSpec, belief: ProfileRateModel) -> None:
        """Start from a profile; the job's own reports count more."""
        self._profiles[spec.id] = belief
        self._versions[spec.id] += 1
        self._version += 1
        total = belief.total_steps(spec)
        if total is not None and spec.id not in self._totals:
            self.expect(spec.id, total)

    def take(self, report: Report) -> None:
        if isinstance(report, Sized):
            self._batches.loaded(report.job, report.batch_size if report.batch_size <= _MOST_BATCH else 0)
            self._spans.loaded(report.job, min(report.gradient_bytes, _MOST_BYTES))
            self._versions[report.job] += 1
            self._version += 1
            if report.total_steps is not None:
                self.expect(report.job, min(float(report.total_steps), _MOST_STEPS))
            if report.target_loss is not None and abs(report.target_loss) <= _MOST_LOSS:
                self.curves.aim(report.job, LossTarget(report.target_loss, min(report.window, _MOST_WINDOW)))

    def similarity_key(self, spec: JobSpec) -> Hashable:
        job = spec.id
        if job not in self._versions and job not in self._profiles:
            return spec.batch_size
        widths = {sum([count for _, count in key[1]]) for key in self._of_job.get(job, ())}
        return job, spec.batch_size, self._versions[job], _stage(self._settings) if len(widths) > 1 else 0

    def own_batch(self, spec: JobSpec) -> int:
        return self._batches.own(spec)

    def total(self, job: JobId) -> float | None:
        """The job's total steps; None: unknown."""
        return self._totals.get(job)

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        key = self._key(spec, placement)
        known = self._rates.get(key)
        if known is not None:
            return Estimate(known.mean, known.spread)
        sync = None if placement.path is None else self._spans.sync_s(spec, placement)
        if sync is not None and self.knows_scale(spec):
            return _slowed(self.rate(spec, on_one_node(placement)), sync)
        near = self._nearest(key)
        if near is None:
            return self.first_belief(spec, placement).rate
        first = self.first_belief(spec, placement)
        there = self.first_belief(spec, self._placements[near])
        if first.basis == _SEEN != there.basis:  # measured by an earlier run, which is better than scaling from here
            return first.rate
        step = self._step_time(key)
        if step is not None:
            return Estimate(1.0 / step.mean, step.std / step.mean**2)
        _, groups, fraction, batch_size, company, _ = near
        if fraction == placement.fraction == 1.0 and not placement.neighbours and not company:
            faster = self._known_sites().ratio(spec.id, Site(groups, batch_size), Site(key[1], key[3]))
            if faster is not None:
                guess = self._without_sync(spec, near) * faster.mean
                return Estimate(guess, guess * max(_LEAST, faster.std / faster.mean))
        guess = self._without_sync(spec, near) * first.rate.mean / there.rate.mean
        return Estimate(guess, guess * _UNSURE)

    def sync_s(self, spec: JobSpec, placement: Placement) -> Estimate | None:
        """Seconds of synchronisation across nodes in a step; None: on one node, or unknown."""
        return self._spans.sync_s(spec, placement)

    def _without_sync(self, spec: JobSpec, key: _Key) -> float:
        """A measured rate without the synchronisation across nodes, if that is known."""
        rate = self._rates[key].mean
        sync = None if key[5] is None else self._spans.sync_s(spec, self._placements[key])
        return rate if sync is None else 1.0 / max(1.0 / rate - sync.mean, _COMPUTES / rate)

    def knows_scale(self, spec: JobSpec) -> bool:
        """Whether the job has run or has a profile; else its rate on the reference device is set to 1."""
        return spec.id in self._of_job or spec.id in self._profiles

    def first_belief(self, spec: JobSpec, placement: Placement) -> RateBelief:
        """Steps per second before the job has run, and the basis: its profile, or a guess."""
        kept = self.predicted_retention(spec, placement).mean
        guess = self._relative(placement.groups) * kept
        own = self.own_batch(spec)
        if placement.batch_size and own:
            guess /= _FIXED + (1.0 - _FIXED) * placement.batch_size / own
        profile = self._profiles.get(spec.id)
        if profile is None:
            return RateBelief(Estimate(guess, guess * _UNSURE), "guessed")
        known = profile.rate(placement, own)
        if known is not None and (not placement.neighbours or known.basis.startswith("measured")):
            return known
        alone = profile.rate(Placement(placement.groups, batch_size=placement.batch_size), own)
        if alone is not None:
            shared = alone.rate.mean * kept
            return RateBelief(Estimate(shared, shared * _UNSURE), "scaled")
        kind = Kind(profile.kinds[0])  # scaled from a device type that was measured
        one = profile.rate(Placement(((kind, 1),), batch_size=placement.batch_size), own)
        assert one is not None, "a device type of the profile has a rate"
        scaled = one.rate.mean * guess / self._relative(((kind, 1),))
        return RateBelief(Estimate(scaled, scaled * _UNSURE), "guessed from another kind")

    def retention(self, kind: Kind, mixes: Sequence[Sequence[MixEntry]]) -> list[list[Estimate]]:
        return self._groups.retention(kind, mixes)

    def predicted_retention(self, spec: JobSpec, placement: Placement) -> Estimate:
        return self._groups.predicted(spec, placement)

    def measured(self, spec: JobSpec, placement: Placement) -> Estimate | None:
        """The rate measured in exactly this setting; None: never."""
        known = self._rates.get(self._key(spec, placement))
        return None if known is None else Estimate(known.mean, known.spread)

    def traits(self, spec: JobSpec, kind: Kind, batch_size: int) -> Traits:
        """What is known about a job alone on one device of a type."""
        alone = self.rate_alone(spec, Placement(((kind, 1),), 1.0, batch_size))
        memory = self.memory(spec, batch_size or self.own_batch(spec)) or spec.memory_bytes
        return Traits(None if alone is None else 1.0 / alone.rate, memory)

    def rate_alone(self, spec: JobSpec, placement: Placement) -> RateAlone | None:
        """A rate measured without neighbours, on whole devices or else with the nearest share; None: unknown."""
        for share in (1.0, *self._shares_alone(spec, placement)):
            known = self.measured(spec, Placement(placement.groups, share, placement.batch_size))
            if known is not None:
                return RateAlone(known.mean, share)
        profile = self._profiles.get(spec.id)
        whole = Placement(placement.groups, 1.0, placement.batch_size)
        believed = None if profile is None else profile.rate(whole, self.own_batch(spec))
        is_known = believed is not None and believed.basis in ("measured", "fitted")
        return RateAlone(believed.rate.mean, 1.0) if believed is not None and is_known else None

    def _shares_alone(self, spec: JobSpec, placement: Placement) -> list[float]:
        """Shares with which the job ran without neighbours there, the nearest to that of the placement first."""
        found = {key[2] for key in self._of_job.get(spec.id, ()) if key[1] == placement.groups and not key[4]}
        return sorted(found, key=lambda share: (abs(share - placement.fraction), share))

    def memory(self, spec: JobSpec, batch_size: int = 0) -> int:
        profile = self._profiles.get(spec.id)
        known = 0 if profile is None else profile.memory(replace(spec, batch_size=batch_size or self.own_batch(spec)))
        return known or (self._batches.memory(spec.id, batch_size) if batch_size else 0)

    def noise(self, job: JobId) -> float | None:
        """The gradient noise scale φ in samples, as last reported or from the profile; None: unknown."""
        reported = self._batches.noise(job)
        if reported is not None or job not in self._profiles:
            return reported
        seen = self._profiles[job].profile.noise
        return None if seen is None else seen.scale

    def progress(self, spec: JobSpec, batch_size: int) -> float:
        """Progress of a step with batch m in steps with the job's own m0: m/m0·(φ + m0)/(φ + m).

        While the noise is unknown, no batch counts as better than the job's own.
        """
        own, noise = self.own_batch(spec), self.noise(spec.id)
        if not own or batch_size == own:
            return 1.0
        if noise is None:
            return min(1.0, batch_size / own) * _UNSURE
        return batch_size / own * (noise + own) / (noise + batch_size)

    def goodput(self, spec: JobSpec, kind: Kind, batch_size: int) -> Estimate:
        sizes = batch_size, self.own_batch(spec)
        here, there = (self.rate(spec, Placement(((kind, 1),), batch_size=size)) for size in sizes)
        mean = here.mean / there.mean * self.progress(spec, batch_size)
        return Estimate(mean, mean * here.std / here.mean)

    def rates(self, job: JobId) -> Mapping[Placement, RateAverage]:
        """All rates measured of a job while it ran alone."""
        keys = [key for key in self._of_job.get(job, ()) if not key[4]]
        return {Placement(*key[1:4]): self._rates[key] for key in keys}

    def remaining(self, job: Job, at: float) -> Estimate:
        """Steps left, to the target loss where its curve is known, else to the last step.

        Counted in steps of the job's own batch size: a step with another batch counts by its progress to a target loss,
        or by its samples to a last step.
        """
        spec, done = job.spec, job.done_at(at)
        total = spec.work if spec.work is not None else self._totals.get(spec.id)
        to_target = self.curves.remaining(spec.id, done)
        if to_target is not None and job.observed is not None and job.observed.batch_size:
            worth = self.progress(spec, job.observed.batch_size)
            to_target = Estimate(to_target.mean * worth, to_target.std * worth)
        if total is not None:
            left = Estimate(max(0.0, total - done - self._batches.ahead(spec.id)))
            return left if to_target is None else min(left, to_target)
        if to_target is not None:
            return to_target
        typical = self._typical_s() * self._alone(spec.id)
        return Estimate(typical, typical)

    def knows_length(self, job: Job) -> bool:
        spec = job.spec
        is_declared = spec.work is not None or spec.id in self._totals
        return is_declared or self.curves.remaining(spec.id, job.done) is not None

    def move_s(self, spec: JobSpec) -> float | None:
        known = self.moves.move_s(spec)
        on_gpus = any(cores_of(kind) is None for kind in self.cluster.kinds)
        return _LANE_S if known is None and on_gpus and self._speeds else known

    def record(self, record: Record) -> None:
        self.moves.record(record)
        self._over += (fact.job for fact in record.facts if isinstance(fact, JobFinished | JobFailed | JobCancelled))
        while len(self._over) > _REMEMBERED:
            self._forget(self._over.popleft())

    def _forget(self, job: JobId) -> None:
        total_s, count = self._forgotten_s
        for length_s in self._lengths_s([job]):
            self._forgotten_s = (total_s + length_s, count + 1)
        for key in self._of_job.pop(job, ()):
            del self._rates[key]
            del self._placements[key]
        self._near.pop(job, None)
        self._idle.pop(job, None)
        self._versions.pop(job, None)
        self._profiles.pop(job, None)
        self._batches.forget(job)
        self._spans.forget(job)
        self.curves.forget(job)

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        self._versions[job.id] += 1
        self.curves.learn(job.id, report.done, report.loss)
        self._batches.learn(job, report)
        if report.noise is not None:
            self._version += 1
        if job.observed is None or not 0.0 < report.rate < inf:
            return
        if max(job.observed.devices()) >= self.cluster.num_devices:
            return  # while a journal is replayed: devices that joined later
        neighbours = () if report.alone else self.neighbours_of(job)
        if neighbours is None:
            return
        placement = replace(self.cluster.placement(job.observed), neighbours=tuple(neighbours))
        if not neighbours:
            self._learn_idle(job, placement, report)
        key = self._key(job.spec, placement)
        known = self._rates.get(key)
        if known is None:
            self._placements[key] = placement
            self._of_job.setdefault(job.id, []).append(key)
            self._near.pop(job.id, None)
            self._settings += 1
        if report.alone:
            self._rates[key] = RateAverage(report.rate, report.rate * _PROBED)
        elif known is None:
            self._rates[key] = RateAverage(report.rate, report.rate * _UNSURE)
        else:
            known.spread += _LATEST * (abs(report.rate - known.mean) - known.spread)
            known.mean += _LATEST * (report.rate - known.mean)
        self._version += 1
        if placement.path is not None and report.sync_s:
            self._spans.learn(job.spec, placement, report.sync_s)
        if neighbours or placement.fraction < 1.0:
            self._groups.learn(job.spec, placement)

    def _learn_idle(self, job: Job, placement: Placement, report: ProgressReported) -> None:
        """Learn how long each device of a job waits for the others."""
        devices = sorted(job.observed.devices()) if job.observed is not None else []
        if len(report.busy) != len(devices) or len(devices) < 2:
            return
        idle: dict[Kind, float] = {}
        for device, busy in zip(devices, report.busy, strict=True):
            kind = self.cluster.kind_of(device)
            idle[kind] = min(idle.get(kind, 1.0), max(0.0, 1.0 - busy))
        self._idle.setdefault(job.id, {})[placement.groups] = idle

    def idle(self, spec: JobSpec, groups: Groups) -> Mapping[Kind, float]:
        return self._idle.get(spec.id, {}).get(groups, {})

    def learning(self, job: JobId, steps: float) -> tuple[float, float] | None:
        return self.curves.learning(job, steps)

    def _key(self, spec: JobSpec, placement: Placement) -> _Key:
        """The key of a measurement; no batch size means the job's own."""
        batch_size = placement.batch_size or self.own_batch(spec)
        company = sorted([(n.spec.id, n.fraction, n.batch_size) for n in placement.neighbours])
        return spec.id, placement.groups, placement.fraction, batch_size, tuple(company), placement.path

    def _known_sites(self) -> SiteRates:
        """How sites compare, fitted again when enough new settings were measured (`_stage`)."""
        cluster, stage, sites = self._sites or (None, 0, None)
        if sites is None or cluster != self.cluster or stage != _stage(self._settings):
            whole = [key for key in self._rates if key[2] == 1.0 and not key[4]]
            bare = replace(self.cluster, links=()) if self.cluster.links else self.cluster  # `SpanModel` knows those
            if sites is None or sites.cluster != bare:
                sites = SiteRates(bare)  # keeps the routes while the nodes are unchanged
            rates = [self._without_sync(JobSpec(key[0]), key) for key in whole]
            sites.fit([(key[0], Site(key[1], key[3]), rate) for key, rate in zip(whole, rates, strict=True)])
            self._sites = self.cluster, _stage(self._settings), sites
        return sites

    def _relative(self, groups: Groups) -> float:
        """Speed of whole devices relative to one of speed 1."""
        whole = self._wholes.get(groups)
        if whole is None:
            count = sum([number for _, number in groups])
            speed = sum([number * self._speeds.get(kind, 1.0) for kind, number in groups]) / count
            whole = self._wholes[groups] = speed, count
        speed, count = whole
        return speed * count / (1.0 + _SERIAL * (count - 1))

    def _step_time(self, wanted: _Key) -> Estimate | None:
        """Step time by batch size, T = a + b·m, where at least two sizes were measured at a placement."""
        if len(keys := self._of_job[wanted[0]]) < 2:
            return None
        alike = [key for key in keys if (key[1], key[2], *key[4:]) == (wanted[1], wanted[2], *wanted[4:])]
        if len(alike) < 2:
            return None
        return (
            StepTime().fit([key[3] for key in alike], [1.0 / self._rates[key].mean for key in alike]).predict(wanted[3])
        )

    def _nearest(self, wanted: _Key) -> _Key | None:
        """The measurement without neighbours, with the closest prior speed, then batch size; the newest of equals."""
        job, groups, fraction, batch_size, *_ = wanted
        keys = self._of_job.get(job, ())
        if len(keys) < 2:
            return keys[0] if keys else None
        known = self._near.setdefault(job, {})
        found = known.get(wanted)
        if found is None:
            speed = self._relative(groups) * fraction
            found = known[wanted] = min(
                reversed(keys),
                key=lambda key: (
                    bool(key[4]),
                    abs(self._relative(key[1]) * key[2] - speed),
                    abs(key[3] - batch_size),
                ),
            )
        return found

    def _alone(self, job: JobId) -> float:
        keys = self._of_job.get(job)
        if keys:
            placement = self._placements[keys[-1]]
            kept = self.predicted_retention(JobSpec(job), placement).mean
            return self._rates[keys[-1]].mean / (self._relative(placement.groups) * kept)
        if job in self._profiles:
            one = Placement(((Kind(self._profiles[job].kinds[0]), 1),))
            return self.first_belief(JobSpec(job), one).rate.mean / self._relative(one.groups)
        return 1.0

    def _typical_s(self) -> float:
        """Mean length of the known jobs, cached since a plan asks for every job."""
        version, typical = self._typical
        if version != self._version:
            total_s, count = self._forgotten_s
            lengths_s = self._lengths_s({**self._of_job, **self._profiles})
            count += len(lengths_s)
            typical = (total_s + sum(lengths_s)) / count if count else _TYPICAL_S
            self._typical = self._version, typical
        return typical

    def _lengths_s(self, jobs: Iterable[JobId]) -> list[float]:
        """Known lengths of these jobs, alone on one device."""
        known = [job for job in jobs if job in self._totals and (job in self._of_job or job in self._profiles)]
        return [self._totals[job] / self._alone(job) for job in known]


def _slowed(rate: Estimate, sync: Estimate) -> Estimate:
    """A rate with synchronisation added to every step."""
    if rate.mean <= 0.0:
        return rate
    computing_s = rate.std / rate.mean**2
    slowed = 1.0 / (1.0 / rate.mean + sync.mean)
    return Estimate(slowed, slowed**2 * (computing_s**2 + sync.std**2) ** 0.5)


def _stage(settings: int) -> int:
    """The number of settings, rounded down by up to an eighth from sixteen on."""
    return settings - settings % (1 << max(0, settings.bit_length() - 4))


def initial_speeds(devices: Sequence[LocalDevice]) -> dict[Kind, float]:
    """A first guess of speeds: as many as the cores of a device, or the portion of its GPU; GPUs are equal."""
    return {Kind(device.kind): len(device.cores) or lane_of(Kind(device.kind))[1] for device in devices}
