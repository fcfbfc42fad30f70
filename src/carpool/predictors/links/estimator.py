"""Rate estimators over links: comparison of sites for running jobs, and rates on devices not tried yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from carpool.core.estimates import Estimate, Estimator
from carpool.core.messages import ProgressReported, Record
from carpool.core.model import Job, JobId, JobSpec
from carpool.core.topology import Cluster, Placement
from carpool.predictors.links.fabric import Fabric, Groups, representative_devices
from carpool.predictors.links.layout import PlacedTraining
from carpool.predictors.links.throughput import Throughput
from carpool.predictors.move_cost import MoveCostObserver

_SITE_SAMPLES = 64  # batch size where a job has none: only the split matters


class Site(NamedTuple):
    """Where a job runs, and its batch size (0: its own)."""

    groups: Groups
    batch_size: int = 0

    @property
    def width(self) -> int:
        return sum([count for _, count in self.groups])


class SiteRates:
    """Rates over the links of a cluster, fitted to the sites where jobs were measured.

    The fixed part of a step shows only on different device counts: before that there is no answer.
    """

    def __init__(self, cluster: Cluster, throughput: Throughput | None = None) -> None:
        self.cluster = cluster
        self._throughput = throughput or Throughput(Fabric.of(cluster))
        self._widths: dict[JobId, set[int]] = {}
        self._batches: dict[JobId, set[int]] = {}  # measured batch sizes
        self._like: dict[Site, PlacedTraining | None] = {}  # a training there, without its name
        self._steps: dict[JobId, dict[Site, Estimate | None]] = {}
        self._there: dict[Groups, set[JobId]] = {}  # jobs measured there
        self._asked: set[tuple[Groups, bool]] = set()

    def fit(self, measured: Iterable[tuple[JobId, Site, float]]) -> SiteRates:
        """Fit from scratch to jobs at sites and their steps per second."""
        for known in (self._widths, self._batches, self._steps, self._there, self._asked):
            known.clear()
        groups, seconds = [], []
        for job, site, rate in measured:
            runner = self._runner(job, site)
            if runner is not None:
                self._widths.setdefault(job, set()).add(site.width)
                self._batches.setdefault(job, set()).add(site.batch_size)
                self._there.setdefault(site.groups, set()).add(job)
                groups.append([runner])
                seconds.append([1.0 / rate])
        self._throughput.fit(groups, seconds)
        return self

    def ratio(self, job: JobId, before: Site, after: Site) -> Estimate | None:
        """The job's rate at one site over that at another; None if unknown."""
        if len(self._widths.get(job, ())) < 2:
            return None
        old, new = self._step_s(job, before), self._step_s(job, after)
        if old is None or new is None:
            return None
        ratio = old.mean / new.mean
        return Estimate(ratio, ratio * new.std / new.mean)

    def _step_s(self, job: JobId, site: Site) -> Estimate | None:
        """Cached step time; the first query of a site predicts it for all comparable jobs at once."""
        steps = self._steps.setdefault(job, {})
        found = steps.get(site)
        if found is None and site not in steps:
            self._predict([(job, site), *self._others_there(job, site.groups)])
            found = steps[site]
        return found

    def _others_there(self, job: JobId, groups: Groups) -> Iterator[tuple[JobId, Site]]:
        """Comparable jobs to predict together on those devices; none the second time.

        A job measured there is predicted with all others measured there, any other job with all.
        """
        there = self._there.get(groups, ())
        asked = (groups, job in there)
        if asked not in self._asked:
            self._asked.add(asked)
            for other, widths in self._widths.items():
                if len(widths) > 1 and (not asked[1] or other in there):
                    yield from [(other, Site(groups, batch_size)) for batch_size in self._batches[other]]

    def _predict(self, asked: Iterable[tuple[JobId, Site]]) -> None:
        runners: dict[tuple[JobId, Site], PlacedTraining] = {}
        for job, site in asked:
            steps = self._steps.setdefault(job, {})
            if site not in steps:
                steps[site] = None
                if (runner := self._runner(job, site)) is not None:
                    runners[job, site] = runner
        found = self._throughput.predict([[runner] for runner in runners.values()]) if runners else []
        for (job, site), (step,) in zip(runners, found, strict=True):
            self._steps[job][site] = step

    def _runner(self, job: JobId, site: Site) -> PlacedTraining | None:
        if site not in self._like:
            self._like[site] = self._on_devices(site)
        like = self._like[site]
        return None if like is None else like._replace(model=job)

    def _on_devices(self, site: Site) -> PlacedTraining | None:
        devices = representative_devices(self.cluster, site.groups)
        if devices is None:
            return None
        kinds = tuple([str(self.cluster.kind_of(device)) for device in devices])
        samples = max(1.0, (site.batch_size or _SITE_SAMPLES) / len(devices))
        return PlacedTraining("", devices, kinds, (samples,) * len(devices))


_SAME = 2  # steps kept per training, placement and batch size
_REFIT = 0.25  # part of new steps that triggers a refit; sooner for a training seen on few device counts
_UNSURE = 0.5  # relative spread of a guess
_SERIAL = 0.1  # serial part of a step, until measured
_SAMPLES = 32  # per requested device, where a job has no batch size


class TransferHints(NamedTuple):
    """Known properties of a training's transfers."""

    gradient_bytes: float = 0.0  # 0: to be learned
    input_bytes: float = 0.0  # of a sample
    exchange: str = "ring"


@dataclass(slots=True)
class _Work:
    """Units of work per step of a job."""

    per_step: float
    batch: int


