"""Profiler: measures a training in worker processes under an executor and writes a profile."""

from __future__ import annotations

import asyncio
import json
import platform
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from carpool.core.errors import InputError
from carpool.core.messages import Assign, Fact, JobFailed, JobFinished, ProgressReported, Release, ReleaseApplied
from carpool.core.model import Allocation, JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.entry_file import source_digest
from carpool.jobs.program import Program
from carpool.predictors.profiles.profile import Measurement, NoiseSeen, Profile, short_entry
from carpool.runtime.executor.client import ExecutorClient, ExecutorOptions
from carpool.runtime.executor.reports import Facts, Gone, Told
from carpool.runtime.profiling.sweep import (
    NOISE_ENTRY,
    PROBE_ENTRY,
    ProbeConfig,
    SweepPoint,
    available_bytes,
    check_batches,
    default_batches,
    settings,
)

_WARMUP, _LEAST, _MOST = 2, 4, 200  # steps
_COUNTED = 2  # steps in which memory is counted block by block
_NOISE_STEPS = 20
_FOR_EVER = 1 << 40  # steps of a neighbour
_NEVER_S = 1e6
_PORTION = 0.8  # of the memory there is, that a measured process may take


@dataclass(frozen=True, slots=True)
class MeasurementBudget:
    """How long to measure."""

    seconds: float = 2.0  # of steps that count, in each setting
    timeout_s: float = 120.0  # after which a setting is given up
    memory_bytes: int = 0  # that a measured process may take; 0: most of what there is


@dataclass(frozen=True, slots=True)
class _Seen:
    """What came back from one process or several: a note from each, or why there is none."""

    notes: tuple[dict[str, Any], ...] = ()
    error: str = ""
    out_of_memory: bool = False


