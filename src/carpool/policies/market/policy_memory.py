"""Policy memory between plans: cached estimates and holdings, and the history kept in the plan's note."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from carpool.core.draft import Draft
from carpool.core.estimates import Estimator
from carpool.core.model import Allocation, Job, JobId, JobSpec, Kind
from carpool.core.policy import Snapshot
from carpool.core.topology import Cluster
from carpool.policies.market.aging import WaitingClocks
from carpool.policies.market.group_trials import GroupTrials
from carpool.policies.market.knapsack import Floats
from carpool.policies.market.prices import KindPrices

Batches = NDArray[np.int64]

_MOST_ASKS = 100_000  # cached requests


class Offer(NamedTuple):
    """Device counts by type, in the order of the cluster's types, without zeros."""

    groups: tuple[tuple[Kind, int], ...]
    width: int  # devices in all

    @classmethod
    def of(cls, *groups: tuple[Kind, int]) -> Offer:
        return cls(groups, sum([count for _, count in groups]))

    def words(self) -> str:
        """Such as ``3 V100``."""
        return " and ".join([f"{count} {kind}" for kind, count in self.groups])


class Row(NamedTuple):
    """Estimates for one job and those like it, by offer."""

    rates: Floats
    batches: Batches  # best batch size, 0: the job's own
    is_guess: NDArray[np.bool_]  # whether the rate is uncertain
    is_sure: bool  # no rate is uncertain


class Held(NamedTuple):
    """What a job holds."""

    allocation: Allocation
    like: Hashable  # its similarity key
    shape: Offer
    spread_rate: float | None  # its rate, if it is on more nodes than necessary


class Ask(NamedTuple):
    """The part of a job's request that its row depends on."""

    spec: JobSpec
    number: int  # equal for equal requests
    tunes: bool  # whether its batch size may change


class EstimateCache:
    """Estimates and holdings kept between plans; entries of ended jobs are dropped from time to time."""

    def __init__(self) -> None:
        self._asked: tuple[Estimator, Cluster] | None = None
        self._version = 0
        self.offers: list[Offer] = []
        self.rows: dict[Hashable, Row] = {}
        self.holdings: dict[JobId, Held] = {}
        self.ratios: dict[object, float] = {}  # rates beside neighbours, see `colocation_groups`
        self.asks: dict[JobId, Ask] = {}
        self._numbers: dict[Hashable, int] = {}

    def ask_of(self, spec: JobSpec) -> Ask:
        devices = (spec.min_devices, spec.max_devices, spec.devices, spec.kinds, spec.memory_bytes)
        key = (*devices, spec.batch_range, spec.batch_size, spec.exact)
        return Ask(spec, self._numbers.setdefault(key, len(self._numbers)), spec.batch_range is not None)

    def keep_for(self, estimates: Estimator, cluster: Cluster) -> None:
        """Drop what another estimator, another cluster or new reports have made invalid."""
        if len(self._numbers) > _MOST_ASKS:
            self._asked = None
            self._numbers.clear()
            self.asks.clear()
        before, self._asked = self._asked, (estimates, cluster)
        same = before is not None and before[0] is estimates and (before[1] is cluster or before[1] == cluster)
        if not same or estimates.version != self._version:
            self._version = estimates.version
            self.ratios.clear()
            if not same:
                self.rows.clear()
                self.holdings.clear()


_NEWEST = 0.3  # weight of the last completed job in the mean length of its model
_NEARLY = 0.1  # least part of the mean length assumed to remain, until the job exceeds the mean by that part


@dataclass(slots=True)
class PolicyMemory:
    """What a plan's note carries to the next plan."""

    tried: dict[JobId, int] = field(default_factory=dict)  # most devices a job has held
    done: dict[JobId, tuple[str, float]] = field(default_factory=dict)  # model and work done at the last plan
    lengths: dict[str, tuple[int, float]] = field(default_factory=dict)  # by model: completed jobs, and their mean work
    outlook: KindPrices | None = None
    trials: GroupTrials = field(default_factory=GroupTrials)
    clocks: WaitingClocks = field(default_factory=WaitingClocks)

    @classmethod
    def of(cls, view: Snapshot) -> PolicyMemory:
        """Read the last plan's note; jobs that are gone add to the lengths of their model."""
        note = cast(Mapping[str, Any], view.note or {})
        memory = cls(
            {JobId(job): int(count) for job, count in note.get("tried", {}).items() if job in view.jobs},
            {},
            {model: (int(count), float(mean)) for model, (count, mean) in note.get("lengths", {}).items()},
            KindPrices.of_note(note.get("outlook")),
            GroupTrials.of(note, view),
            WaitingClocks.of(note, view),
        )
        for job, (model, done) in note.get("done", {}).items():
            if job not in view.jobs and done > 0.0:
                memory._end(str(model), float(done))
        return memory

    def see(self, jobs: Sequence[Job], draft: Draft) -> None:
        changes = draft.changes
        for job in jobs:
            if job.desired is None and job.spec.id not in changes:
                continue
            held = draft.holding(job)
            if held is not None:
                self.tried[job.id] = max(self.tried.get(job.id, 0), held.num_devices)

    def note(self, view: Snapshot, *, lengths: bool) -> dict[str, object]:
        """The note for the next plan; without lengths where jobs declare them."""
        note: dict[str, object] = {"tried": self.tried, **self.trials.note()}
        if len(self.clocks.times):
            note["waiting"] = self.clocks.note()
        if self.outlook is not None:
            note["outlook"] = self.outlook.as_note()
        if lengths:
            note["done"] = {job.id: [job.spec.model, job.done_at(view.at)] for job in view.active()}
            note["lengths"] = {model: list(known) for model, known in self.lengths.items()}
        return note

    def left(self, job: Job, at: float) -> float | None:
        """Work left if the job is as long as completed jobs of its model; None if that is unknown."""
        _, mean = self.lengths.get(job.spec.model, (0, 0.0))
        done = job.done_at(at)
        return max(mean - done, _NEARLY * mean) if done < (1.0 + _NEARLY) * mean else None

    def _end(self, model: str, done: float) -> None:
        count, mean = self.lengths.get(model, (0, 0.0))
        self.lengths[model] = (count + 1, mean + max(_NEWEST, 1.0 / (count + 1)) * (done - mean))
