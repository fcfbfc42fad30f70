"""Retention model: the fraction of its speed alone that a job keeps in any mix at any shares, updated by measurements.

Every job has three latent numbers (logarithms): h, its sensitivity to a cap on multiprocessors; v, its vulnerability to
neighbours; g, the pressure it puts on them. On a GPU, with caps s, load L = Σ s, and y the speed alone under a cap,

    y_i = 1 / (1 + h_i·(1/s_i − 1))
    x_i = y_i / (1 + v_i·(1 + k·min(1, max(0, L − 1)))·Σ_{j≠i} g_j·(a·y_j + (1 − a)·s_j + e·s_j^8) / 3)³

On a CPU, where shares are no caps, g is the part of the device's cores that a job keeps busy alone and v the part of
its time that it needs a core:

    x_i = 1 / (1 + v_i·max(0, Σ g − 1))

The prior of the latents is linear in a job's traits; unknown traits widen it. The GPU's coefficients are package data,
fitted to groups measured on an H200 (`benchmarks/sharing_prior.py`). Measured groups update the latents of their
members, and in part of all jobs of the same model, by an extended Kalman filter.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from math import log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from carpool.core.estimates import Estimate

Floats = NDArray[np.float64]

_LATENTS = 3
_MEMORY = 1  # place of this trait
_STEEP = 3.0  # exponent of the slowdown by neighbours
_CROWDS = 8  # exponent of the term for nearly whole caps
_BOUNDS = (-6.0, 2.5)  # of latents
_OF_MODEL = 0.6  # part of the variance that jobs of one model have in common
_LEAST = 1e-3
_KNEE = 0.1  # width of the bend between cores to spare and none
_ROUNDS, _DAMPED = 5, 0.6  # of linearizing around the current belief, and the part of each step that is taken
_MOST_GROUPS = 512  # measured groups kept, the newest
_MOST_ANSWERS = 4096  # predictions kept until the next measurement


class Traits(NamedTuple):
    """What is known about a job alone; None or 0: unknown."""

    step_s: float | None = None
    memory_bytes: int = 0  # peak on a device
    busy: float | None = None  # part of the device's cores that it keeps busy


class Sharer(NamedTuple):
    """A job in a mix."""

    job: Hashable
    model: Hashable  # jobs of one model are believed to be alike
    share: float
    traits: Traits = Traits()


Mix = Sequence[Sharer]


class Observed(NamedTuple):
    """Measured speeds of a mix: each relative to alone with the share `base`; None: not measured."""

    speeds: tuple[float | None, ...]
    bases: tuple[float, ...]


class Believed(NamedTuple):
    """Log-speeds of padded mixes and their derivatives."""

    log_speeds: Floats  # [mix, member]
    slopes: Floats  # [mix, member, member, latent]
    log_alone: Floats  # [mix, member]: under its cap, without neighbours
    alone_slopes: Floats  # [mix, member]: by its own first latent


@dataclass(frozen=True, slots=True)
class LanePrior:
    """Prior and form for GPUs, where shares are caps."""

    center: tuple[float, ...]
    scale: tuple[float, ...]
    coefficients: tuple[tuple[float, ...], ...]  # [latent][1, step time, memory, memory² − 1], standardized logarithms
    spread: tuple[float, ...]  # of latents with all traits known
    form: tuple[float, float, float]  # a, e and k
    noise: float  # spread of a measured log-speed

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> LanePrior:
        rows = tuple(tuple(row) for row in document["coefficients"])
        return cls(
            tuple(document["center"]),
            tuple(document["scale"]),
            rows,
            tuple(document["spread"]),
            tuple(document["form"]),
            document["noise"],
        )

    def latents(self, traits: Traits) -> tuple[Floats, Floats]:
        """Means and standard deviations; an unknown trait counts as average, with its spread."""
        table = np.array(self.coefficients)
        mean, variance = table[:, 0].copy(), np.array(self.spread) ** 2
        for place, value in enumerate((traits.step_s, traits.memory_bytes)):
            if not value:
                variance += table[:, 1 + place] ** 2
                continue
            standard = min(3.0, max(-3.0, (log(value) - self.center[place]) / self.scale[place]))
            mean += table[:, 1 + place] * standard
            if place == _MEMORY:
                mean += table[:, 3] * (standard**2 - 1.0)
        return mean, np.sqrt(variance)

    def speeds(self, latents: Floats, shares: Floats) -> Believed:
        present = shares > 0.0
        caps = np.where(present, shares, 1.0)
        h, v, g = (np.exp(np.clip(latents[..., place], *_BOUNDS)) for place in range(_LATENTS))
        by_work, crowding, over = self.form
        alone = 1.0 / (1.0 + h * (1.0 / caps - 1.0))
        load = (present * caps).sum(axis=1, keepdims=True)
        factor = v * (1.0 + over * np.clip(load - 1.0, 0.0, 1.0))
        presses = present * g * (by_work * alone + (1.0 - by_work) * caps + crowding * caps**_CROWDS)
        hurt = factor * (presses.sum(axis=1, keepdims=True) - presses)
        damped = 1.0 + hurt / _STEEP
        log_alone = np.log(alone)
        by_neighbour = -(factor / damped)[:, :, None]
        apart = (1.0 - np.eye(shares.shape[1]))[None]
        slopes = np.zeros((*shares.shape, shares.shape[1], _LATENTS))
        slopes[..., 2] = by_neighbour * presses[:, None, :] * apart
        eased = present * g * by_work * alone * (1.0 - alone)  # less work under a cap puts less pressure on neighbours
        slopes[..., 0] = -by_neighbour * eased[:, None, :] * apart
        diagonal = np.arange(shares.shape[1])
        slopes[:, diagonal, diagonal, 0] = alone - 1.0
        slopes[:, diagonal, diagonal, 1] = -hurt / damped
        return Believed(log_alone - _STEEP * np.log(damped), slopes, log_alone, alone - 1.0)


@dataclass(frozen=True, slots=True)
class CorePrior:
    """Prior and form for CPU devices, where jobs compete for cores."""

    cores: int
    noise: float = 0.1

    def latents(self, traits: Traits) -> tuple[Floats, Floats]:
        """A job on one core is assumed to need all of it; on several cores, most jobs leave some idle."""
        if traits.busy is not None:
            busy = min(1.0, max(_LEAST, traits.busy))
            needs = min(1.0, busy * self.cores)
            return np.array([0.0, log(needs), log(busy)]), np.array([_LEAST, 0.15, 0.1])
        if self.cores == 1:
            return np.zeros(_LATENTS), np.array([_LEAST, 0.05, 0.05])
        return np.array([0.0, log(0.95), log(0.7)]), np.array([_LEAST, 0.2, 0.4])

    def speeds(self, latents: Floats, shares: Floats) -> Believed:
        present = shares > 0.0
        needs = np.exp(np.clip(latents[..., 1], *_BOUNDS))  # above 1 where neighbours hurt more than by their cores
        busy = np.exp(np.clip(latents[..., 2], _BOUNDS[0], 0.0))
        busy = present * busy
        excess = (busy.sum(axis=1, keepdims=True) - 1.0) / _KNEE
        lacking = _KNEE * np.logaddexp(0.0, excess)
        bend = 1.0 / (1.0 + np.exp(-np.clip(excess, -50.0, 50.0)))
        is_shared = present.sum(axis=1, keepdims=True) > 1
        slowdown = 1.0 + needs * lacking * is_shared
        slopes = np.zeros((*shares.shape, shares.shape[1], _LATENTS))
        slopes[..., 2] = -(needs * is_shared / slowdown)[:, :, None] * (bend * busy)[:, None, :]
        diagonal = np.arange(shares.shape[1])
        slopes[:, diagonal, diagonal, 1] = (1.0 - slowdown) / slowdown
        nothing = np.zeros_like(shares)
        return Believed(-np.log(slowdown), slopes, nothing, nothing)


Prior = LanePrior | CorePrior


@cache
def shipped_prior() -> LanePrior:
    """The prior that comes with the package."""
    text = files("carpool.predictors.sharing").joinpath("h200_prior.json").read_text(encoding="utf-8")
    return LanePrior.of_document(json.loads(text))


@dataclass(slots=True)
class _Node:
    """Belief about the offset of one job, or one model, from the prior's latents."""

    mean: Floats
    covariance: Floats