class Profiler:
    """Runs settings one after another; what goes wrong in one is its result and does not end the others."""

    def __init__(
        self,
        program: Program,
        devices: Sequence[LocalDevice],
        patience: MeasurementBudget,
        beside: Program | None = None,
    ) -> None:
        self._program = replace(program, retries=0, checkpoint_s=_NEVER_S)
        self._beside = beside
        self._devices = tuple(devices)
        self._patience = patience
        self._link: ExecutorClient | None = None
        self._number = 0
        self._sample_s: float | None = None  # of a sample, from what was measured last
        self.declared: dict[str, Any] = {}  # what the training says of itself, once it was loaded
        self.start_s: float | None = None  # from a new process to the end of its first step, when it was first seen

    @classmethod
    @asynccontextmanager
    async def start(
        cls,
        program: Program,
        devices: Sequence[LocalDevice],
        patience: MeasurementBudget,
        beside: Program | None = None,
    ) -> AsyncIterator[Profiler]:
        """With an executor, which ends with the context."""
        profiler = cls(program, devices, patience, beside)
        profiler._state = Path(tempfile.mkdtemp(prefix="carpool-profile-"))
        try:
            yield profiler
        finally:
            await profiler._end()
            shutil.rmtree(profiler._state, ignore_errors=True)

    _state: Path

    async def first_look(self, device: LocalDevice) -> Measurement:
        """A few steps at the training's own batch: how long they take, and what the training declares."""
        setting = SweepPoint((device,), self._program.batch_size)
        seen = await self._watch(setting, _LEAST)
        return self._measured(replace(setting, batch_size=self._own_batch()), seen, None)

    async def measure(self, setting: SweepPoint) -> Measurement:
        """Time and use of the device, then memory."""
        steps = self._num_steps(setting)
        seen = await self._watch(setting, steps)
        counted = None
        is_plain = len(setting.devices) == 1 and setting.share == 1.0 and not setting.is_paired and not setting.exact
        if is_plain and setting.devices[0].cuda is None and not seen.error:
            counted = await self._watch(setting, _COUNTED, counts_blocks=True)
        return self._measured(setting, seen, counted)

    async def noise(self, device: LocalDevice) -> NoiseSeen | None:
        """The gradient noise scale in the first steps; None where a batch cannot be cut."""
        watching = self._watching(SweepPoint((device,), 0), _NOISE_STEPS)
        program = self._wrapped(self._program, NOISE_ENTRY, replace(watching, warmup=0))
        seen = await self._run(replace(program, batch_size=0), (device,), 1.0, Path(watching.out))
        if not seen.notes or seen.notes[0]["parts"] < 2:
            return None
        return NoiseSeen(**{name: seen.notes[0][name] for name in ("scale", "spread", "parts", "steps")})

    # ---------------------------------------------------------------------------------------------------- one setting
    async def _watch(self, setting: SweepPoint, steps: int, *, counts_blocks: bool = False) -> _Seen:
        watching = replace(self._watching(setting, steps), counts_blocks=counts_blocks)
        program = replace(
            self._wrapped(self._program, PROBE_ENTRY, watching), batch_size=setting.batch_size, exact=setting.exact
        )
        seen = await self._run(program, setting.devices, setting.share, Path(watching.out), is_paired=setting.is_paired)
        if seen.notes:
            self.declared = seen.notes[0]["training"]
            self.start_s = self.start_s or seen.notes[0]["start_s"]
        return seen

    def _watching(self, setting: SweepPoint, steps: int) -> ProbeConfig:
        self._number += 1
        out = self._state / f"seen-{self._number}"
        out.mkdir()
        on_gpu = setting.devices[0].cuda is not None
        limit = self._patience.memory_bytes
        if not limit and not on_gpu:
            limit = int(_PORTION * available_bytes() / len(setting.devices))
        return ProbeConfig(str(out), _WARMUP, steps, limit, on_gpu)

    def _wrapped(self, program: Program, entry: str, watching: ProbeConfig) -> Program:
        args = {"entry": program.entry, "args": program.args, "seed": program.seed, "how": asdict(watching)}
        return replace(program, entry=entry, args=args)

    def _num_steps(self, setting: SweepPoint) -> int:
        if self._sample_s is None:
            return _LEAST
        return max(_LEAST, min(_MOST, round(self._patience.seconds / (self._sample_s * setting.batch_size))))

    def _own_batch(self) -> int:
        return self._program.batch_size or int(self.declared.get("batch_size", 0))

    def _measured(self, setting: SweepPoint, seen: _Seen, counted: _Seen | None) -> Measurement:
        beside = short_entry(self._beside.entry) if setting.is_paired and self._beside is not None else ""
        made = Measurement(
            setting.devices[0].kind, len(setting.devices), setting.batch_size, setting.share, setting.exact, beside
        )
        if not seen.notes:
            return replace(made, error=seen.error, out_of_memory=seen.out_of_memory)
        notes = seen.notes
        # Who takes turns makes some steps in a row and then waits: only the mean has both in it.
        by = "mean_step_s" if setting.is_paired or setting.share < 1.0 else "step_s"
        slowest = max(notes, key=lambda note: note[by])
        held = max(note["reserved_bytes"] for note in notes)
        in_use = counted.notes if counted is not None and counted.notes else notes
        uses = [note["device_use"] for note in notes if note["device_use"] is not None]
        self._sample_s = slowest[by] / setting.batch_size
        return replace(
            made,
            steps=slowest["steps"],
            step_s=slowest[by],
            step_spread_s=slowest["step_spread_s"],
            peak_bytes=max(note["peak_bytes"] for note in in_use),
            held_bytes=held,
            device_use=sum(uses) / len(uses) if uses else None,
            bandwidth_use=slowest["bandwidth_use"],
            batch_bytes=sum(note["batch_bytes"] for note in notes),
            host_to_device_bytes=slowest["host_to_device_bytes"],
        )

    # ------------------------------------------------------------------------------------------------------- one run
    async def _run(
        self, program: Program, devices: Sequence[LocalDevice], share: float, out: Path, *, is_paired: bool = False
    ) -> _Seen:
        """Run a program to its end, beside the other one if asked to, and read what its processes wrote."""
        if self._link is None:
            options = ExecutorOptions(mirror_s=_NEVER_S, splits=False, warm=0)
            self._link = await ExecutorClient.start(self._devices, self._state, options=options)
        run = self._to_the_end(self._link, program, Allocation.of(*(device.id for device in devices), fraction=share))
        if is_paired:
            run = self._with_neighbour(self._link, run, devices[0], 1.0 - share if share < 1.0 else 1.0)
        try:
            error = await asyncio.wait_for(run, self._patience.timeout_s)
        except TimeoutError:
            error = f"took longer than {self._patience.timeout_s:g} s"
            self._link.kill()  # a step that does not end hears nothing
            await self._end()
        notes = _read(out)
        if error or not notes:
            return _Seen(error=error or "nothing was measured", out_of_memory="memory" in error)
        return _Seen(notes)

    async def _to_the_end(self, link: ExecutorClient, program: Program, allocation: Allocation) -> str:
        """Why it failed; empty when it finished."""
        job = JobId(f"measured-{self._number}")
        link.introduce(job, program)
        link.carry([Assign(job, allocation, 1)])
        return await _heard(link, job, JobFinished)

    async def _with_neighbour(
        self, link: ExecutorClient, run: Coroutine[Any, Any, str], device: LocalDevice, share: float
    ) -> str:
        """The same while the other training makes steps on the device."""
        assert self._beside is not None, "pairs are measured only where there is another training"
        neighbour = JobId(f"beside-{self._number}")
        link.introduce(neighbour, self._wrapped(self._beside, PROBE_ENTRY, ProbeConfig("", 0, _FOR_EVER)))
        link.carry([Assign(neighbour, Allocation.of(device.id, fraction=share), 1)])
        if error := await _heard(link, neighbour, ProgressReported):
            run.close()
            return f"the neighbour failed: {error}"
        error = await run
        link.carry([Release(neighbour, 2)])
        await _heard(link, neighbour, ReleaseApplied)
        return error

    async def _end(self) -> None:
        """End the executor and all it started; the next setting gets a new one."""
        if self._link is not None:
            link, self._link = self._link, None
            await link.stop(checkpoint=False)
            while not isinstance(await link.receive(), Gone):
                pass  # last words of nobody's interest


def _read(folder: Path) -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(path.read_text(encoding="ascii")) for path in sorted(folder.glob("*.json")))


async def _heard(link: ExecutorClient, job: JobId, awaited: type[Fact]) -> str:
    """Wait for a fact about a job; why it failed before that, or nothing."""
    told = ""
    while True:
        match await link.receive():
            case Gone(reason=reason):
                return f"the executor has gone: {reason}"
            case Told(job=who, words=words) if who == job and "memory" in words:
                told = words
            case Facts(facts=facts):
                for fact in facts:
                    if getattr(fact, "job", None) != job:
                        continue
                    if isinstance(fact, JobFailed):
                        return f"{fact.error}; {told}" if told and "memory" not in fact.error else fact.error
                    if isinstance(fact, awaited):
                        return ""


Tell = Callable[[int, int, str], None]  # settings done, settings in all, the next one in words


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """What a profile is to cover."""

    batches: tuple[int, ...] = ()  # empty: around the training's own
    shares: tuple[float, ...] = (1.0,)
    beside: Program | None = None
    exact: bool = True
    noise: bool = True


async def make_profile(
    program: Program,
    devices: Sequence[LocalDevice],
    wanted: ProfileRequest,
    patience: MeasurementBudget,
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


async def make_probe(program: Program, device: LocalDevice, patience: MeasurementBudget, version: str) -> Profile:
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
