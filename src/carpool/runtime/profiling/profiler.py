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

_WARMUP, _MIN_STEPS, _MAX_STEPS = 2, 4, 200
_MEMORY_STEPS = 2  # for an exact measurement of memory
_NOISE_STEPS = 20
_ENDLESS = 1 << 40  # steps of a neighbour
_NEVER_S = 1e6
_MEMORY_FRACTION = 0.8  # of available host memory that a measured process may use

Tell = Callable[[int, int, str], None]  # settings done, settings in total, description of the next one


@dataclass(frozen=True, slots=True)
class MeasurementBudget:
    """Limits of time and memory for each setting."""

    seconds: float = 2.0  # of measured steps
    timeout_s: float = 120.0
    memory_bytes: int = 0  # that a measured process may use; 0: most of what is available


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """The settings that a profile covers."""

    batches: tuple[int, ...] = ()  # empty: around the training's own
    shares: tuple[float, ...] = (1.0,)
    beside: Program | None = None  # a neighbour to measure with
    exact: bool = True
    noise: bool = True


@dataclass(frozen=True, slots=True)
class _ProbeResult:
    """The measurements of one or several processes, or why there are none."""

    measured: tuple[dict[str, Any], ...] = ()
    error: str = ""
    out_of_memory: bool = False