@dataclass(slots=True)
class RetentionModel:
    """Predicts speeds in mixes on devices of one type, and learns from measured groups.

    A repeated measurement of a group replaces the former one, so that frequent reports do not count as independent.
    """

    prior: Prior
    version: int = 0
    _groups: dict[tuple[tuple[Hashable, float], ...], tuple[tuple[Sharer, ...], Observed]] = field(default_factory=dict)
    _nodes: dict[Hashable, _Node] | None = None
    _answers: dict[tuple[tuple[Sharer, ...], ...], list[list[Estimate]]] = field(default_factory=dict)

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def learn(self, mix: Mix, observed: Observed) -> None:
        """Learn from the measured speeds of a mix, or of one job alone under a cap."""
        key = tuple((sharer.job, sharer.share) for sharer in mix)
        self._groups.pop(key, None)
        self._groups[key] = tuple(mix), observed
        if len(self._groups) > _MOST_GROUPS:
            del self._groups[next(iter(self._groups))]
        self._nodes = None
        self._answers.clear()
        self.version += 1

    def predict(self, mixes: Sequence[Mix]) -> list[list[Estimate]]:
        """Speed of each member relative to alone on the whole device, in (0, 1]."""
        asked = tuple(map(tuple, mixes))  # policies ask the same again and again between two measurements
        found = self._answers.get(asked)
        if found is None:
            if len(self._answers) >= _MOST_ANSWERS:
                self._answers.clear()
            found = self._answers[asked] = self._computed(asked)
        return list(map(list, found))

    def _computed(self, mixes: Sequence[Mix]) -> list[list[Estimate]]:
        if not mixes:
            return []
        shares, latents, covariances = self._stacked(mixes, self._updated())
        believed = self.prior.speeds(latents, shares)
        variance = np.einsum("mija,mjab,mijb->mi", believed.slopes, covariances, believed.slopes)
        spread = np.sqrt(variance + self.prior.noise**2)
        speeds = np.exp(np.minimum(0.0, believed.log_speeds))
        means, spreads = speeds.tolist(), (speeds * spread).tolist()
        return [list(map(Estimate, means[row][: len(mix)], spreads[row])) for row, mix in enumerate(mixes)]

    def _stacked(self, mixes: Sequence[Mix], nodes: Mapping[Hashable, _Node]) -> tuple[Floats, Floats, Floats]:
        """Shares of mixes, padded with absent members, and the latents of these with their covariances."""
        width = max(len(mix) for mix in mixes)
        spots: dict[tuple[Hashable, Hashable, Traits], int] = {}
        members: list[Sharer] = []
        shares, index = np.zeros((len(mixes), width)), np.zeros((len(mixes), width), np.intp)
        for row, mix in enumerate(mixes):
            for place, sharer in enumerate(mix):
                spot = spots.setdefault((sharer.job, sharer.model, sharer.traits), len(spots))
                if spot == len(members):
                    members.append(sharer)
                shares[row, place], index[row, place] = sharer.share, spot
        latents = np.array([self._latents(sharer, nodes) for sharer in members])
        covariances = np.array([self._covariance(sharer, nodes) for sharer in members])
        return shares, latents[index], covariances[index]

    def _latents(self, sharer: Sharer, nodes: Mapping[Hashable, _Node]) -> Floats:
        offsets = [nodes[name].mean for name in _names(sharer) if name in nodes]
        return np.asarray(sum(offsets, self.prior.latents(sharer.traits)[0]))

    def _covariance(self, sharer: Sharer, nodes: Mapping[Hashable, _Node]) -> Floats:
        found = [self._node(sharer, name, nodes).covariance for name in _names(sharer)]
        return np.asarray(sum(found))

    def _node(self, sharer: Sharer, name: Hashable, nodes: Mapping[Hashable, _Node]) -> _Node:
        known = nodes.get(name)
        if known is not None:
            return known
        part = _OF_MODEL if name == _names(sharer)[0] else 1.0 - _OF_MODEL
        spread = self.prior.latents(sharer.traits)[1]
        return _Node(np.zeros(_LATENTS), np.diag(part * spread**2))

    def _updated(self) -> Mapping[Hashable, _Node]:
        """Offsets after all measured groups, each taken in once in the order in which they were measured."""
        if self._nodes is None:
            self._nodes = {}
            for mix, observed in self._groups.values():
                self._take(mix, observed, self._nodes)
        return self._nodes

    def _take(self, mix: Mix, observed: Observed, nodes: dict[Hashable, _Node]) -> None:
        """Update the offsets of the members and their models: an iterated extended Kalman filter."""
        seen = [place for place, speed in enumerate(observed.speeds) if speed is not None]
        if not seen:
            return
        spots: dict[Hashable, slice] = {}
        for name in dict.fromkeys(name for sharer in mix for name in _names(sharer)):
            spots[name] = slice(_LATENTS * len(spots), _LATENTS * (len(spots) + 1))
        first, covariance = np.zeros(_LATENTS * len(spots)), np.zeros((_LATENTS * len(spots),) * 2)
        for sharer in mix:
            for name in _names(sharer):
                node = self._node(sharer, name, nodes)
                first[spots[name]], covariance[spots[name], spots[name]] = node.mean, node.covariance
        measured = np.log(np.clip([observed.speeds[place] or 0.0 for place in seen], _LEAST, 1.5))
        noise = np.eye(len(seen)) * self.prior.noise**2
        mean = first
        for _ in range(_ROUNDS):
            expected, slopes = self._linear(mix, observed, seen, mean, spots)
            kalman = np.linalg.solve(slopes @ covariance @ slopes.T + noise, slopes @ covariance).T
            target = first + kalman @ (measured - expected - slopes @ (first - mean))
            mean = mean + _DAMPED * (target - mean)
        _, slopes = self._linear(mix, observed, seen, mean, spots)
        kalman = np.linalg.solve(slopes @ covariance @ slopes.T + noise, slopes @ covariance).T
        covariance = covariance - kalman @ slopes @ covariance
        for name, spot in spots.items():
            nodes[name] = _Node(mean[spot], covariance[spot, spot])

    def _linear(
        self, mix: Mix, observed: Observed, seen: Sequence[int], offsets: Floats, spots: Mapping[Hashable, slice]
    ) -> tuple[Floats, Floats]:
        """Expected log-speeds of the measured members, relative to alone with their bases, and their slopes."""
        shares = np.array([[sharer.share for sharer in mix]])
        latents = np.array([[self.prior.latents(sharer.traits)[0] for sharer in mix]])
        for place, sharer in enumerate(mix):
            for name in _names(sharer):
                latents[0, place] += offsets[spots[name]]
        believed = self.prior.speeds(latents, shares)
        reference = self.prior.speeds(latents, np.array([observed.bases]))
        slopes = np.zeros((len(seen), len(offsets)))
        for line, place in enumerate(seen):
            for other, sharer in enumerate(mix):
                for name in _names(sharer):
                    slopes[line, spots[name]] += believed.slopes[0, place, other]
            for name in _names(mix[place]):
                slopes[line, spots[name].start] -= reference.alone_slopes[0, place]
        return (believed.log_speeds - reference.log_alone)[0, seen], slopes


def _names(sharer: Sharer) -> tuple[Hashable, Hashable]:
    """The model and the job, as names of offsets."""
    return ("model", sharer.model), ("job", sharer.job)
