"""What an estimator has said and what jobs hold, kept from plan to plan, so that a plan asks only for what is new."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from carpool.core.estimates import Estimator
from carpool.core.model import Allocation, JobId, JobSpec, Kind
from carpool.core.topology import Cluster
from carpool.policies.alike import KnowsAlike
from carpool.policies.knapsack import Floats

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


class Known:
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
            if not same or not isinstance(estimates, KnowsAlike):
                self.rows.clear()
                self.seats.clear()
