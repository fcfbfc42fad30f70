"""Worker setup: applies cores, environment and GPU share, loads the entry and builds the trainer."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from carpool.jobs.nvml import Nvml
from carpool.jobs.program import Program
from carpool.runtime.compat.allocator import keep_freed_memory, release_freed_memory
from carpool.runtime.compat.cuda_driver import is_mps_client
from carpool.runtime.compat.process_lifetime import set_process_name
from carpool.runtime.engine.determinism import enable_determinism
from carpool.runtime.engine.step_source import StepSource
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.engine.training import Training
from carpool.runtime.errors import LaneMismatch
from carpool.runtime.memory.eviction_policy import CUDA_CONTEXT_BYTES
from carpool.runtime.memory.memory_usage import limit_memory, peak_memory
from carpool.runtime.process.protocol import Begin, Done, Ready
from carpool.runtime.reduce.param_exchange import is_elementwise
from carpool.runtime.sharing.lanes import WHOLE
from carpool.runtime.sharing.mps_daemon import PERCENTAGE
from carpool.runtime.state.digest import digest, fingerprint
from carpool.runtime.worker.entry_loader import load_training


class StartupTimer:
    """A clock that starts with the job's `Begin`, and what it showed on the way."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = self._last = clock()
        self._spans: list[tuple[str, float]] = []

    def passed(self, what: str) -> None:
        """Something has just been done."""
        now = self._clock()
        self._spans.append((what, now - self._last))
        self._last = now

    def words(self) -> str:
        """For the job's story."""
        parts = ", ".join(f"{seconds:.3f} s {what}" for what, seconds in self._spans)
        return f"ready after {self._last - self._began:.3f} s: {parts}"


# A client of MPS that finds no daemon (it died a moment ago, or its pipes cannot be reached) gets no error: it computes
# on the whole GPU. Nothing would tell but slower neighbours and other bits. So every process on a lane counts.


_GRAIN = 2  # multiprocessors that are given out together


class VisibleGpu(NamedTuple):
    """What a process sees."""

    multiprocessors: int
    whole: int | None = None  # that the GPU has; None: nobody tells
    is_client: bool | None = None  # of MPS; None: nobody tells


def inspect_gpu(device: torch.device) -> VisibleGpu:
    """Start CUDA, if it is not started, and look."""
    seen = torch.cuda.get_device_properties(device).multi_processor_count
    return VisibleGpu(int(seen), _total_multiprocessors(device), is_mps_client(device.index or 0))


def lane_problem(asked: int, seen: VisibleGpu) -> str:
    """What is wrong with a lane of so many percent; empty if nothing is, or nothing can be said."""
    if seen.whole is None:
        is_wrong = seen.is_client is False
    else:
        is_wrong = seen.multiprocessors > seen.whole * asked // WHOLE + _GRAIN
    if asked >= WHOLE or not is_wrong:
        return ""
    there = "" if seen.whole is None else f" of {seen.whole}"
    return f"{asked} % were asked, {seen.multiprocessors}{there} multiprocessors are seen: NVIDIA's MPS was not found"


def lane_note(asked: int, device: torch.device, seen: VisibleGpu) -> str:
    """What was given, in words."""
    words = f"a lane of {asked} % on {device}: {seen.multiprocessors} multiprocessors seen"
    return f"{words}, without NVIDIA's MPS" if seen.is_client is False else words


def _total_multiprocessors(device: torch.device) -> int | None:
    nvml = Nvml.open()
    if nvml is None:
        return None
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    index = nvml.index_of(uuid)
    return None if index is None else nvml.multiprocessors(index)


def configure_process(begin: Begin, program: Program, fds: tuple[int, ...]) -> None:
    """Take the place given: log, name, cores, threads, environment and working folder."""
    for fd in fds[:1]:
        os.dup2(fd, 1)
        os.dup2(fd, 2)
    for fd in fds:
        os.close(fd)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    set_process_name(f"carpool:{begin.job}")
    # Where memory runs out, the kernel shall take a worker, which can be replaced, before the executor.
    Path("/proc/self/oom_score_adj").write_text("500")
    keep_freed_memory()
    if begin.cores:
        os.sched_setaffinity(0, begin.cores)
    torch.set_num_threads(begin.threads)
    os.environ.update(program.environment)
    os.environ.update(begin.environment)
    enable_determinism(deterministic=program.deterministic)  # before anything starts CUDA
    enter_job_folder(program)


