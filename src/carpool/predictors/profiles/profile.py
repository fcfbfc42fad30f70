"""Job profile: measurements of one training, the models fitted to them, and its JSON file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from carpool.core.errors import InputError
from carpool.predictors.profiles.batch_models import MemoryModel, StepTime


@dataclass(frozen=True, slots=True)
class Measurement:
    """Some steps in one setting; what could not be measured is None."""

    kind: str  # of the devices
    devices: int
    batch_size: int  # of the whole step
    share: float = 1.0
    exact: bool = False
    beside: str = ""  # entry of the training on the same device; empty: alone
    steps: int = 0
    step_s: float | None = None
    step_spread_s: float | None = None  # standard deviation from step to step
    peak_bytes: int | None = None  # peak memory in use on one device
    held_bytes: int | None = None  # including what the allocator reserves
    device_use: float | None = None  # portion of the device's time
    bandwidth_use: float | None = None  # portion of the time in which its memory was busy
    batch_bytes: int | None = None  # of one batch, as the loss sees it
    host_to_device_bytes: float | None = None  # in one step
    out_of_memory: bool = False  # a limit, not a failure
    error: str = ""  # why there is no measurement

    @property
    def samples_per_s(self) -> float | None:
        return None if self.step_s is None else self.batch_size / self.step_s


@dataclass(frozen=True, slots=True)
class NoiseSeen:
    """The gradient noise scale φ at the start of a training, in samples."""

    scale: float | None  # None: noise dominated the gradient
    spread: float | None
    parts: int  # of each batch, that were compared
    steps: int


class Costs(NamedTuple):
    """Seconds in which a job makes no steps; None: unknown."""

    start_s: float | None = None  # from the order to the first step at full rate
    resize_s: float | None = None  # from the order to move
    end_s: float | None = None  # from its last step to its end: evaluation, checkpoint

    def over(self, others: Costs) -> Costs:
        """These costs, with unknown ones replaced by those of `others`."""
        return Costs(*[other if mine is None else mine for mine, other in zip(self, others, strict=True)])


@dataclass(frozen=True, slots=True)
class Profile:
    """All measurements of one entry with its arguments."""

    entry: str
    args: Mapping[str, Any]
    source: str  # digest of the entry's file when it was measured; empty: unknown
    batch_size: int  # the training's own
    num_samples: int
    stop_steps: int | None = None  # greatest number of steps, at any batch size
    stop_epochs: int | None = None
    measurements: tuple[Measurement, ...] = ()
    noise: NoiseSeen | None = None
    start_s: float | None = None  # this and the next two: see `Costs`
    resize_s: float | None = None
    end_s: float | None = None
    version: str = ""  # of carpool
    machine: str = ""

    @property
    def key(self) -> str:
        """Equal for equal entries and arguments."""
        return profile_key(self.entry, self.args)

    @property
    def costs(self) -> Costs:
        return Costs(self.start_s, self.resize_s, self.end_s)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Measured device types, in order of first appearance."""
        return tuple(dict.fromkeys(each.kind for each in self.measurements))

    def total_steps(self, batch_size: int = 0) -> int | None:
        """Steps after which it ends at the latest; None: only a target ends it."""
        per_epoch = -(-self.num_samples // (batch_size or self.batch_size))
        limits = [] if self.stop_steps is None else [self.stop_steps]
        if self.stop_epochs is not None:
            limits.append(self.stop_epochs * per_epoch)
        return min(limits, default=None)

    def points(self, kind: str, *, exact: bool = False) -> Iterator[Measurement]:
        """Measurements alone on one whole device of a type, by batch size."""
        for each in self.measurements:
            is_plain = each.devices == 1 and each.share == 1.0 and not each.beside and each.exact == exact
            if is_plain and each.kind == kind:
                yield each

    def step_time(self, kind: str, *, exact: bool = False) -> StepTime | None:
        found = self.points(kind, exact=exact)
        points = [(each.batch_size, each.step_s) for each in found if each.step_s is not None]
        return StepTime().fit(*zip(*points, strict=True)) if points else None

    def memory(self, kind: str) -> MemoryModel | None:
        points = {each.batch_size: each.peak_bytes for each in self.points(kind) if each.peak_bytes}
        return MemoryModel().fit(list(points), list(points.values())) if points else None

    def held(self, kind: str) -> MemoryModel | None:
        """Memory model including what the allocator reserves: what a process needs, by its `bound`."""
        points = {each.batch_size: each.held_bytes for each in self.points(kind) if each.held_bytes}
        return MemoryModel().fit(list(points), list(points.values())) if points else None

    def memory_limit(self, kind: str) -> int | None:
        """The smallest batch size that did not fit on one device of a type."""
        return min((each.batch_size for each in self.points(kind) if each.out_of_memory), default=None)

    def exact_price(self, kind: str) -> float | None:
        """Step time with exact = true over that without, at the same batch size on one device."""
        exact = {each.batch_size: each.step_s for each in self.points(kind, exact=True)}
        for each in self.points(kind):
            with_exact = exact.get(each.batch_size)
            if each.step_s is not None and with_exact is not None:
                return with_exact / each.step_s
        return None


def short_entry(entry: str) -> str:
    """An entry without the folders before its file, so that it does not depend on the caller's folder."""
    source, colon, function = entry.rpartition(":")
    return f"{source.rpartition('/')[2]}{colon}{function}"


def profile_key(entry: str, args: Mapping[str, Any]) -> str:
    """A short digest of an entry with its arguments."""
    entry = short_entry(entry)
    return hashlib.sha256(json.dumps([entry, args], sort_keys=True).encode()).hexdigest()[:12]


def merge_measurements(old: Sequence[Measurement], new: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """All measurements, the new one where both have a setting."""
    known = {measurement_key(each): each for each in (*old, *new)}
    return tuple(known.values())


def measurement_key(each: Measurement) -> tuple[object, ...]:
    """The setting of a measurement, without its results."""
    return each.kind, each.devices, each.batch_size, each.share, each.exact, each.beside


SCHEMA = 1


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile atomically."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.part")
        draft.write_text(json.dumps(profile_to_json(profile), indent=1) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise InputError(
            f"the profile cannot be written: {error.strerror}", where=str(path), way_out="Name another place."
        ) from None


def read_profile(path: Path) -> Profile:
    """Read and check a profile; models are fitted again."""
    try:
        return profile_from_json(json.loads(path.read_text(encoding="utf-8")), str(path))
    except OSError as error:
        raise InputError(
            f"cannot be read: {error.strerror}", where=str(path), way_out="Make one with carpool profile."
        ) from None
    except UnicodeDecodeError:
        raise InputError("is not text", where=str(path), way_out="Make a profile with carpool profile.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"is not a profile: {type(error).__name__}: {error}",
            where=str(path),
            way_out="Make one with carpool profile.",
        ) from None


def profile_to_json(profile: Profile) -> dict[str, Any]:
    """A profile as plain JSON values."""
    own = {spot.name: getattr(profile, spot.name) for spot in fields(profile) if spot.name not in _NESTED}
    return {
        "schema": SCHEMA,
        **own,
        "noise": None if profile.noise is None else asdict(profile.noise),
        "models": {kind: _models(profile, kind) for kind in profile.kinds},
        "measurements": [{**asdict(each), "samples_per_s": each.samples_per_s} for each in profile.measurements],
    }


_NESTED = ("noise", "measurements")


def _models(profile: Profile, kind: str) -> dict[str, Any]:
    step = profile.step_time(kind)
    return {
        "step_time": None
        if step is None
        else {"fixed_s": step.fixed_s_, "per_sample_s": step.per_sample_s_, "error": step.error_},
        "memory": _memory(profile.memory(kind)),
        "held": _memory(profile.held(kind)),
        "memory_limit_batch": profile.memory_limit(kind),
        "exact_price": profile.exact_price(kind),
    }


def _memory(model: MemoryModel | None) -> dict[str, Any] | None:
    if model is None:
        return None
    return {"coefficients": model.coefficients_.tolist(), "error": model.error_, "margin": model.margin_}


def profile_from_json(data: Mapping[str, Any], where: str) -> Profile:
    """The inverse of `profile_to_json`."""
    if data["schema"] > SCHEMA:
        raise InputError(
            f"schema {data['schema']} is newer than this carpool reads ({SCHEMA})", where=where, way_out="Update it."
        )
    spots = {spot.name for spot in fields(Profile)} - set(_NESTED)
    seen = {spot.name for spot in fields(Measurement)}
    return Profile(
        **{name: value for name, value in data.items() if name in spots},
        noise=None if data["noise"] is None else NoiseSeen(**data["noise"]),
        measurements=tuple(
            Measurement(**{name: value for name, value in each.items() if name in seen})
            for each in data["measurements"]
        ),
    )