class Profiler:
    """Measures settings one after another; a failed setting is recorded and does not end the others."""

    _folder: Path

    def __init__(
        self,
        program: Program,
        devices: Sequence[LocalDevice],
        budget: MeasurementBudget,
        neighbour: Program | None = None,
    ) -> None:
        self._program = replace(program, retries=0, checkpoint_s=_NEVER_S)
        self._neighbour = neighbour
        self._devices = tuple(devices)
        self._budget = budget
        self._client: ExecutorClient | None = None
        self._number = 0
        self._sample_s: float | None = None  # seconds per sample, from the last measurement
        self.declared: dict[str, Any] = {}  # fields of the training, after it was first loaded
        self.start_s: float | None = None  # from the start of the first process to the end of its first step

    @classmethod
    @asynccontextmanager
    async def start(
        cls,
        program: Program,
        devices: Sequence[LocalDevice],
        budget: MeasurementBudget,
        neighbour: Program | None = None,
    ) -> AsyncIterator[Profiler]:
        """A profiler whose executor ends with the context."""
        profiler = cls(program, devices, budget, neighbour)
        profiler._folder = Path(tempfile.mkdtemp(prefix="carpool-profile-"))
        try:
            yield profiler
        finally:
            await profiler._stop_executor()
            shutil.rmtree(profiler._folder, ignore_errors=True)

    async def first_measurement(self, device: LocalDevice) -> Measurement:
        setting = SweepPoint((device,), self._program.batch_size)
        result = await self._probe(setting, _MIN_STEPS)
        own_batch = self._program.batch_size or int(self.declared.get("batch_size", 0))
        return self._measurement(replace(setting, batch_size=own_batch), result, None)

    async def measure(self, setting: SweepPoint) -> Measurement:
        result = await self._probe(setting, self._num_steps(setting))
        memory = None
        is_plain = len(setting.devices) == 1 and setting.share == 1.0 and not setting.is_paired and not setting.exact
        if is_plain and setting.devices[0].cuda is None and not result.error:
            memory = await self._probe(setting, _MEMORY_STEPS, exact_memory=True)
        return self._measurement(setting, result, memory)

    async def noise(self, device: LocalDevice) -> NoiseSeen | None:
        """Measure the gradient noise scale in the first steps; None if a batch cannot be split."""
        config = self._new_config(SweepPoint((device,), 0), _NOISE_STEPS)
        program = _wrap(self._program, NOISE_ENTRY, replace(config, warmup=0))
        result = await self._run(replace(program, batch_size=0), (device,), 1.0, Path(config.out))
        if not result.measured or result.measured[0]["parts"] < 2:
            return None
        return NoiseSeen(**{name: result.measured[0][name] for name in ("scale", "spread", "parts", "steps")})

    async def _probe(self, setting: SweepPoint, steps: int, *, exact_memory: bool = False) -> _ProbeResult:
        config = replace(self._new_config(setting, steps), exact_memory=exact_memory)
        program = replace(_wrap(self._program, PROBE_ENTRY, config), batch_size=setting.batch_size, exact=setting.exact)
        result = await self._run(program, setting.devices, setting.share, Path(config.out), is_paired=setting.is_paired)
        if result.measured:
            self.declared = result.measured[0]["training"]
            self.start_s = self.start_s or result.measured[0]["start_s"]
        return result

    def _new_config(self, setting: SweepPoint, steps: int) -> ProbeConfig:
        self._number += 1
        out = self._folder / f"seen-{self._number}"
        out.mkdir()
        on_gpu = setting.devices[0].cuda is not None
        limit = self._budget.memory_bytes
        if not limit and not on_gpu:
            limit = int(_MEMORY_FRACTION * available_bytes() / len(setting.devices))
        return ProbeConfig(str(out), _WARMUP, steps, limit, on_gpu)

    def _num_steps(self, setting: SweepPoint) -> int:
        if self._sample_s is None:
            return _MIN_STEPS
        fitting = round(self._budget.seconds / (self._sample_s * setting.batch_size))
        return max(_MIN_STEPS, min(_MAX_STEPS, fitting))

    def _measurement(self, setting: SweepPoint, result: _ProbeResult, memory: _ProbeResult | None) -> Measurement:
        beside = short_entry(self._neighbour.entry) if setting.is_paired and self._neighbour is not None else ""
        measurement = Measurement(
            setting.devices[0].kind, len(setting.devices), setting.batch_size, setting.share, setting.exact, beside
        )
        if not result.measured:
            return replace(measurement, error=result.error, out_of_memory=result.out_of_memory)
        measured = result.measured
        # With time slices some steps run back to back and then wait: only the mean covers both.
        by = "mean_step_s" if setting.is_paired or setting.share < 1.0 else "step_s"
        slowest = max(measured, key=lambda each: each[by])
        in_use = memory.measured if memory is not None and memory.measured else measured
        uses = [each["device_use"] for each in measured if each["device_use"] is not None]
        self._sample_s = slowest[by] / setting.batch_size
        return replace(
            measurement,
            steps=slowest["steps"],
            step_s=slowest[by],
            step_spread_s=slowest["step_spread_s"],
            peak_bytes=max(each["peak_bytes"] for each in in_use),
            held_bytes=max(each["reserved_bytes"] for each in measured),
            device_use=sum(uses) / len(uses) if uses else None,
            bandwidth_use=slowest["bandwidth_use"],
            batch_bytes=sum(each["batch_bytes"] for each in measured),
            host_to_device_bytes=slowest["host_to_device_bytes"],
        )

    async def _run(
        self, program: Program, devices: Sequence[LocalDevice], share: float, out: Path, *, is_paired: bool = False
    ) -> _ProbeResult:
        if self._client is None:
            options = ExecutorOptions(mirror_s=_NEVER_S, splits=False, warm=0)
            self._client = await ExecutorClient.start(self._devices, self._folder, options=options)
        allocation = Allocation.of(*(device.id for device in devices), fraction=share)
        run = self._run_job(self._client, program, allocation)
        if is_paired:
            run = self._with_neighbour(self._client, run, devices[0], 1.0 - share if share < 1.0 else 1.0)
        try:
            error = await asyncio.wait_for(run, self._budget.timeout_s)
        except TimeoutError:
            error = f"took longer than {self._budget.timeout_s:g} s"
            self._client.kill()  # a step that hangs handles no messages
            await self._stop_executor()
        measured = _read(out)
        if error or not measured:
            return _ProbeResult(error=error or "nothing was measured", out_of_memory="memory" in error)
        return _ProbeResult(measured)

    async def _run_job(self, client: ExecutorClient, program: Program, allocation: Allocation) -> str:
        """Run a job to its end; returns why it failed, or ""."""
        job = JobId(f"measured-{self._number}")
        client.introduce(job, program)
        client.carry([Assign(job, allocation, 1)])
        return await _await_fact(client, job, JobFinished)

    async def _with_neighbour(
        self, client: ExecutorClient, run: Coroutine[Any, Any, str], device: LocalDevice, share: float
    ) -> str:
        assert self._neighbour is not None, "pairs are measured only with a neighbour"
        neighbour = JobId(f"beside-{self._number}")
        client.introduce(neighbour, _wrap(self._neighbour, PROBE_ENTRY, ProbeConfig("", 0, _ENDLESS)))
        client.carry([Assign(neighbour, Allocation.of(device.id, fraction=share), 1)])
        if error := await _await_fact(client, neighbour, ProgressReported):
            run.close()
            return f"the neighbour failed: {error}"
        error = await run
        client.carry([Release(neighbour, 2)])
        await _await_fact(client, neighbour, ReleaseApplied)
        return error

    async def _stop_executor(self) -> None:
        """Stop the executor and its workers; the next setting starts a new one."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.stop(checkpoint=False)
            while not isinstance(await client.receive(), Gone):
                pass


def _wrap(program: Program, entry: str, config: ProbeConfig) -> Program:
    args = {"entry": program.entry, "args": program.args, "seed": program.seed, "config": asdict(config)}
    return replace(program, entry=entry, args=args)


def _read(folder: Path) -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(path.read_text(encoding="ascii")) for path in sorted(folder.glob("*.json")))


async def _await_fact(client: ExecutorClient, job: JobId, awaited: type[Fact]) -> str:
    """Wait for a fact about a job; returns why the job failed before it, or ""."""
    memory_note = ""
    while True:
        match await client.receive():
            case Gone(reason=reason):
                return f"the executor exited: {reason}"
            case Told(job=other, words=words) if other == job and "memory" in words:
                memory_note = words
            case Facts(facts=facts):
                for fact in facts:
                    if getattr(fact, "job", None) != job:
                        continue
                    if isinstance(fact, JobFailed):
                        has_more = memory_note and "memory" not in fact.error
                        return f"{fact.error}; {memory_note}" if has_more else fact.error
                    if isinstance(fact, awaited):
                        return ""


async def make_profile(
    program: Program,
    devices: Sequence[LocalDevice],
    request: ProfileRequest,
    budget: MeasurementBudget,
    version: str,
    tell: Tell = lambda done, total, text: None,
) -> Profile:
    """Measure a training on these devices; `InputError` if it fails even at its own batch size."""
    async with Profiler.start(program, devices, budget, request.beside) as profiler:
        tell(0, 1, "a few steps, to find batch size and rate")
        await _first_measurement(profiler, program, devices[0])
        num_samples, own = profiler.declared["num_samples"], _own_batch(program, profiler)
        requested = request.batches
        batches = check_batches(requested, num_samples) if requested else default_batches(own, num_samples)
        paired = request.beside is not None
        points = settings(devices, own, batches, request.shares, exact=request.exact, paired=paired)
        measurements = await _measure_all(profiler, points, tell, len(points) + request.noise)
        noise = None
        if request.noise:
            tell(len(points), len(points) + 1, "gradient noise")
            noise = await profiler.noise(devices[0])
    return _profile(program, profiler, measurements, noise, version)


async def make_probe(program: Program, device: LocalDevice, budget: MeasurementBudget, version: str) -> Profile:
    """Measure the minimum: a few steps at the training's own batch size on one device."""
    async with Profiler.start(program, [device], budget) as profiler:
        first = await _first_measurement(profiler, program, device)
        return _profile(program, profiler, [first], None, version)


