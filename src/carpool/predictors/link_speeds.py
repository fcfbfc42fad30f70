"""Step time from computing and transfers, with link speeds and each training's own figures fitted to all history.

    C = slowness · (a + b·m) · c(m)        the slowest device; a, b, c by training, slowness by kind of device
    S = Σ stages repeats · (max over links of portion · bytes / speed · met + Σ latencies of the longest route)
    T = C + pos(S − o·C)                   what computing does not hide of the transfers; at least the input's time

`met` is what others' transfers on the same link cost: while the other is at it, a link is shared in proportion to the
flows, or leaves what the other does not take if that is more. How often it is at it follows from its own T and S, so
that all members of a group are solved together. c(m) is what a batch that was measured differs from a + b·m.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from carpool.predictors.fabric import Fabric
from carpool.predictors.layout import GRADIENTS, INPUT, Floats, GroupLayout, Ints
from carpool.predictors.own_figures import Lookup, OwnFigures

_SOFT = 0.2  # of S: how much is seen of transfers that are just hidden
_SHARP = 6.0  # of the maximum over kinds of link
_ROUNDS = 12  # of what members do to each other
_BUS, _NETWORK, _LATENCY, _BYTES = (
    np.log(1e10),
    np.log(1e9),
    np.log(2e-5),
    np.log(1e8),
)  # expected of what nobody has measured
_HIDDEN = 0.0  # log odds of the part of computing behind which transfers can hide


@dataclass(slots=True)
class Figures:
    """Everything fitted, in logarithms unless said otherwise."""

    speed: Floats  # [link kind] bytes per second
    latency: Floats  # [link kind] seconds
    slowness: Floats  # [device kind]
    fixed: Floats  # [training] a, seconds
    per_sample: Floats  # [training] b, seconds
    hidden: Floats  # [training] log odds of o
    crowding: Floats  # [4] powers of devices, places, most and fewest at a place: what the walk leaves out, for all
    bytes: Floats  # [training] gradients, where they are not declared
    reach: Floats = field(default_factory=lambda: np.array([[0.0] * 4, [np.inf] * 4]))  # least and most spread seen
    own: OwnFigures[tuple[int, int]] = field(default_factory=OwnFigures.none)  # [training, device kind] slowness
    batch: OwnFigures[tuple[int, float]] = field(default_factory=OwnFigures.none)  # [training, samples] time

    @classmethod
    def expected(cls, fabric: Fabric, num_kinds: int, num_trainings: int) -> Figures:
        """Before anything is known: links that reach devices are expected to be faster than those between nodes."""
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

    def with_average(self) -> Figures:
        """With one more training, which is like the average of all."""
        fixed, per_sample, hidden, bytes_ = (
            np.append(known, known.mean()) for known in (self.fixed, self.per_sample, self.hidden, self.bytes)
        )
        return replace(self, fixed=fixed, per_sample=per_sample, hidden=hidden, bytes=bytes_)


class Carried(NamedTuple):
    """Seconds that transfers take."""

    gradients: Floats  # [member]
    input: Floats  # [member]
    once: Floats  # [stage] one pass
    alone: Floats  # [load] by itself on its link
    by_links: Floats  # [stage] of one pass, what the links' speeds make it take, before latencies and crowding
    crowd: Floats  # [stage] what crowding makes of a pass


class Changes(NamedTuple):
    """By how much the logarithm of each member's step grows with each figure."""

    speed: Floats  # [member, link kind]
    latency: Floats  # [member, link kind]
    crowding: Floats  # [member, 4]
    compute: Floats  # [member] with the logarithm of its seconds of computing
    hidden: Floats  # [member]
    bytes: Floats  # [member]


