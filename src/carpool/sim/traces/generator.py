"""Trace generator: draws arrivals, sizes, run times, models, weights and users from a seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, repeat
from random import Random
from typing import TypeVar

from carpool.core.errors import InputError, UnknownName
from carpool.sim.traces.distributions import (
    ARRIVALS,
    LENGTHS,
    ArrivalProcess,
    AtOnce,
    LengthDistribution,
    PhillyLike,
    Poisson,
)
from carpool.sim.traces.trace import Arrival, Trace, gc_paused, make_specs

DEFAULT_LOAD = 0.8
# GPUs -> share of the 82,247 jobs of the Philly trace (CC BY 4.0), powers of two up to 64.
PHILLY_SIZES = ((1, 0.9318), (2, 0.0221), (4, 0.0227), (8, 0.0200), (16, 0.0025), (32, 0.0008), (64, 0.0001))

Thing = TypeVar("Thing")
Made = TypeVar("Made")
Mix = Sequence[tuple[Thing, float]]  # things with their relative frequency


@dataclass(frozen=True, slots=True)
class TraceGenerator:
    """A recipe for a trace; the same recipe gives the same trace.

    The arrival rate is given in one of three ways: `rate_per_s`; `span_s` from the first to the last submission; or
    `load`, the offered load Σ gpus · work / (devices · span), so that `devices` devices can just serve a load of 1.0.
    Each aspect has a random stream of its own: another model mix leaves arrivals, sizes and lengths as they are.
    """

    jobs: int = 1000
    seed: int = 0
    arrivals: ArrivalProcess = field(default_factory=Poisson)
    rate_per_s: float | None = None
    span_s: float | None = None
    load: float | None = None  # DEFAULT_LOAD when nothing else is said
    devices: int = 64  # of the reference kind, for `load`
    sizes: Mix[int] = PHILLY_SIZES
    lengths: LengthDistribution = field(default_factory=PhillyLike)
    models: Mix[str] = ()
    weights: Mix[float] = ()  # all 1 when empty
    users: int = 0  # number of users; the k-th submits in proportion to 1/k

    def __post_init__(self) -> None:
        _at_least("jobs", self.jobs, 1)
        _at_least("devices", self.devices, 1)
        _at_least("users", self.users, 0)
        said = {"rate_per_s": self.rate_per_s, "span_s": self.span_s, "load": self.load}
        given = {name: value for name, value in said.items() if value is not None}
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} both set the arrival rate", way_out="Give one of them.")
        for name, value in given.items():
            _above_zero(name, value)
        for gpus, _ in self.sizes:
            _at_least("a size", gpus, 1)
        for weight, _ in self.weights:
            _above_zero("a weight", weight)
        for mix in (self.sizes, self.models, self.weights):
            _check_mix(mix)
        if not self.sizes:
            raise InputError("no sizes are given", way_out="Give some, for example 1:0.7,2:0.2,4:0.1.")

    def generate(self, name: str = "generated") -> Trace:
        with gc_paused():
            return Trace(name, "generated", tuple(self._arrivals()))

    def _arrivals(self) -> Iterator[Arrival]:
        gpus = self._draw(self.sizes, "sizes", 1)
        works = [round(work, 3) for work in self.lengths.draw(self.jobs, self._stream("lengths"))]
        submits = self._submits(sum(map(float.__mul__, works, map(float, gpus))))
        weights = self._draw(self.weights, "weights", 1.0)
        users: Mix[str] = [(f"user-{k}", 1 / k) for k in range(1, self.users + 1)]
        models = self._draw(self.models, "models", "")
        ids = list(map(str, range(self.jobs)))
        specs = make_specs(ids, gpus, works, models, repeat(0), weights, self._draw(users, "users", ""))
        return map(Arrival, submits, specs)

    def _stream(self, aspect: str) -> Random:
        return Random(f"{self.seed}/{aspect}")

    def _draw(self, mix: Mix[Thing], aspect: str, default: Thing) -> list[Thing]:
        if not mix:
            return [default] * self.jobs
        things = [thing for thing, _ in mix]
        shares = list(accumulate([share for _, share in mix]))
        return self._stream(aspect).choices(things, cum_weights=shares, k=self.jobs)

    def _submits(self, gpu_seconds: float) -> list[float]:
        if isinstance(self.arrivals, AtOnce):
            return [0.0] * self.jobs
        if self.rate_per_s is not None:
            times = self.arrivals.draw(self.jobs, self.rate_per_s, self._stream("arrivals"))
            return [round(at, 3) for at in times]
        load = DEFAULT_LOAD if self.load is None else self.load
        span_s = gpu_seconds / (load * self.devices) if self.span_s is None else self.span_s
        if not span_s > 0:  # jobs without length offer no load, however fast they come
            return [0.0] * self.jobs
        times = self.arrivals.draw(self.jobs, self.jobs / span_s, self._stream("arrivals"))
        stretch = span_s / times[-1] if self.arrivals.is_scalable and times[-1] > 0 else 1.0
        return [round(at * stretch, 3) for at in times]


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"{name} is {value}", way_out=f"Give {least} or more.")


def _above_zero(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise InputError(f"{name} is {value}", way_out="Give a finite number above 0.")


def _check_mix(mix: Mix[Thing]) -> None:
    for thing, share in mix:
        if not (share >= 0 and math.isfinite(share)):
            raise InputError(f"the share of {thing} is {share}", way_out="Give 0 or more.")
    if mix and not sum([share for _, share in mix]) > 0:
        raise InputError("all shares of a mix are 0", way_out="Give one of them a share above 0.")


def parse_mix(text: str) -> list[tuple[str, float]]:
    """Read '1:0.7,2:0.3' (shares) or 'a,b' (equal shares); only the last colon counts, so names may contain others."""
    mix: list[tuple[str, float]] = []
    for part in text.split(","):
        thing, colon, share = part.strip().rpartition(":")
        try:
            mix.append((thing, float(share)) if colon else (share, 1.0))
        except ValueError:
            raise InputError(f"{share!r} in {part!r} is not a share", way_out="Write NAME:SHARE,NAME:SHARE.") from None
    _check_mix(mix)
    return mix


def parse_sizes(text: str) -> list[tuple[int, float]]:
    """Read sizes with shares: '1:0.7,2:0.2,4:0.1', or 'philly'."""
    if text == "philly":
        return list(PHILLY_SIZES)
    try:
        return [(int(gpus), share) for gpus, share in parse_mix(text)]
    except ValueError:
        raise InputError(f"{text!r} has a size that is not a whole number", way_out="Write 1:0.7,2:0.3.") from None


def parse_weights(text: str) -> list[tuple[float, float]]:
    """Read weights with shares, or a range of integers: '1:0.9,5:0.1', '1-5'."""
    try:
        low, dash, high = text.partition("-")
        if dash:
            return [(float(weight), 1.0) for weight in range(int(low), int(high) + 1)]
        return [(float(weight), share) for weight, share in parse_mix(text)]
    except ValueError:
        raise InputError(f"{text!r} is not a list of weights", way_out="Write 1-5, or 1:0.9,5:0.1.") from None


def parse_arrivals(text: str) -> ArrivalProcess:
    """Read NAME[:key=value]… as a process of arrivals: 'poisson', 'diurnal:swing=0.5'."""
    name, *settings = text.split(":")
    return _make("arrivals", name, settings, ARRIVALS)


def parse_lengths(text: str) -> LengthDistribution:
    """Read NAME[:key=value]… as a distribution of lengths: 'philly', 'lognormal:median_s=600:sigma=2'."""
    name, *settings = text.split(":")
    return _make("lengths", name, settings, LENGTHS)


def _make(what: str, name: str, settings: Iterable[str], table: Mapping[str, type[Made]]) -> Made:
    if name not in table:
        raise UnknownName(what, name, table)
    known = {entry.name for entry in fields(table[name])}  # type: ignore[arg-type]
    values: dict[str, float] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in known:
            raise UnknownName(f"setting of {name}", key, known)
        try:
            values[key] = float(value)
        except ValueError:
            raise InputError(f"{setting!r} of {name} is not a number", way_out="Write key=number.") from None
        _above_zero(f"{key} of {name}", values[key])
    return table[name](**values)
