"""How places compare for jobs that run, from the steps of all of them and the links."""

from __future__ import annotations

from collections.abc import Iterable
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
        self._steps: dict[tuple[JobId, Place], Estimate | None] = {}

    def fit(self, measured: Iterable[tuple[JobId, Place, float]]) -> Places:
        """From scratch, to jobs in places and their steps per second."""
        self._widths.clear()
        self._steps.clear()
        groups, seconds = [], []
        for job, place, rate in measured:
            runner = self._runner(job, place)
            if runner is not None:
                self._widths.setdefault(job, set()).add(place.width)
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
        """Plans ask for the same places again and again."""
        if (job, place) not in self._steps:
            runner = self._runner(job, place)
            self._steps[job, place] = None if runner is None else self._throughput.predict([[runner]])[0][0]
        return self._steps[job, place]

    def _runner(self, job: JobId, place: Place) -> Runner | None:
        devices = stand_ins(self.cluster, place.groups)
        if devices is None:
            return None
        kinds = tuple([str(self.cluster.kind_of(device)) for device in devices])
        samples = max(1.0, (place.batch_size or _SAMPLES) / len(devices))
        return Runner(job, devices, kinds, (samples,) * len(devices))