class Steps:
    """Step times of a layout for given figures."""

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
        """Samples of each member's busiest device."""
        return np.asarray(np.maximum.reduceat(self.layout.device_samples, self.device_firsts))

    def link_uses(self) -> list[int]:
        """How many stages use each kind of link."""
        pairs = set(zip(self.layout.load_stage.tolist(), self.layout.load_kind.tolist(), strict=True))
        counts = [0] * self.layout.stage_hops.shape[1]
        for _, kind in pairs:
            counts[kind] += 1
        return counts

    # ------------------------------------------------------------------------------------------------------ pieces
    def compute(self, figures: Figures) -> tuple[Floats, Ints]:
        """Seconds of computing of each member, and its slowest device."""
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

    def transfers(self, figures: Figures, met: Floats) -> Carried:
        """Every transfer, each load so much longer as others on its link make it."""
        layout = self.layout
        learned = np.where(self._declared > 0.0, self._declared, np.exp(figures.bytes[self.training]))
        amount = np.where(self._is_fed, self._fed[layout.stage_member], learned[layout.stage_member])
        alone = layout.load_portion * amount[layout.load_stage] / np.exp(figures.speed[layout.load_kind])
        if not len(alone):
            none, empty = np.zeros(layout.num_members), np.empty(0)
            return Carried(none, none, empty, alone, empty, empty)
        by_links = self._bottleneck(alone * met)
        crowd = np.exp(np.clip(self.spread, *figures.reach) @ figures.crowding)[layout.stage_member]
        once = (by_links + layout.stage_hops @ np.exp(figures.latency)) * crowd
        whole = once * layout.stage_repeats
        gradients, fed = (
            np.bincount(layout.stage_member, whole * (layout.stage_stream == stream), layout.num_members).astype(float)
            for stream in (GRADIENTS, INPUT)
        )
        return Carried(gradients, fed, once, alone, by_links, crowd)

    def _bottleneck(self, seconds: Floats) -> Floats:
        """The slowest link of each kind counts, and of these the slowest most: they hold each other up a little."""
        by_kind = np.maximum.reduceat(seconds, self._kind_firsts)
        scale = np.maximum.reduceat(seconds, self.layout.load_firsts)
        stage = self.layout.load_stage[self._kind_firsts]
        return np.asarray(scale * np.bincount(stage, (by_kind / scale[stage]) ** _SHARP) ** (1.0 / _SHARP))

    def met(self, figures: Figures, compute: Floats) -> tuple[Floats, Floats]:
        """Seconds of each member's step, and by how much loads take longer because of others (1: not at all)."""
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
            rate = np.minimum(alone[other] / once[stage], 0.999)  # of the link's speed, while it is at it
            slower = np.minimum(crowd, rate / (1.0 - rate))
            wanted = 1.0 + np.bincount(own, busy * slower, len(met))
            met = 0.5 * (met + wanted)
            total = self.total(figures, compute, met)
        return total, met

    def total(self, figures: Figures, compute: Floats, met: Floats) -> Floats:
        """Seconds of a step."""
        carried = self.transfers(figures, met)
        sync = carried.gradients
        over = sync - compute / (1.0 + np.exp(-figures.hidden[self.training]))
        seen = 0.5 * (over + np.sqrt(over**2 + (_SOFT * sync) ** 2))
        return np.asarray(np.maximum(compute + seen, carried.input))

    def changes(self, figures: Figures, compute: Floats, met: Floats) -> tuple[Floats, Changes]:
        """Seconds of a step, and the derivatives of their logarithm; `met` is held fixed.

        With q = √((S − o·C)² + (soft·S)²) and v = ½ (1 + (S − o·C)/q), what is seen of the transfers grows with C by
        −v·o and with S by v + ½ soft²·S/q. A member that waits for its input changes with the input's transfers alone.
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
        return total, Changes(*moved[:3], by_compute, by_hidden, moved[3])

    def _moved(
        self, figures: Figures, carried: Carried, met: Floats, of_sync: Floats, of_input: Floats
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """Through transfers, by speed, latency, crowding and bytes: `of_sync` and `of_input` for each second of them.

        A pass is (links + latencies) · crowd; each kind of link has the part (its slowest / links)^sharp of the first.
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

    def parts(self, figures: Figures) -> tuple[Floats, Floats, Floats]:
        """Seconds of computing, of gradients in transfer, and of the whole step."""
        compute, _ = self.compute(figures)
        total, met = self.met(figures, compute)
        return compute, self.transfers(figures, met).gradients, total
