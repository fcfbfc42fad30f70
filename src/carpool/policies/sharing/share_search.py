"""Search over shares and batch sizes of the jobs on one device, by estimated rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from typing import NamedTuple

from carpool.core.estimates import Estimate, Estimator, MixEntry
from carpool.core.model import JobId, JobSpec, Kind
from carpool.core.topology import Placement
from carpool.policies.estimator_queries import memory_of, worth_of_step

_LEAST = 1e-6
_STARTS = 3  # equal vectors that the search climbs from
_UNSURE = 0.25  # relative spread from which a rate is a guess
_MODERATE = 1.5  # sum of equal shares at which sharing is usually best
_TIE = 1e-6  # weight of the throughput among vectors whose slowest job is equally fast
_MOVES = 64  # search rounds at most; each improves, so this only guards against rounding


class Setting(NamedTuple):
    """One job's share and batch size (0: its own)."""

    fraction: float
    batch_size: int = 0


Vector = tuple[Setting, ...]  # of the jobs of a mix, in their order


class Tenant(NamedTuple):
    """A job in a mix; `fixed` if its setting must not change."""

    spec: JobSpec
    fixed: Setting | None = None


def speeds(estimates: Estimator, kind: Kind, tenants: Sequence[Tenant], vectors: Sequence[Vector]) -> list[list[float]]:
    """Estimated progress of each job under each vector, relative to alone on the whole device."""
    alone = [max(estimates.rate(tenant.spec, Placement(((kind, 1),))).mean, _LEAST) for tenant in tenants]
    mixes = [[(tenant.spec, *setting) for tenant, setting in zip(tenants, v, strict=True)] for v in vectors]
    return [
        [
            rate.mean * worth_of_step(estimates, spec, batch_size) / whole
            for rate, whole, (spec, _, batch_size) in zip(rates, alone, mix, strict=True)
        ]
        for rates, mix in zip(estimates.mixed(kind, mixes), mixes, strict=True)
    ]


def fair(weights: Sequence[float], values: Sequence[float]) -> float:
    """Weighted geometric mean of speeds: halving any job's speed costs the same."""
    return exp(sum(w * log(max(v, _LEAST)) for w, v in zip(weights, values, strict=True)) / sum(weights))


def raw(weights: Sequence[float], values: Sequence[float]) -> float:
    """Weighted mean of speeds, proportional to the normalized throughput Σ P / P(alone)."""
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def barrier(weights: Sequence[float], values: Sequence[float]) -> float:
    """Inverse of the time until the last job is done, if each weight is a job's seconds of work alone: 1 / max D/P.

    Among vectors that are equal in that, the one with the larger throughput wins.
    """
    slowest = min(v / w for w, v in zip(weights, values, strict=True))
    return slowest * (1.0 + _TIE * sum(values))


OBJECTIVES: Mapping[str, Callable[[Sequence[float], Sequence[float]], float]] = {"fair": fair, "raw": raw}
_BY_NAME = {**OBJECTIVES, "barrier": barrier}  # `barrier` is not an objective of a policy: its weights are seconds


