"""Makes a profile: first a look, then every setting of the sweep, then the noise of the gradient."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from carpool.core.errors import InputError
from carpool.predictors.profile import Measurement, NoiseSeen, Profile, short_entry
from carpool.runtime.devices import LocalDevice
from carpool.runtime.entryfile import source_digest
from carpool.runtime.profiler import Patience, Profiler
from carpool.runtime.program import Program
from carpool.runtime.sweep import SweepPoint, check_batches, default_batches, settings

Tell = Callable[[int, int, str], None]  # settings done, settings in all, the next one in words


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a profile is to cover."""

    batches: tuple[int, ...] = ()  # empty: around the training's own
    shares: tuple[float, ...] = (1.0,)
    beside: Program | None = None
    exact: bool = True
    noise: bool = True


async def make_profile(
    program: Program,
    devices: Sequence[LocalDevice],
    wanted: Wanted,
    patience: Patience,
    version: str,
    tell: Tell = lambda done, total, words: None,
) -> Profile:
    """Measure a training on these devices; InputError where not even its own batch can be run."""
    async with Profiler.start(program, devices, patience, wanted.beside) as profiler:
        tell(0, 1, "a first look")
        first = await profiler.first_look(devices[0])
        if not profiler.declared:
            raise InputError(first.error, where=program.entry, way_out="Mend it, or see whether it runs alone.")
        declared = profiler.declared
        own = program.batch_size or declared["batch_size"]
        batches = (
            check_batches(wanted.batches, declared["num_samples"])
            if wanted.batches
            else default_batches(own, declared["num_samples"])
        )
        paired = wanted.beside is not None
        todo = settings(devices, own, batches, wanted.shares, exact=wanted.exact, paired=paired)
        measurements = await _measure_all(profiler, todo, tell, len(todo) + wanted.noise)
        noise = None
        if wanted.noise:
            tell(len(todo), len(todo) + 1, "gradient noise")
            noise = await profiler.noise(devices[0])
    return _profile(program, profiler, measurements, noise, version)


async def make_probe(program: Program, device: LocalDevice, patience: Patience, version: str) -> Profile:
    """The least that can be measured: a few steps at the training's own batch on one device."""
    async with Profiler.start(program, [device], patience) as profiler:
        first = await profiler.first_look(device)
        if not profiler.declared:
            raise InputError(first.error, where=program.entry, way_out="Mend it, or see whether it runs alone.")
        return _profile(program, profiler, [first], None, version)


def _profile(
    program: Program,
    profiler: Profiler,
    measurements: Sequence[Measurement],
    noise: NoiseSeen | None,
    version: str,
) -> Profile:
    return Profile(
        short_entry(program.entry),
        program.args,
        source_digest(program.entry, Path(program.folder)),
        **{**profiler.declared, "batch_size": program.batch_size or profiler.declared["batch_size"]},
        measurements=tuple(measurements),
        noise=noise,
        start_s=profiler.start_s,
        version=version,
        machine=platform.node(),
    )


async def _measure_all(profiler: Profiler, todo: Sequence[SweepPoint], tell: Tell, total: int) -> list[Measurement]:
    measurements: list[Measurement] = []
    full: dict[str, int] = {}  # kind to the smallest batch that does not fit
    for number, setting in enumerate(todo):
        tell(number, total, str(setting))
        kind = setting.devices[0].kind
        if len(setting.devices) == 1 and setting.batch_size >= full.get(kind, setting.batch_size + 1):
            continue
        made = await profiler.measure(setting)
        if made.out_of_memory and setting == SweepPoint(setting.devices, setting.batch_size):
            full[kind] = setting.batch_size
        measurements.append(replace(made, error=made.error.splitlines()[0] if made.error else ""))
    return measurements
