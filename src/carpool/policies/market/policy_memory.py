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
from carpool.policies.market.knapsack import Floats
from carpool.policies.market.prices import KindPrices

Batches = NDArray[np.int64]

_MOST_ASKS = 100_000  # that are remembered


class Offer(NamedTuple):
    """Devices of each kind, in the order of the cluster's kinds, zeros left out."""

    groups: tuple[tuple[Kind, int], ...]
    width: int  # devices in all

    @classmethod
    def of(cls, *groups: tuple[Kind, int]) -> Offer:
        """From (kind, count) pairs."""
        return cls(groups, sum([count for _, count in groups]))

    def words(self) -> str:
        """Such as ``3 V100``."""
        return " and ".join([f"{count} {kind}" for kind, count in self.groups])


class Row(NamedTuple):
    """What is believed of a job and its like, by offer."""

    rates: Floats
    batches: Batches  # the best there, 0: the job's own
    is_guess: NDArray[np.bool_]  # whether that is only believed
    is_sure: bool  # nothing of it is


class Held(NamedTuple):
    """What a job holds, as a plan sees it."""

    allocation: Allocation
    like: Hashable  # see `alike`
    shape: Offer
    rate_apart: float | None  # where it is on more nodes than it needs


class Ask(NamedTuple):
    """What a job asks for, as far as its row depends on it."""

    spec: JobSpec
    number: int  # the same for those who ask for the same
    tunes: bool  # whether its batch may change


class EstimateCache:
    """Rows of jobs that are alike, seats of jobs that run, and what is left of rates beside others.

    What was not asked for by the last plan is forgotten. An estimator that knows which jobs are alike changes that when
    it learns; of others nothing is kept then.
    """

    def __init__(self) -> None:
        self._asked: tuple[Estimator, Cluster] | None = None
        self._version = 0
        self.offers: list[Offer] = []
        self.rows: dict[Hashable, Row] = {}
        self.seats: dict[JobId, Held] = {}
        self.ratios: dict[object, float] = {}  # see `parties`
        self.asks: dict[JobId, Ask] = {}
        self._numbers: dict[Hashable, int] = {}

    def ask_of(self, spec: JobSpec) -> Ask:
        """What a spec asks for; it is looked at once."""
        told = (spec.min_devices, spec.max_devices, spec.devices, spec.kinds, spec.memory_bytes)
        key = (*told, spec.batch_range, spec.batch_size, spec.exact)
        return Ask(spec, self._numbers.setdefault(key, len(self._numbers)), spec.batch_range is not None)

    def keep_for(self, estimates: Estimator, cluster: Cluster) -> None:
        """Begin anew if it is another estimator, or the cluster has grown, or what was learned may change all."""
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
                self.seats.clear()


_NEWEST = 0.3  # weight of the last ended job of a model, once there are some
_NEARLY = 0.1  # of a length is left at least, until it is clear that the job is longer than its like


@dataclass(slots=True)
class PolicyMemory:
    """Comes out of a plan's note and goes back into the next one."""

    tried: dict[JobId, int] = field(default_factory=dict)  # most devices that a job has had
    done: dict[JobId, tuple[str, float]] = field(default_factory=dict)  # model and work done when it was last seen
    lengths: dict[str, tuple[int, float]] = field(default_factory=dict)  # by model: ended jobs, and their mean work
    outlook: KindPrices | None = None

    @classmethod
    def of(cls, view: Snapshot) -> PolicyMemory:
        """What the last plan noted; of jobs that are gone, how long they were."""
        note = cast(Mapping[str, Any], view.note or {})
        experience = cls(
            {JobId(job): int(count) for job, count in note.get("tried", {}).items() if job in view.jobs},
            {},
            {model: (int(count), float(mean)) for model, (count, mean) in note.get("lengths", {}).items()},
            KindPrices.of_note(note.get("outlook")),
        )
        for job, (model, done) in note.get("done", {}).items():
            if job not in view.jobs and done > 0.0:
                experience._end(str(model), float(done))
        return experience

    def see(self, jobs: Sequence[Job], draft: Draft) -> None:
        """What jobs have once a draft is carried out, they have tried."""
        changes = draft.changes
        for job in jobs:
            if job.desired is None and job.spec.id not in changes:
                continue
            held = draft.holding(job)
            if held is not None:
                self.tried[job.id] = max(self.tried.get(job.id, 0), held.num_devices)

    def note(self, view: Snapshot, *, lengths: bool) -> dict[str, object]:
        """For the next plan; without lengths where those are declared anyway."""
        told: dict[str, object] = {"tried": self.tried}
        if self.outlook is not None:
            told["outlook"] = self.outlook.as_note()
        if lengths:
            told["done"] = {job.id: [job.spec.model, job.done_at(view.at)] for job in view.active()}
            told["lengths"] = {model: list(known) for model, known in self.lengths.items()}
        return told

    def left(self, job: Job, at: float) -> float | None:
        """Work left if the job is as long as its like were; None where nothing tells."""
        _, mean = self.lengths.get(job.spec.model, (0, 0.0))
        done = job.done_at(at)
        return max(mean - done, _NEARLY * mean) if done < (1.0 + _NEARLY) * mean else None

    def _end(self, model: str, done: float) -> None:
        count, mean = self.lengths.get(model, (0, 0.0))
        self.lengths[model] = (count + 1, mean + max(_NEWEST, 1.0 / (count + 1)) * (done - mean))