@dataclass(slots=True)
class ShareSearch:
    """Search over shares and batch sizes of the jobs on one device."""

    estimates: Estimator
    kind: Kind
    tenants: Sequence[Tenant]
    levels: tuple[float, ...]  # possible shares, ascending
    objective: str = "fair"
    memory_bytes: int = 0  # of the device; 0: unknown
    corrections: Mapping[JobId, float] = field(default_factory=dict)  # measured over estimated speed in this mix
    asked: int = 0  # vectors evaluated

    def value(self, values: Sequence[float]) -> float:
        return _BY_NAME[self.objective]([tenant.spec.weight for tenant in self.tenants], values)

    @property
    def is_guess(self) -> bool:
        """Whether rates at some equal shares are unknown, so that only measuring helps."""
        if self.estimates.predicts_mixes:
            return False
        return any(
            _is_unsure(estimate)
            for level in self.levels
            for estimate in self.estimates.mixed(self.kind, [self._tenures(self.equal(level))])[0]
        )

    def _tenures(self, vector: Vector) -> list[MixEntry]:
        return [(tenant.spec, *setting) for tenant, setting in zip(self.tenants, vector, strict=True)]

    def unknown(self, vector: Vector) -> list[JobId]:
        pairs = zip(self.tenants, vector, strict=True)
        return [tenant.spec.id for tenant, setting in pairs if _is_unsure(self._alone(tenant, setting.fraction))]

    def relative(self, rates: Sequence[float], vector: Vector) -> list[float]:
        """Progress at measured rates, relative to alone on the whole device."""
        found = []
        for tenant, rate, setting in zip(self.tenants, rates, vector, strict=True):
            alone = self._alone(tenant, 1.0).mean
            made = rate * worth_of_step(self.estimates, tenant.spec, setting.batch_size)
            found.append(min(made / alone, 1e6) if alone > 0.0 else 1e6)
        return found

    def solos(self, vectors: Sequence[Vector]) -> list[list[tuple[float, float]]]:
        """For each job the caps of these vectors under which it was measured alone, with its relative speed."""
        found = []
        for tenant, settings in zip(self.tenants, zip(*vectors, strict=True), strict=True):
            whole = self._alone(tenant, 1.0).mean
            known = {s.fraction: self._alone(tenant, s.fraction) for s in settings}
            found.append([(cap, e.mean / whole) for cap, e in known.items() if not _is_unsure(e) and whole > 0.0])
        return found

    def _alone(self, tenant: Tenant, fraction: float) -> Estimate:
        return self.estimates.rate(tenant.spec, Placement(((self.kind, 1),), fraction))

    def believed(self, vectors: Sequence[Vector]) -> list[list[float]]:
        """Relative speeds under each vector, corrected by measurements of the mix."""
        self.asked += len(vectors)
        factors = [self.corrections.get(tenant.spec.id, 1.0) for tenant in self.tenants]
        found = speeds(self.estimates, self.kind, self.tenants, vectors)
        return [[value * factor for value, factor in zip(row, factors, strict=True)] for row in found]

    def best(self, start: Vector | None = None, tabu: Iterable[Vector] = ()) -> tuple[Vector, list[float]]:
        """Hill climbing from the best equal shares, or from `start`.

        A change moves one job's share by one level, or doubles or halves its batch size if that may be tuned
        and memory fits. `tabu` vectors may be passed through, but are returned only if there is no other.
        """
        known: dict[Vector, list[float]] = {}
        starts = [start] if start is not None else self._ranked([self.equal(level) for level in self.levels], known)
        ends = {self._climb(vector, known, set(tabu)) for vector in starts[:_STARTS]}
        best = self._ranked(sorted(ends), known)[0]
        return best, known[best]

    def _climb(self, vector: Vector, known: dict[Vector, list[float]], tabu: set[Vector]) -> Vector:
        for _ in range(_MOVES):
            near = [other for other in self._near(vector) if other not in tabu]
            if not near:
                break
            then = self._ranked(near, known)[0]
            (now,) = self._ranked([vector], known)
            if now not in tabu and self.value(known[then]) <= self.value(known[now]) * (1.0 + 1e-9):
                break
            vector = then
        return vector

    def _ranked(self, vectors: Sequence[Vector], known: dict[Vector, list[float]]) -> list[Vector]:
        """Vectors by value, best first; unknown ones are evaluated in one query."""
        missing = [vector for vector in dict.fromkeys(vectors) if vector not in known]
        if missing:
            known.update(zip(missing, self.believed(missing), strict=True))
        return sorted(dict.fromkeys(vectors), key=lambda vector: -self.value(known[vector]))

    def equal(self, level: float) -> Vector:
        return tuple(tenant.fixed or Setting(level) for tenant in self.tenants)

    def moderate(self, virtual: float = _MODERATE, fewest: int = 1) -> Vector:
        """The largest equal shares that sum to at most `virtual` over the jobs, or over `fewest` if that is more."""
        count = max(fewest, len(self.tenants))
        fitting = [level for level in self.levels if level * count <= virtual + _LEAST]
        return self.equal(max(fitting, default=self.levels[0]))

    def _near(self, vector: Vector) -> list[Vector]:
        near = []
        for place, (tenant, setting) in enumerate(zip(self.tenants, vector, strict=True)):
            for changed in () if tenant.fixed else self._changed(tenant.spec, setting):
                other = (*vector[:place], changed, *vector[place + 1 :])
                if self._fits(other):
                    near.append(other)
        return near

    def _changed(self, spec: JobSpec, setting: Setting) -> list[Setting]:
        level = min(range(len(self.levels)), key=lambda i: abs(self.levels[i] - setting.fraction))
        found = [setting._replace(fraction=self.levels[i]) for i in (level - 1, level + 1) if 0 <= i < len(self.levels)]
        own = self.estimates.own_batch(spec)
        if spec.batch_range is not None and own and not spec.exact:
            now = setting.batch_size or own
            low, high = spec.batch_range
            sizes = [size for size in (now * 2, now // 2) if low <= size <= high]
            found += [setting._replace(batch_size=0 if size == own else size) for size in sizes]
        return found

    def _fits(self, vector: Vector) -> bool:
        """Whether memory suffices, if a job's memory grows in proportion to its batch size."""
        if not self.memory_bytes:
            return True
        needed = 0.0
        for tenant, setting in zip(self.tenants, vector, strict=True):
            own = self.estimates.own_batch(tenant.spec)
            grown = setting.batch_size / own if setting.batch_size and own else 1.0
            needed += memory_of(self.estimates, tenant.spec) * max(1.0, grown)
        return needed <= self.memory_bytes


def _is_unsure(estimate: Estimate) -> bool:
    return estimate.std >= _UNSURE * estimate.mean
