"""World from Gavel's throughput tables: steps per second by job type, scale and device type."""

from __future__ import annotations

import ast
import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from carpool.core.errors import InputError, UnknownName, cause
from carpool.core.estimates import Estimator
from carpool.core.model import JobSpec, Kind
from carpool.core.topology import Cluster, Neighbour, Placement
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.base import Oracle, SteadyWorld

_ALONE = "null"  # the table's name for no neighbour
_NOT_A_KIND = "_unconsolidated"  # rows for gangs spread over servers, which Gavel's simulator never reads
_USUAL = "Give Gavel's simulation_throughputs.json."

JobType = tuple[str, int]  # model with its batch size, and the number of devices


@dataclass(frozen=True, slots=True)
class GavelWorld(SteadyWorld):
    """Jobs run at the rates of Gavel's table; starts and moves are free, and crashes lose nothing."""

    solo: Mapping[str, Mapping[JobType, float]]  # by kind, in lower case
    pairs: Mapping[str, Mapping[tuple[JobType, JobType], float]]  # rate of the first beside the second
    widths: Mapping[str, tuple[int, ...]]  # measured ones of each model, ascending

    @classmethod
    def load(cls, path: str | Path) -> GavelWorld:
        path = Path(path)
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"cannot be read: {cause(error)}", where=str(path), way_out=_USUAL) from None
        try:
            return cls.of_table(table)
        except (AttributeError, IndexError, SyntaxError, TypeError, ValueError) as error:
            raise InputError(f"is not a throughput table: {error}", where=str(path), way_out=_USUAL) from None

    @classmethod
    def of_table(cls, table: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> GavelWorld:
        """From ``{type: {"('model', width)": {"null": rate, "('other', width)": [rate, the other's rate]}}}``."""
        solo: dict[str, dict[JobType, float]] = {}
        pairs: dict[str, dict[tuple[JobType, JobType], float]] = {}
        for kind, rows in table.items():
            if kind.endswith(_NOT_A_KIND):
                continue
            alone = solo[kind.casefold()] = {}
            beside = pairs[kind.casefold()] = {}
            for name, row in rows.items():
                job_type = _job_type(name)
                for other, rates in row.items():
                    if other == _ALONE:
                        alone[job_type] = float(rates)
                    else:
                        beside[job_type, _job_type(other)] = float(rates[0])
        if not any(solo.values()):
            raise ValueError("no device type has a job type with a rate alone")
        widths: dict[str, set[int]] = {}
        for rows_alone in solo.values():
            for model, width in rows_alone:
                widths.setdefault(model, set()).add(width)
        return cls(solo, pairs, {model: tuple(sorted(measured)) for model, measured in widths.items()})

    def prepare(self, arrivals: Sequence[Arrival], cluster: Cluster) -> tuple[Sequence[Arrival], Cluster]:
        self.check([spec for _, spec in arrivals], cluster)
        return SteadyWorld.prepare(self, arrivals, cluster)

    def check(self, specs: Iterable[JobSpec], cluster: Cluster) -> None:
        """InputError unless every device type and job type is in the table and every job can run somewhere."""
        for kind in cluster.kinds:
            self._rows(kind)
        seen: set[tuple[str, int, tuple[Kind, ...]]] = set()
        for spec in specs:
            like = (spec.model, spec.devices, spec.kinds)
            if like in seen:
                continue
            seen.add(like)
            kinds = [kind for kind in spec.kinds or cluster.kinds if kind in cluster.capacity]
            if all(self.alone(kind, spec, spec.devices) <= 0.0 for kind in kinds):
                raise InputError(
                    f"job {spec.id!r} ({spec.model}, {spec.devices} devices) makes no progress on "
                    f"{', '.join(kinds) or 'any device type it accepts'}",
                    way_out="Add devices of a type for which the table has a rate above 0, or drop the job.",
                )

    def alone(self, kind: Kind, spec: JobSpec, width: int) -> float:
        """Steps per second on that many devices of a type, alone."""
        rows = self._rows(kind)
        rate = rows.get((spec.model, width))
        if rate is not None:
            return rate
        widths = self.widths.get(spec.model)
        if widths is None:
            raise UnknownName("job type", spec.model, self.widths, where=f"job {spec.id!r}")
        measured = [known for known in widths if (spec.model, known) in rows]
        if not measured:
            return 0.0
        place = bisect_left(measured, width)
        if place == len(measured):
            return rows[spec.model, measured[-1]]
        above = rows[spec.model, measured[place]]
        if place == 0:
            return above * width / measured[0]
        low, high = measured[place - 1], measured[place]
        below = rows[spec.model, low]
        return below + (above - below) * (width - low) / (high - low)

    def rate(self, spec: JobSpec, placement: Placement) -> float:
        groups = placement.groups
        width = groups[0][1] if len(groups) == 1 else placement.num_devices
        if not placement.neighbours:
            slowest = min([self.alone(kind, spec, width) for kind in {kind for kind, _ in groups}])
            return slowest * placement.fraction
        return min([self._beside(kind, spec, width, placement) for kind in placement.kinds])

    def estimator(self) -> Estimator:
        return GavelOracle(self)

    def _rows(self, kind: Kind) -> Mapping[JobType, float]:
        rows = self.solo.get(kind) or self.solo.get(kind.casefold())
        if rows is None:
            raise UnknownName("device type", kind, self.solo)
        return rows

    def _beside(self, kind: Kind, spec: JobSpec, width: int, placement: Placement) -> float:
        alone = self.alone(kind, spec, width)
        if alone <= 0.0:
            return 0.0
        pairs = self.pairs[kind.casefold()]
        own = (spec.model, width)
        ratios: list[float] = []
        others: list[Neighbour] = []
        for neighbour in placement.neighbours:
            rate = pairs.get((own, (neighbour.spec.model, neighbour.spec.devices)))
            if rate is None:
                others.append(neighbour)
            else:
                ratios.append(rate / alone)
        load = placement.fraction + sum([neighbour.fraction for neighbour in others])
        return alone * prod(ratios) * (placement.fraction / max(1.0, load) if others else 1.0)


@dataclass(frozen=True, slots=True)
class GavelOracle(Oracle[GavelWorld]):
    """Oracle of a `GavelWorld`."""

    def similarity_key(self, spec: JobSpec) -> tuple[str, int]:
        return spec.model, spec.devices


def _job_type(text: str) -> JobType:
    """``('ResNet-18 (batch size 16)', 1)`` as model and number of devices."""
    model, width = ast.literal_eval(text)
    return str(model), int(width)