def enter_job_folder(program: Program) -> None:
    """Work in the job's folder, and import from there."""
    if program.folder:
        os.chdir(program.folder)
        sys.path.insert(0, program.folder)
    if more := program.environment.get("PYTHONPATH"):
        sys.path[:0] = more.split(os.pathsep)
    sys.argv = [program.entry]


def check_training(program: Program) -> None:
    """Call the entry, and refuse what could not begin on any device."""
    training = _loaded(program)
    source = StepSource(training, program.seed, program.shards if program.exact else None)
    for batch_size in filter(None, (training.batch_size, program.batch_size)):
        source.check_batch_size(batch_size, 0)


def make_trainer(
    begin: Begin, program: Program, arrival: StartupTimer, enter: Callable[[], int] = lambda: 0
) -> Trainer:
    """Load the entry and put its training on the device; ``enter``, in between, says how much memory there is."""
    device = torch.device(begin.device)
    if not begin.memory_cap:
        _start_cuda(device, program.memory_bytes)
    training = _loaded(program)
    arrival.passed("in its entry")
    if begin.memory_cap:  # only now, because CUDA itself takes memory
        room = max(1, enter() - CUDA_CONTEXT_BYTES)
        _start_cuda(device, min(room, program.memory_bytes or room))
        arrival.passed("until there was room")
    trainer = Trainer(
        training,
        seed=program.seed,
        exact=program.exact,
        shards=program.shards,
        device=device,
        graph=program.graph,
        deterministic=program.deterministic,
    )
    if program.batch_size:
        trainer.resize_batch(program.batch_size)
    release_freed_memory()  # what loading the data took: a worker holds what its steps need and no more
    arrival.passed(f"to bring it to {device}")
    return trainer


def _loaded(program: Program) -> Training:
    folder = Path(program.folder) if program.folder else None
    return with_program_options(load_training(program.entry, program.args, seed=program.seed, folder=folder), program)


def with_program_options(training: Training, program: Program) -> Training:
    """A training with what its job says of precision and layout."""
    if program.precision == "bf16":
        training = replace(training, autocast="bf16")
    elif program.precision:
        training = replace(training, precision=program.precision)
    return replace(training, channels_last=True) if program.channels_last else training


def _start_cuda(device: torch.device, most_bytes: int) -> None:
    """Let torch allocate no more than the job may have: what exceeds it fails here, not next door."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if most_bytes:
            limit_memory(most_bytes, device)


def start_cuda_lane(begin: Begin) -> str:
    """Start CUDA on the lane, if there is one; what was given, in words. `LaneMismatch` if it is not what was asked for."""
    asked = begin.environment.get(PERCENTAGE)
    if asked is None:
        return ""
    device = torch.device(begin.device)
    seen = inspect_gpu(device)
    if problem := lane_problem(int(asked), seen):
        raise LaneMismatch(problem)
    return lane_note(int(asked), device, seen)


def ready_message(trainer: Trainer, program: Program, slot_bytes: int) -> Ready:
    """What the executor has to know about the training."""
    training, batch_size = trainer.training, trainer.batch_size
    notes = list(trainer.notes)
    if trainer.graphs is not None and training.autocast_dtype is torch.float16:
        notes.append("steps are made without CUDA graphs: the fp16 loss is scaled by a number on the host")
    if program.sync_batchnorm and training.batch_norms:
        notes.append("BatchNorm takes its statistics over all parts of a step, which therefore take no turns")
    return Ready(
        fingerprint=fingerprint(training.model),
        segment_bytes=slot_bytes,
        batch_size=batch_size,
        total_steps=training.stop.most_steps(-(-training.num_samples // batch_size)),
        num_samples=training.num_samples,
        sizes=tuple(parameter.numel() for parameter in trainer.layout.parameters),
        has_batch_norm=bool(training.batch_norms),
        may_split=trainer.device.type == "cpu" and is_elementwise(training.optimizer),
        notes=tuple(notes),
        target_loss=training.stop.target_loss,
        window=training.stop.window,
    )


def done_message(trainer: Trainer, reason: str, more: Sequence[str] = ()) -> Done:
    """What the executor has to know about a training that is over; with more for its story."""
    unsure = [
        f"{each} has no deterministic form: equal bits are not promised"
        for each in trainer.nondeterministic_ops.operations
    ]
    return Done(
        step=trainer.cursor.step,
        epoch=trainer.cursor.epoch,
        loss=trainer.progress.losses[-1] if trainer.progress.losses else math.nan,
        digest=digest(trainer.training.model),
        reason=reason,
        metrics=trainer.progress.metrics,
        notes=(*trainer.notes, *unsure, *more),
        memory_bytes=peak_memory(trainer.device),
    )