class LinkEstimator(Estimator):
    """Learns step times over links from all jobs (`Throughput`), and the cost of moves (`MoveCostObserver`).

    A placement has device counts per node, not devices: representative nodes stand for it, so only types of devices
    and nodes are distinguished. For a job that has not reported yet only ratios between placements are known.
    Remaining work is what the spec declares.
    """

    version = 0

    def __init__(
        self, cluster: Cluster, fabric: Fabric | None = None, known: Mapping[str, TransferHints] | None = None
    ) -> None:
        self.throughput = Throughput(fabric or Fabric.of(cluster))
        self.moves = MoveCostObserver()
        self._cluster = cluster
        self._known = dict(known or {})  # by model
        self._work: dict[JobId, _Work] = {}
        self._seen: dict[PlacedTraining, int] = {}
        self._widths: dict[str, dict[int, float]] = {}  # by training: seconds of a step, by number of devices
        self._fresh: list[tuple[PlacedTraining, float]] = []
        self._answers: dict[tuple[str, Groups, int], Estimate] = {}
        self._spots: dict[Groups, tuple[int, ...] | None] = {}

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        share = placement.fraction / max(1.0, placement.load)
        work = self._work.get(spec.id)
        step = self.step_time(spec, placement)
        if work is None or step is None:
            rate = placement.num_devices / spec.devices * share
            if step is not None and (asked := self.step_time(spec, self._asked_for(spec, placement))) is not None:
                # as declared on the devices it requested, in proportion elsewhere
                rate = asked.mean / step.mean * share
            return Estimate(rate, rate * _UNSURE)
        batch = placement.batch_size or spec.batch_size or work.batch
        rate = work.per_step * batch / work.batch / step.mean * share
        return Estimate(rate, rate * step.std / step.mean)

    def step_time(self, spec: JobSpec, placement: Placement) -> Estimate | None:
        """Seconds of a step there; None before anything was learned about it."""
        if spec.model not in self._widths:
            return None
        batch = self._batch(spec, placement)
        key = (spec.model, placement.groups, batch)
        found = self._answers.get(key)
        if found is None:
            runner = self._runner(spec, placement.groups, batch)
            if runner is None:
                return None
            found = self._answers[key] = self._first_step(runner) or self.throughput.predict([[runner]])[0][0]
        return found

    def _first_step(self, runner: PlacedTraining) -> Estimate | None:
        """Scaled from the only device count seen so far.

        The fixed part of a step is unknown then. More devices are assumed to help (Amdahl, a tenth serial), so that
        policies try them.
        """
        widths = self._widths[runner.model]
        if len(widths) > 1:
            return None
        ((width, seconds),) = widths.items()
        count = len(runner.devices)
        scaled = seconds * width / count * (1.0 + _SERIAL * (count - 1)) / (1.0 + _SERIAL * (width - 1))
        return Estimate(scaled, scaled * _UNSURE)

    def remaining(self, job: Job, at: float) -> Estimate:
        return Estimate(job.remaining_at(at))

    def move_s(self, spec: JobSpec) -> float | None:
        return self.moves.move_s(spec)

    def record(self, record: Record) -> None:
        self.moves.record(record)

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        held = job.observed
        if held is None or not report.step_s or report.rate <= 0.0 or held.fractions != (1.0,):
            return
        placement = self._cluster.placement(held)
        batch = self._batch(job.spec, placement)
        if job.id not in self._work:
            self._work[job.id] = _Work(report.rate * report.step_s, batch)
            self.version += 1
        runner = self._runner(job.spec, placement.groups, batch)
        if runner is None or self._seen.get(runner, 0) >= _SAME:
            return
        self._seen[runner] = self._seen.get(runner, 0) + 1
        self._fresh.append((runner, report.step_s))
        widths = self._widths.setdefault(runner.model, {})
        is_new = len(widths) < 2 and len(runner.devices) not in widths
        widths.setdefault(len(runner.devices), report.step_s)
        if is_new or len(self._fresh) >= _REFIT * max(8, self.throughput.num_steps):
            self._refit()

    def _refit(self) -> None:
        self.throughput.update([[runner] for runner, _ in self._fresh], [[seconds] for _, seconds in self._fresh])
        self._fresh.clear()
        self._answers.clear()
        self.version += 1

    def _batch(self, spec: JobSpec, placement: Placement) -> int:
        return placement.batch_size or spec.batch_size or _SAMPLES * spec.devices

    def _asked_for(self, spec: JobSpec, placement: Placement) -> Placement:
        """As many devices as requested, of the placement's first type, on as few nodes as possible."""
        kind = placement.groups[0][0]
        whole, rest = divmod(spec.devices, self._cluster.node_size[kind])
        full = ((kind, self._cluster.node_size[kind]),) * whole
        return Placement(((kind, rest), *full) if rest else full, batch_size=placement.batch_size)

    def _runner(self, spec: JobSpec, groups: Groups, batch: int) -> PlacedTraining | None:
        """The job on representative devices of a placement; None if the cluster has none."""
        if groups not in self._spots:
            self._spots[groups] = representative_devices(self._cluster, groups)
        devices = self._spots[groups]
        if devices is None:
            return None
        kinds = tuple([str(self._cluster.kind_of(device)) for device in devices])
        samples = (max(1.0, batch / len(devices)),) * len(devices)
        return PlacedTraining(spec.model, devices, kinds, samples, *self._known.get(spec.model, TransferHints()))
