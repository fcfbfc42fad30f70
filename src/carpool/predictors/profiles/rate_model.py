"""Rate model of a profile: measured rates first, then fitted, then scaled to the placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from statistics import median
from typing import NamedTuple

from carpool.core.estimates import Estimate
from carpool.core.model import JobSpec, Kind, lane_of
from carpool.core.topology import Placement
from carpool.predictors.profiles.batch_models import MemoryModel, StepTime
from carpool.predictors.profiles.profile import Measurement, Profile, measurement_key, short_entry

_SERIAL = 0.1  # serial part of a step, until measured: rate(n) = n / (1 + 0.1·(n − 1))
_MEASURED, _SCALED, _DOUBTFUL = 0.05, 0.25, 0.5  # least relative spread by basis


class RateBelief(NamedTuple):
    """Steps per second, and what they are based on."""

    rate: Estimate
    basis: str  # "measured", "fitted" or "scaled", and any doubt


@dataclass(frozen=True, slots=True)
class ProfileRateModel:
    """Predicts rates and memory from one profile.

    Measured settings are returned as measured. Another batch size on one device follows T = a + b·m; more devices
    follow the widest setting measured (Amdahl); a share follows the nearest shares; a neighbour follows
    measurements with it, or with others. Without measurements: a tenth serial, proportional to the share, slowed
    only where shares sum past one.
    """

    profile: Profile
    doubt: str = ""  # why the profile may not apply here: another file, another machine
    exact: bool = False
    _steps: Mapping[str, StepTime] = field(default_factory=dict, repr=False)
    _held: MemoryModel | None = field(default=None, repr=False)

    @classmethod
    def of(cls, profile: Profile, *, doubt: str = "", exact: bool = False) -> ProfileRateModel:
        fitted = {kind: model for kind in profile.kinds if (model := _step_time(profile, kind)) is not None}
        held = next(filter(None, map(profile.held, profile.kinds)), None)
        return cls(profile, doubt, exact, fitted, held)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self._steps)

    def knows(self, placement: Placement) -> bool:
        return all(self._measured_as(kind)[0] in self._steps for kind in placement.kinds)

    def _measured_as(self, kind: Kind) -> tuple[Kind, float]:
        """The measured device type of which a type is a part: an unmeasured lane counts as a share of its GPU."""
        return (kind, 1.0) if kind in self._steps else lane_of(kind)

    def total_steps(self, spec: JobSpec) -> float | None:
        """The length of a job; None if only a target ends it, or if it may have changed since."""
        total = None if self.doubt else self.profile.total_steps(spec.batch_size)
        return None if total is None else float(total)

    def memory(self, spec: JobSpec) -> int:
        """Bytes that a job needs on each of its devices, with a margin; 0: unknown."""
        if self._held is None:
            return 0
        return int(self._held.bound((spec.batch_size or self.profile.batch_size) / spec.devices))

    def rate(self, placement: Placement, batch_size: int = 0) -> RateBelief | None:
        """Steps per second there; None for an unmeasured device type. `batch_size`: where the placement has none."""
        if not self.knows(placement):
            return None
        batch = placement.batch_size or batch_size or self.profile.batch_size
        mean, basis, spread = self._measured(placement, batch) or self._derived(placement, batch)
        if self.doubt:
            basis, spread = f"{basis}, {self.doubt}", max(spread, _DOUBTFUL)
        return RateBelief(Estimate(mean, mean * spread), basis)

    def _measured(self, placement: Placement, batch: int) -> tuple[float, str, float] | None:
        """The measurement of exactly this setting, alone or beside one neighbour."""
        if len(placement.groups) > 1 or len(placement.neighbours) > 1:
            return None
        (type_there, count), *_ = placement.groups
        kind, portion = self._measured_as(type_there)
        beside = short_entry(placement.neighbours[0].spec.model) if placement.neighbours else ""
        share = placement.fraction * portion
        seen = self._seen(kind, count, share, batch, exact=self.exact, beside=beside)
        if seen is None or seen.step_s is None:
            return None
        spread = (seen.step_spread_s or 0.0) / seen.step_s / max(1, seen.steps) ** 0.5
        return 1.0 / seen.step_s, "measured", max(_MEASURED, spread)

    def _derived(self, placement: Placement, batch: int) -> tuple[float, str, float]:
        lonely = replace(placement, neighbours=(), beside=0.0)
        mean, basis, spread = self._measured(lonely, batch) or self._alone(lonely, batch)
        beside = self._beside(placement)
        return (mean, basis, spread) if beside == 1.0 else (mean * beside, "scaled", max(spread, _SCALED))

    def _alone(self, placement: Placement, batch: int) -> tuple[float, str, float]:
        count = placement.num_devices
        serial = self._serial()
        rate, error, is_part = 0.0, 0.0, False
        for type_there, number in placement.groups:
            kind, portion = self._measured_as(type_there)
            step = self._steps[kind].predict(batch)
            rate += number * self._share(kind, placement.fraction * portion) / step.mean
            is_part = is_part or portion < 1.0
            error = max(error, step.std / step.mean)
        if self.exact:
            rate /= next(filter(None, map(self.profile.exact_price, self.profile.kinds)), 1.0)
        rate /= 1.0 + serial * (count - 1)
        plain = count == 1 and placement.fraction == 1.0 and not is_part
        basis = "fitted" if plain and not self.exact else "scaled"
        return rate, basis, max(error, _MEASURED if basis == "fitted" else _SCALED)

    def _serial(self) -> float:
        """The serial part of a step, from the widest setting measured."""
        wide = [each for each in self.profile.measurements if each.devices > 1 and each.step_s and not each.beside]
        for each in sorted(wide, key=lambda each: -each.devices):
            alone = self._seen(each.kind, 1, each.share, each.batch_size, exact=each.exact)
            if alone is not None and alone.step_s is not None and each.step_s is not None:
                speedup = alone.step_s / each.step_s
                return max(0.0, (each.devices / speedup - 1.0) / (each.devices - 1))
        return _SERIAL

    def _share(self, kind: str, fraction: float) -> float:
        """Speed with a share of a device over that with the whole, interpolated between measured shares."""
        if fraction == 1.0:
            return 1.0
        points = {0.0: 0.0, 1.0: 1.0}
        for each in self.profile.measurements:
            if each.kind == kind and each.share < 1.0 and each.devices == 1 and each.step_s:
                whole = self._seen(kind, 1, 1.0, each.batch_size, exact=each.exact)
                if whole is not None and whole.step_s is not None:
                    least = points.get(each.share, each.share if each.beside else 0.0)  # alone it is no slower
                    points[each.share] = min(1.0, max(least, whole.step_s / each.step_s))
        low = max(share for share in points if share <= fraction)
        high = min(share for share in points if share >= fraction)
        portion = 0.0 if low == high else (fraction - low) / (high - low)
        return points[low] + portion * (points[high] - points[low])

    def _beside(self, placement: Placement) -> float:
        if not placement.neighbours:
            return 1.0
        known = sorted({each.beside for each in self.profile.measurements if each.beside and each.step_s})
        pairs = {entry: self._pair(entry) for entry in known}
        usual = median(pairs.values()) if pairs else 1.0
        models = [short_entry(neighbour.spec.model) for neighbour in placement.neighbours]
        left = prod(pairs.get(model, usual) for model in models)
        return left if pairs.keys() >= set(models) else min(left, 1.0 / max(1.0, placement.load))

    def _pair(self, entry: str) -> float:
        """Rate beside another training over the rate alone with the same share; the median of measurements."""
        ratios = []
        for each in self.profile.measurements:
            if each.beside == entry and each.step_s:
                there = Placement(((Kind(each.kind), each.devices),), each.share, each.batch_size)
                alone, *_ = self._measured(there, each.batch_size) or self._alone(there, each.batch_size)
                ratios.append(1.0 / (each.step_s * alone))
        return min(1.0, median(ratios))

    def _seen(
        self, kind: str, count: int, share: float, batch: int, *, exact: bool, beside: str = ""
    ) -> Measurement | None:
        wanted = (kind, count, batch, share, exact, beside)
        found = (
            each for each in self.profile.measurements if measurement_key(each) == wanted and each.step_s is not None
        )
        return next(found, None)


def _step_time(profile: Profile, kind: str) -> StepTime | None:
    """T = a + b·m on one device: from default mode, else exact mode, else several devices or shares, else shared."""
    found = profile.step_time(kind) or profile.step_time(kind, exact=True)
    if found is not None:
        return found
    seen = [each for each in profile.measurements if each.kind == kind and each.step_s is not None]
    for each in sorted(seen, key=lambda each: bool(each.beside)):
        assert each.step_s is not None
        alone_s = each.step_s * each.share * each.devices / (1.0 + _SERIAL * (each.devices - 1))
        return StepTime().fit([each.batch_size], [alone_s])
    return None
