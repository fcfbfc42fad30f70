"""How sites compare for jobs that run, from the steps of all of them and the links."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from carpool.core.estimates import Estimate
from carpool.core.model import JobId
from carpool.core.topology import Cluster
from carpool.predictors.fabric import Fabric, Groups, stand_ins
from carpool.predictors.layout import Runner
from carpool.predictors.throughput import Throughput

_SAMPLES = 64  # of a step, where a job names no batch: only how it is cut matters


class Site(NamedTuple):
    """Where a job runs, and with which batch (0: its own)."""

    groups: Groups
    batch_size: int = 0

    @property
    def width(self) -> int:
        """How many devices."""
        return sum([count for _, count in self.groups])


class Sites:
    """Throughput over the links of a cluster, fitted to the sites that jobs were measured at.

    How much of a step is fixed shows only on unlike numbers of devices: before that there is no answer.
    """

    def __init__(self, cluster: Cluster, throughput: Throughput | None = None) -> None:
        self.cluster = cluster
        self._throughput = throughput or Throughput(Fabric.of(cluster))
        self._widths: dict[JobId, set[int]] = {}
        self._batches: dict[JobId, set[int]] = {}  # that a job was measured with
        self._like: dict[Site, Runner | None] = {}  # a job there, its name left out
        self._steps: dict[JobId, dict[Site, Estimate | None]] = {}
        self._there: dict[Groups, set[JobId]] = {}  # who was measured where
        self._asked: set[tuple[Groups, bool]] = set()

    def fit(self, measured: Iterable[tuple[JobId, Site, float]]) -> Sites:
        """From scratch, to jobs at sites and their steps per second."""
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
        """The job's rate at one site over that at another; None where too little is known."""
        if len(self._widths.get(job, ())) < 2:
            return None
        old, new = self._step_s(job, before), self._step_s(job, after)
        if old is None or new is None:
            return None
        ratio = old.mean / new.mean
        return Estimate(ratio, ratio * new.std / new.mean)

    def _step_s(self, job: JobId, site: Site) -> Estimate | None:
        """Plans ask for the same sites again and again, and what they ask of one job they ask of others too."""
        steps = self._steps.setdefault(job, {})
        found = steps.get(site)
        if found is None and site not in steps:
            self._predict([(job, site), *self._others_there(job, site.groups)])
            found = steps[site]
        return found

    def _others_there(self, job: JobId, groups: Groups) -> Iterator[tuple[JobId, Site]]:
        """Jobs whose sites can be compared, on those devices with their batches; nobody the second time.

        A job that was measured there is asked about with all others that were, and any other one with everybody.
        """
        there = self._there.get(groups, ())
        asked = (groups, job in there)
        if asked not in self._asked:
            self._asked.add(asked)
            for other, widths in self._widths.items():
                if len(widths) > 1 and (not asked[1] or other in there):
                    yield from [(other, Site(groups, batch_size)) for batch_size in self._batches[other]]

    def _predict(self, asked: Iterable[tuple[JobId, Site]]) -> None:
        """Find the steps that are not known yet, all at once."""
        runners: dict[tuple[JobId, Site], Runner] = {}
        for job, site in asked:
            steps = self._steps.setdefault(job, {})
            if site not in steps:
                steps[site] = None
                if (runner := self._runner(job, site)) is not None:
                    runners[job, site] = runner
        found = self._throughput.predict([[runner] for runner in runners.values()]) if runners else []
        for (job, site), (step,) in zip(runners, found, strict=True):
            self._steps[job][site] = step

    def _runner(self, job: JobId, site: Site) -> Runner | None:
        if site not in self._like:
            self._like[site] = self._on_devices(site)
        like = self._like[site]
        return None if like is None else like._replace(model=job)

    def _on_devices(self, site: Site) -> Runner | None:
        devices = stand_ins(self.cluster, site.groups)
        if devices is None:
            return None
        kinds = tuple([str(self.cluster.kind_of(device)) for device in devices])
        samples = max(1.0, (site.batch_size or _SAMPLES) / len(devices))
        return Runner("", devices, kinds, (samples,) * len(devices))
