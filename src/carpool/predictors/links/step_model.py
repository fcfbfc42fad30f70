"""Step-time model: computation and transfers with fitted link speeds and per-training parameters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from carpool.predictors.links.fabric import Fabric
from carpool.predictors.links.layout import GRADIENTS, INPUT, Floats, GroupLayout, Ints

Key = TypeVar("Key", bound=tuple[int, float])


class KeyIndex(Generic[Key]):
    """Position of each key in a vector of parameters."""

    __slots__ = ("places", "sizes")

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self.places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        self.sizes: dict[int, list[float]] = {}  # by training, in order
        for training, size in sorted(self.places):
            self.sizes.setdefault(training, []).append(size)

    def __len__(self) -> int:
        return len(self.places)


@dataclass(frozen=True, slots=True)
class PerKeyParams(Generic[Key]):
    """One parameter per key, in the order of the keys."""

    keyed: KeyIndex[Key]
    row: NDArray[np.float64]

    @classmethod
    def none(cls) -> PerKeyParams[Key]:
        return cls(KeyIndex(), np.empty(0))


class Lookup(Generic[Key]):
    """Parameters of certain keys: 0 where one has none.

    With `between`, a key between two sizes of its training gets the interpolation in the logarithm of the size.
    Positions are cached for all vectors with the same keys.
    """

    def __init__(self, keys: Sequence[Key], *, between: bool = False) -> None:
        self.distinct = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        self._of = np.array([self.distinct[key] for key in keys], np.intp)
        self._between = between
        self._found: tuple[KeyIndex[Key], _Stand] | None = None

    def __call__(self, figures: PerKeyParams[Key]) -> NDArray[np.float64]:
        if self._found is None or self._found[0] is not figures.keyed:
            self._found = figures.keyed, self._stand(figures.keyed)
        stand = self._found[1]
        row = np.append(figures.row, 0.0)  # the last is that of keys that have none
        found = row[stand.low]
        apart = stand.apart
        found[apart] += (row[stand.high] - found[apart]) / stand.span * stand.past
        return np.asarray(found[self._of])

    def _stand(self, keyed: KeyIndex[Key]) -> _Stand:
        low = np.full(len(self.distinct), len(keyed), np.intp)
        apart: list[tuple[int, int]] = []  # key, and where the next larger size stands
        logs: list[tuple[float, float, float]] = []  # of the smaller size, of the key's own, of the larger
        for place, key in enumerate(self.distinct):
            known = keyed.places.get(key)
            if known is not None:
                low[place] = known
            elif self._between and (beside := _beside(keyed.sizes.get(key[0], ()), key[1])):
                low[place], high = (keyed.places[key[0], size] for size in beside)  # type: ignore[index]
                apart.append((place, high))
                logs.append((np.log(beside[0]), np.log(key[1]), np.log(beside[1])))
        places = np.array(apart, np.intp).reshape(-1, 2)
        smaller, own, larger = np.array(logs, np.float64).reshape(-1, 3).T
        return _Stand(low, places[:, 0], places[:, 1], larger - smaller, own - smaller)


@dataclass(frozen=True, slots=True)
class _Stand:
    """Positions of keys, and interpolation weights between sizes."""

    low: NDArray[np.intp]  # [key] its own figure, or that of the next smaller size
    apart: NDArray[np.intp]  # the keys between two sizes
    high: NDArray[np.intp]  # of each of those the figure of the next larger size
    span: NDArray[np.float64]
    past: NDArray[np.float64]


def _beside(sizes: Sequence[float], size: float) -> tuple[float, float] | None:
    """The nearest sizes on both sides, if there are any."""
    if not sizes or not sizes[0] < size < sizes[-1]:
        return None
    place = bisect_left(sizes, size)
    return sizes[place - 1], sizes[place]


# C = slowness · (a + b·m) · c(m)        the slowest device; a, b, c by training, slowness by kind of device
#     S = Σ stages repeats · (max over links of portion · bytes / speed · met + Σ latencies of the longest route)
#     T = C + pos(S − o·C)                   what computing does not hide of the transfers; at least the input's time
#
# `met` is the slowdown by other transfers on a link, which is shared in proportion to the flows, or leaves what the
# other does not use if that is more. How often the other transfers follows from its own T and S, so all members of a
# group are solved together. c(m) is the deviation of a measured batch size from a + b·m.


_SOFT = 0.2  # smoothing of pos(), relative to S
_SHARP = 6.0  # sharpness of the maximum over link types
_ROUNDS = 12  # of interaction between members
_BUS, _NETWORK, _LATENCY, _BYTES = (
    np.log(1e10),
    np.log(1e9),
    np.log(2e-5),
    np.log(1e8),
)  # priors
_HIDDEN = 0.0  # log odds of the part of compute time that can hide transfers


@dataclass(slots=True)
class StepParams:
    """All fitted parameters, in logarithms unless noted."""

    speed: Floats  # [link kind] bytes per second
    latency: Floats  # [link kind] seconds
    slowness: Floats  # [device kind]
    fixed: Floats  # [training] a, seconds
    per_sample: Floats  # [training] b, seconds
    hidden: Floats  # [training] log odds of o
    crowding: Floats  # [4] powers of devices, places, most and fewest per place: effects beyond single links
    bytes: Floats  # [training] gradients, where they are not declared
    reach: Floats = field(default_factory=lambda: np.array([[0.0] * 4, [np.inf] * 4]))  # least and most spread seen
    own: PerKeyParams[tuple[int, int]] = field(default_factory=PerKeyParams.none)  # [training, device kind] slowness
    batch: PerKeyParams[tuple[int, float]] = field(default_factory=PerKeyParams.none)  # [training, samples] time

    @classmethod
    def expected(cls, fabric: Fabric, num_kinds: int, num_trainings: int) -> StepParams:
        """The prior: links to devices are expected to be faster than links between nodes."""
        inner = {wire.kind for wire in fabric.wires for end in wire.ends if end.isdigit()}
        return cls(
            np.array([_BUS if kind in inner else _NETWORK for kind in fabric.kinds]),
            np.full(len(fabric.kinds), _LATENCY),
            np.zeros(num_kinds),
            np.full(num_trainings, np.log(0.05)),
            np.full(num_trainings, np.log(0.002)),
            np.full(num_trainings, _HIDDEN),
            np.zeros(4),
            np.full(num_trainings, _BYTES),
        )

    def with_average(self) -> StepParams:
        fixed, per_sample, hidden, bytes_ = (
            np.append(known, known.mean()) for known in (self.fixed, self.per_sample, self.hidden, self.bytes)
        )
        return replace(self, fixed=fixed, per_sample=per_sample, hidden=hidden, bytes=bytes_)


class TransferTimes(NamedTuple):
    """Seconds of transfers."""

    gradients: Floats  # [member]
    input: Floats  # [member]
    once: Floats  # [stage] one pass
    alone: Floats  # [load] by itself on its link
    by_links: Floats  # [stage] one pass by the links' speeds alone, without latencies and crowding
    crowd: Floats  # [stage] factor of a pass by crowding


class StepGradients(NamedTuple):
    """Derivatives of the logarithm of each member's step time."""

    speed: Floats  # [member, link kind]
    latency: Floats  # [member, link kind]
    crowding: Floats  # [member, 4]
    compute: Floats  # [member] with the logarithm of its seconds of computing
    hidden: Floats  # [member]
    bytes: Floats  # [member]


