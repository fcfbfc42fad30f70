"""How places compare for jobs that run, from the steps of all of them and the links."""

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


class Place(NamedTuple):
    """Where a job runs with which batch (0: its own)."""

    groups: Groups
    batch_size: int = 0

    @property
    def width(self) -> int:
        """How many devices."""
        return sum([count for _, count in self.groups])


class Places:
    """Throughput over the links of a cluster, fitted to the places that jobs were measured in.

    How much of a step is fixed shows only on unlike numbers of devices: before that there is no answer.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._throughput = Throughput(Fabric.of(cluster))
        self._widths: dict[JobId, set[int]] = {}
        self._batches: dict[JobId, set[int]] = {}  # that a job was measured with
        self._like: dict[Place, Runner | None] = {}  # a job there, its name left out
        self._steps: dict[JobId, dict[Place, Estimate | None]] = {}
        self._there: dict[Groups, set[JobId]] = {}  # who was measured where
        self._asked: set[tuple[Groups, bool]] = set()

    def fit(self, measured: Iterable[tuple[JobId, Place, float]]) -> Places:
        """From scratch, to jobs in places and their steps per second."""
        for known in (self._widths, self._batches, self._steps, self._there, self._asked):
            known.clear()
        groups, seconds = [], []
        for job, place, rate in measured:
            runner = self._runner(job, place)
            if runner is not None:
                self._widths.setdefault(job, set()).add(place.width)
                self._batches.setdefault(job, set()).add(place.batch_size)
                self._there.setdefault(place.groups, set()).add(job)
                groups.append([runner])
                seconds.append([1.0 / rate])
        self._throughput.fit(groups, seconds)
        return self

    def ratio(self, job: JobId, before: Place, after: Place) -> Estimate | None:
        """The job's rate in one place over that in another; None where too little is known."""
        if len(self._widths.get(job, ())) < 2:
            return None
        old, new = self._step_s(job, before), self._step_s(job, after)
        if old is None or new is None:
            return None
        ratio = old.mean / new.mean
        return Estimate(ratio, ratio * new.std / new.mean)

    def _step_s(self, job: JobId, place: Place) -> Estimate | None:
        """Plans ask for the same places again and again, and what they ask of one job they ask of others too."""
        steps = self._steps.setdefault(job, {})
        found = steps.get(place)
        if found is None and place not in steps:
            self._predict([(job, place), *self._others_there(job, place.groups)])
            found = steps[place]
        return found

    def _others_there(self, job: JobId, groups: Groups) -> Iterator[tuple[JobId, Place]]:
        """Jobs of which places can be compared, on those devices with their batches; nobody the second time.

        A job that was measured there is asked about with all others that were, and any other one with everybody.
        """
        there = self._there.get(groups, ())
        asked = (groups, job in there)
        if asked not in self._asked:
            self._asked.add(asked)
            for other, widths in self._widths.items():
                if len(widths) > 1 and (not asked[1] or other in there):
                    yield from [(other, Place(groups, batch_size)) for batch_size in self._batches[other]]

    def _predict(self, asked: Iterable[tuple[JobId, Place]]) -> None:
        """Find the steps that are not known yet, all at once."""
        runners: dict[tuple[JobId, Place], Runner] = {}
        for job, place in asked:
            steps = self._steps.setdefault(job, {})
            if place not in steps:
                steps[place] = None
                if (runner := self._runner(job, place)) is not None:
                    runners[job, place] = runner
        found = self._throughput.predict([[runner] for runner in runners.values()]) if runners else []
        for (job, place), (step,) in zip(runners, found, strict=True):
            self._steps[job][place] = step

    def _runner(self, job: JobId, place: Place) -> Runner | None:
        if place not in self._like:
            self._like[place] = self._on_devices(place)
        like = self._like[place]
        return None if like is None else like._replace(model=job)

    def _on_devices(self, place: Place) -> Runner | None:
        devices = stand_ins(self.cluster, place.groups)
        if devices is None:
            return None
        kinds = tuple([str(self.cluster.kind_of(device)) for device in devices])
        samples = max(1.0, (place.batch_size or _SAMPLES) / len(devices))
        return Runner("", devices, kinds, (samples,) * len(devices))
