"""Measured co-location table: solo profiles of trainings, and rates of groups on one device."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import exp, log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from carpool.core.errors import InputError, UnknownName
from carpool.predictors.sharing.interference import Interference, Member

_BYTES_PER_S, _FLOPS = 4.8e12, 4.9e14  # of an H200: its memory, and TF32 products without sparsity; only scales
_WATTS, _HOST_BYTES_PER_S = 700.0, 55e9
_IN_LOG = ("step_s", "kernel_s")  # traits that spread over orders of magnitude


@dataclass(frozen=True, slots=True)
class Solo:
    """Traits of a training alone on the whole device, at one batch size."""

    batch_size: int
    step_s: float
    kernel_s: float  # step over number of kernels: how densely it launches
    fill: float = 1.0  # share of the streaming multiprocessors that its kernels have blocks for
    occupancy: float = 0.0
    brief: float = 0.0  # share of its time in kernels under 10 µs
    memory_bw: float = 0.0  # bytes of all tensors read and written, over the bytes that the memory could move
    arithmetic: float = 0.0
    power: float = 0.0
    host_bw: float = 0.0  # share of the host link
    memory_bytes: int = 0
    scaling: tuple[tuple[float, float], ...] = ((1.0, 1.0),)  # (share, relative speed alone), ascending

    def alone(self, share: float) -> float:
        """Speed alone under a cap, relative to the whole device; proportional below the smallest measured cap."""
        least, speed = self.scaling[0]
        if share < least:
            return speed * share / least
        shares, speeds = zip(*self.scaling, strict=True)
        return float(np.interp(share, shares, speeds))

    @property
    def traits(self) -> tuple[float, ...]:
        return (
            log(self.step_s),
            log(self.kernel_s),
            self.fill,
            self.occupancy,
            self.brief,
            self.memory_bw,
            self.arithmetic,
            self.power,
            self.host_bw,
            self.alone(0.25),
            self.alone(0.5),
        )

    def member(self, share: float) -> Member:
        return Member(self.traits, share, self.alone(share))


class GroupMember(NamedTuple):
    """A training in a measured group."""

    model: str
    batch_size: int
    share: float
    steps_per_s: float = 0.0


@dataclass(frozen=True)
class ColocationTable:
    """Profiles by model, in ascending order of batch size, and measured groups."""

    device: str
    memory_bytes: int
    profiles: Mapping[str, tuple[Solo, ...]]
    groups: tuple[tuple[GroupMember, ...], ...]

    @classmethod
    def load(cls, path: str | Path) -> ColocationTable:
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls.of_document(document)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise InputError(
                f"is not a co-location table: {type(error).__name__}: {error}",
                where=str(path),
                way_out="Give what benchmarks/gpu_colocation.py wrote.",
            ) from None

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> ColocationTable:
        tasks = {name: facts for name, facts in document["tasks"].items() if facts["batch"]}
        alone: dict[str, dict[float, list[float]]] = {}
        power: dict[str, list[float]] = {}
        for _, name, share, _, rate, *gauge in document["alone"]:
            alone.setdefault(name, {}).setdefault(share / 100.0, []).append(rate)
            if gauge:
                power.setdefault(name, []).append(gauge[2])
        profiles: dict[str, list[Solo]] = {}
        for name, facts in tasks.items():
            rates = {share: float(np.mean(found)) for share, found in alone[name].items()}
            watts = float(np.mean(power.get(name, [0.0])))
            profiles.setdefault(facts["model"], []).append(_profile(facts, rates, watts))
        groups = tuple(
            tuple(GroupMember(tasks[n]["model"], tasks[n]["batch"], share / 100.0, rate) for n, share, rate in group)
            for _, *group in document["together"]
        )
        name, _, memory = document["device"].split(", ")
        ordered = {model: tuple(sorted(found, key=lambda solo: solo.batch_size)) for model, found in profiles.items()}
        return cls(name.removeprefix("NVIDIA "), int(memory.split()[0]) << 20, ordered, groups)

    def profile(self, model: str, batch_size: int = 0) -> Solo:
        """A model's profile at a batch size, interpolated; by default the smallest measured one."""
        known = self.profiles.get(model)
        if known is None:
            raise UnknownName("model", model, self.profiles, where=f"co-locations on {self.device}")
        return interpolated(known, batch_size or known[0].batch_size)

    def samples(
        self, groups: Iterable[tuple[GroupMember, ...]] | None = None
    ) -> tuple[list[list[Member]], list[list[float]]]:
        """Groups, by default all, as samples for `Interference`."""
        members: list[list[Member]] = []
        kept: list[list[float]] = []
        for group in self.groups if groups is None else groups:
            profiles = [self.profile(each.model, each.batch_size) for each in group]
            pairs = list(zip(profiles, group, strict=True))
            members.append([profile.member(each.share) for profile, each in pairs])
            kept.append([t.steps_per_s * profile.step_s / profile.alone(t.share) for profile, t in pairs])
        return members, kept

    @cached_property
    def interference(self) -> Interference:
        return Interference("gp").fit(*self.samples())


def interpolated(known: tuple[Solo, ...], batch_size: int) -> Solo:
    """A profile at a batch size: step time and memory linear in it, traits linear in its logarithm, clamped."""
    sizes = [profile.batch_size for profile in known]
    if batch_size in sizes:
        return known[sizes.index(batch_size)]
    if len(known) == 1:
        return replace(known[0], batch_size=batch_size)
    above = min(max(1, sum(size < batch_size for size in sizes)), len(known) - 1)
    low, high = known[above - 1], known[above]
    part = min(1.0, max(0.0, log(batch_size / low.batch_size) / log(high.batch_size / low.batch_size)))
    straight = (batch_size - low.batch_size) / (high.batch_size - low.batch_size)
    mixed: dict[str, Any] = {"batch_size": batch_size}
    for spot in fields(Solo):
        a, b = getattr(low, spot.name), getattr(high, spot.name)
        if spot.name == "scaling":
            mixed["scaling"] = tuple(
                (share, low.alone(share) * (1 - part) + high.alone(share) * part) for share, _ in a
            )
        elif spot.name in ("step_s", "memory_bytes"):
            least = a * batch_size / low.batch_size / 2.0 if batch_size < low.batch_size else a
            mixed[spot.name] = type(a)(max(least, a + (b - a) * straight))
        elif spot.name in _IN_LOG:
            mixed[spot.name] = exp(log(a) * (1 - part) + log(b) * part)
        elif spot.name != "batch_size":
            mixed[spot.name] = a * (1 - part) + b * part
    return Solo(**mixed)


def _profile(facts: Mapping[str, Any], rates: Mapping[float, float], watts: float) -> Solo:
    whole = rates[1.0]
    return Solo(
        batch_size=facts["batch"],
        step_s=1.0 / whole,
        kernel_s=1.0 / (whole * facts["kernels"]),
        fill=facts["fill"],
        occupancy=facts["occupancy"],
        brief=facts["short"],
        memory_bw=facts["bytes"] * whole / _BYTES_PER_S,
        arithmetic=facts["flops"] * whole / _FLOPS,
        power=watts / _WATTS,
        host_bw=facts.get("host_bytes", 0) * whole / _HOST_BYTES_PER_S,
        memory_bytes=facts["peak_bytes"],
        scaling=tuple(sorted((share, rate / whole) for share, rate in rates.items())),
    )