class StepModel:
    """Step times of a layout for given parameters."""

    def __init__(self, layout: GroupLayout, trainings: Sequence[int]) -> None:
        self.layout = layout
        self.training: Ints = np.array(trainings, np.intp)  # [member]
        runners = layout.runners
        self._declared = np.array([runner.gradient_bytes for runner in runners], np.float64)
        self._fed = np.array([runner.input_bytes * sum(runner.samples) for runner in runners], np.float64)
        self._is_fed = layout.stage_stream == INPUT
        changes = (np.diff(layout.load_stage) != 0) | (np.diff(layout.load_kind) != 0)
        self._kind_firsts = np.flatnonzero(np.r_[True, changes]) if len(layout.load_stage) else layout.load_firsts
        self.spread: Floats = np.log(layout.spread)
        firsts = np.flatnonzero(np.r_[True, np.diff(layout.device_member) > 0]) if runners else np.empty(0, np.intp)
        self.device_firsts = firsts
        training = self.training[layout.device_member].tolist()
        self.own_keys: list[tuple[int, int]] = list(zip(training, layout.device_kind.tolist(), strict=True))
        self.batch_keys: list[tuple[int, float]] = list(zip(training, layout.device_samples.tolist(), strict=True))
        self._own, self._batch = Lookup(self.own_keys), Lookup(self.batch_keys, between=True)

    @property
    def most_samples(self) -> Floats:
        return np.asarray(np.maximum.reduceat(self.layout.device_samples, self.device_firsts))

    def link_uses(self) -> list[int]:
        pairs = set(zip(self.layout.load_stage.tolist(), self.layout.load_kind.tolist(), strict=True))
        counts = [0] * self.layout.stage_hops.shape[1]
        for _, kind in pairs:
            counts[kind] += 1
        return counts

    def compute(self, figures: StepParams) -> tuple[Floats, Ints]:
        """Compute seconds of each member, and its slowest device."""
        layout, training = self.layout, self.training[self.layout.device_member]
        base = np.exp(figures.fixed[training]) + np.exp(figures.per_sample[training]) * layout.device_samples
        own, batch = self._own(figures.own), self._batch(figures.batch)
        seconds = base * np.exp(figures.slowness[layout.device_kind] + own + batch)
        return self._slowest(seconds)

    def _slowest(self, seconds: Floats) -> tuple[Floats, Ints]:
        most = np.maximum.reduceat(seconds, self.device_firsts)
        is_most = np.flatnonzero(seconds >= most[self.layout.device_member])
        _, place = np.unique(self.layout.device_member[is_most], return_index=True)
        return most, is_most[place]

    def transfers(self, figures: StepParams, met: Floats) -> TransferTimes:
        """All transfers, each load lengthened by others on its link."""
        layout = self.layout
        learned = np.where(self._declared > 0.0, self._declared, np.exp(figures.bytes[self.training]))
        amount = np.where(self._is_fed, self._fed[layout.stage_member], learned[layout.stage_member])
        alone = layout.load_portion * amount[layout.load_stage] / np.exp(figures.speed[layout.load_kind])
        if not len(alone):
            none, empty = np.zeros(layout.num_members), np.empty(0)
            return TransferTimes(none, none, empty, alone, empty, empty)
        by_links = self._bottleneck(alone * met)
        crowd = np.exp(np.clip(self.spread, *figures.reach) @ figures.crowding)[layout.stage_member]
        once = (by_links + layout.stage_hops @ np.exp(figures.latency)) * crowd
        whole = once * layout.stage_repeats
        gradients, fed = (
            np.bincount(layout.stage_member, whole * (layout.stage_stream == stream), layout.num_members).astype(float)
            for stream in (GRADIENTS, INPUT)
        )
        return TransferTimes(gradients, fed, once, alone, by_links, crowd)

    def _bottleneck(self, seconds: Floats) -> Floats:
        """A soft maximum over link types, of the slowest link of each."""
        by_kind = np.maximum.reduceat(seconds, self._kind_firsts)
        scale = np.maximum.reduceat(seconds, self.layout.load_firsts)
        stage = self.layout.load_stage[self._kind_firsts]
        return np.asarray(scale * np.bincount(stage, (by_kind / scale[stage]) ** _SHARP) ** (1.0 / _SHARP))

    def met(self, figures: StepParams, compute: Floats) -> tuple[Floats, Floats]:
        """Step time of each member, and the slowdown of loads by others (1: none)."""
        layout = self.layout
        met = np.ones(len(layout.load_stage))
        total = self.total(figures, compute, met)
        if not len(layout.met_load):
            return total, met
        own, other = layout.met_load, layout.met_other
        crowd = layout.load_flows[other] / layout.load_flows[own]
        stage = layout.load_stage[other]
        for _ in range(_ROUNDS):
            _, _, once, alone, *_ = self.transfers(figures, met)
            busy = np.minimum(1.0, once[stage] * layout.stage_repeats[stage] / total[layout.stage_member[stage]])
            rate = np.minimum(alone[other] / once[stage], 0.999)  # of the link's speed, while it uses the link
            slower = np.minimum(crowd, rate / (1.0 - rate))
            wanted = 1.0 + np.bincount(own, busy * slower, len(met))
            met = 0.5 * (met + wanted)
            total = self.total(figures, compute, met)
        return total, met

    def total(self, figures: StepParams, compute: Floats, met: Floats) -> Floats:
        carried = self.transfers(figures, met)
        sync = carried.gradients
        over = sync - compute / (1.0 + np.exp(-figures.hidden[self.training]))
        seen = 0.5 * (over + np.sqrt(over**2 + (_SOFT * sync) ** 2))
        return np.asarray(np.maximum(compute + seen, carried.input))

    def changes(self, figures: StepParams, compute: Floats, met: Floats) -> tuple[Floats, StepGradients]:
        """Step times, and the derivatives of their logarithm; `met` is held fixed.

        With q = √((S − o·C)² + (soft·S)²) and v = ½ (1 + (S − o·C)/q), the visible part of transfers grows with
        C by −v·o and with S by v + ½ soft²·S/q. A member that waits for its input changes with the input's
        transfers alone.
        """
        carried = self.transfers(figures, met)
        sync, odds = carried.gradients, 1.0 / (1.0 + np.exp(-figures.hidden[self.training]))
        over = sync - odds * compute
        root = np.sqrt(over**2 + (_SOFT * sync) ** 2)
        total = compute + 0.5 * (over + root)
        is_fed = carried.input > total
        total = np.maximum(total, carried.input)
        part = np.where(is_fed, 0.0, 1.0 / total)
        seen = 0.5 * (1.0 + over / root)
        of_sync = part * (seen + 0.5 * _SOFT**2 * sync / root)
        by_compute, by_hidden = part * compute * (1.0 - seen * odds), -part * compute * seen * odds * (1.0 - odds)
        moved = self._moved(figures, carried, met, of_sync, np.where(is_fed, 1.0 / total, 0.0))
        return total, StepGradients(*moved[:3], by_compute, by_hidden, moved[3])

    def _moved(
        self, figures: StepParams, carried: TransferTimes, met: Floats, of_sync: Floats, of_input: Floats
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """Derivatives through transfers, by speed, latency, crowding and bytes, per second of sync and input.

        A pass is (links + latencies) · crowd; each link type has the part (its slowest / links)^sharp of the
        first.
        """
        layout, num_kinds = self.layout, len(figures.speed)
        size = layout.num_members, num_kinds
        if not len(carried.once):
            return np.zeros(size), np.zeros(size), np.zeros((size[0], 4)), np.zeros(size[0])
        member, is_sync = layout.stage_member, layout.stage_stream == GRADIENTS
        worth = layout.stage_repeats * np.where(is_sync, of_sync[member], of_input[member])
        kind, stage = layout.load_kind[self._kind_firsts], layout.load_stage[self._kind_firsts]
        slowest = np.maximum.reduceat(carried.alone * met, self._kind_firsts)
        linked = worth * carried.by_links * carried.crowd  # [stage]
        through = linked[stage] * (slowest / carried.by_links[stage]) ** _SHARP
        speed = -np.bincount(member[stage] * num_kinds + kind, through, size[0] * num_kinds)
        waits = (worth * carried.crowd)[:, None] * layout.stage_hops * np.exp(figures.latency)
        latency = np.stack([np.bincount(member, waits[:, place], size[0]) for place in range(num_kinds)], axis=1)
        whole = np.bincount(member, worth * carried.once, size[0])
        crowding = whole[:, None] * np.clip(self.spread, *figures.reach)
        learned = np.bincount(member, linked * is_sync, size[0]) * (self._declared <= 0.0)
        return np.asarray(speed.reshape(size)), np.asarray(latency), np.asarray(crowding), np.asarray(learned)

    def parts(self, figures: StepParams) -> tuple[Floats, Floats, Floats]:
        """Seconds of compute, of gradient transfer, and of the whole step."""
        compute, _ = self.compute(figures)
        total, met = self.met(figures, compute)
        return compute, self.transfers(figures, met).gradients, total