async def _first_measurement(profiler: Profiler, program: Program, device: LocalDevice) -> Measurement:
    first = await profiler.first_measurement(device)
    if not profiler.declared:
        raise InputError(first.error, where=program.entry, way_out="Fix the entry; try it alone with carpool run.")
    return first


def _own_batch(program: Program, profiler: Profiler) -> int:
    return program.batch_size or int(profiler.declared["batch_size"])


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
        **{**profiler.declared, "batch_size": _own_batch(program, profiler)},
        measurements=tuple(measurements),
        noise=noise,
        start_s=profiler.start_s,
        version=version,
        machine=platform.node(),
    )


async def _measure_all(profiler: Profiler, points: Sequence[SweepPoint], tell: Tell, total: int) -> list[Measurement]:
    measurements: list[Measurement] = []
    too_large: dict[str, int] = {}  # the smallest batch that does not fit, by device type
    for number, point in enumerate(points):
        tell(number, total, str(point))
        kind = point.devices[0].kind
        if len(point.devices) == 1 and point.batch_size >= too_large.get(kind, point.batch_size + 1):
            continue
        measurement = await profiler.measure(point)
        if measurement.out_of_memory and point == SweepPoint(point.devices, point.batch_size):
            too_large[kind] = point.batch_size
        error = measurement.error.splitlines()[0] if measurement.error else ""
        measurements.append(replace(measurement, error=error))
    return measurements
