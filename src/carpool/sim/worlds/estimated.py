"""World whose true rates are an estimator's predictions, for forecasts and replays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from carpool.core.errors import InputError
from carpool.core.estimates import Estimator
from carpool.core.model import JobId, JobSpec
from carpool.core.topology import Cluster, Placement
from carpool.predictors.profiles.profile import Costs
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.base import Pace, World

FREE = Costs(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class EstimatorWorld(World):
    """The estimator's means are the true rates, in its own units; `luck` makes single jobs faster or slower.

    The time between a job's last unit of work and its end is modelled as one more unit that lasts `end_s`.
    """

    belief: Estimator
    luck: Mapping[JobId, float] = field(default_factory=dict)  # true over estimated rate; default 1
    costs: Mapping[JobId, Costs] = field(default_factory=dict)  # of jobs with known costs
    usual: Costs = FREE  # of the others
    lengths: Mapping[JobId, float] = field(default_factory=dict)  # of jobs whose spec has none

    def prepare(self, arrivals: Sequence[Arrival], cluster: Cluster) -> tuple[Sequence[Arrival], Cluster]:
        for _, spec in arrivals:
            if self._length(spec) is None:
                raise InputError(f"job {spec.id!r} has no length", way_out="Add a column work_s to the trace.")
        return arrivals, cluster

    def work(self, spec: JobSpec) -> float:
        length = self._length(spec)
        assert length is not None, "`prepare` refuses jobs without a length"
        return length + (1.0 if self._costs(spec).end_s else 0.0)

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        rate = self.belief.rate(spec, placement).mean * self.luck.get(spec.id, 1.0)
        end_s, length = self._costs(spec).end_s, self._length(spec)
        if not end_s or length is None:
            return Pace(rate)
        return Pace(rate, length) if done < length else Pace(1.0 / end_s)

    def change_s(self, spec: JobSpec, before: Placement | None, after: Placement) -> float:
        costs = self._costs(spec)
        return (costs.start_s if before is None else costs.resize_s) or 0.0

    def estimator(self) -> Estimator:
        """A copy, so that what the scheduler learns does not change the truth."""
        return deepcopy(self.belief)

    def _length(self, spec: JobSpec) -> float | None:
        return self.lengths.get(spec.id) if spec.work is None else spec.work

    def _costs(self, spec: JobSpec) -> Costs:
        return self.costs.get(spec.id, self.usual).over(self.usual)
