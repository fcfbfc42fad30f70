"""Worker setup: applies cores, environment and GPU share, loads the entry and builds the trainer."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from carpool.core.model import WHOLE
from carpool.jobs.nvml import Nvml
from carpool.jobs.program import Program
from carpool.runtime.compat.allocator import keep_freed_memory, release_freed_memory
from carpool.runtime.compat.cuda_driver import is_mps_client
from carpool.runtime.compat.process_lifetime import set_process_name
from carpool.runtime.engine.custom_step import check_custom_step
from carpool.runtime.engine.determinism import enable_determinism
from carpool.runtime.engine.step_source import StepSource
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.engine.training import Training
from carpool.runtime.errors import LaneMismatch
from carpool.runtime.memory.eviction_policy import CUDA_CONTEXT_BYTES
from carpool.runtime.memory.memory_usage import limit_memory, peak_memory
from carpool.runtime.process.protocol import Begin, Done, Ready
from carpool.runtime.reduce.param_exchange import is_elementwise
from carpool.runtime.sharing.mps_daemon import PERCENTAGE
from carpool.runtime.state.digest import digest, fingerprint
from carpool.runtime.worker.entry_loader import load_training


class StartupTimer:
    """Times the phases of a worker's start, from its job's `Begin` on."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = self._last = clock()
        self._laps: list[tuple[str, float]] = []

    def lap(self, phase: str) -> None:
        now = self._clock()
        self._laps.append((phase, now - self._last))
        self._last = now

    def summary(self) -> str:
        laps = ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in self._laps)
        return f"ready after {self._last - self._began:.3f} s: {laps}"


_GRANULARITY = 2  # multiprocessors that MPS assigns together


class VisibleGpu(NamedTuple):
    """Multiprocessors that this process may use."""

    multiprocessors: int
    total: int | None = None  # of the GPU; None: unknown
    is_mps_client: bool | None = None  # None: unknown


def inspect_gpu(device: torch.device) -> VisibleGpu:
    """Initialize CUDA and count the multiprocessors."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return VisibleGpu(int(count), _total_multiprocessors(device), is_mps_client(device.index or 0))


def lane_problem(requested: int, gpu: VisibleGpu) -> str:
    """Why this process has more than its lane of ``requested`` percent; empty if it does not, or that is unknown.

    An MPS client that finds no daemon gets no error: it computes on the whole GPU, slows its neighbours down, and
    its weights differ in bits. So every process checks its lane.
    """
    if gpu.total is None:
        is_wrong = gpu.is_mps_client is False
    else:
        is_wrong = gpu.multiprocessors > gpu.total * requested // WHOLE + _GRANULARITY
    if requested >= WHOLE or not is_wrong:
        return ""
    of_total = "" if gpu.total is None else f" of {gpu.total}"
    return f"{requested} % requested, {gpu.multiprocessors}{of_total} multiprocessors visible: MPS is not active"


def lane_note(requested: int, device: torch.device, gpu: VisibleGpu) -> str:
    """The lane of this process, for its job's story."""
    note = f"GPU share {requested} % of {device}: {gpu.multiprocessors} multiprocessors"
    return f"{note}, without MPS" if gpu.is_mps_client is False else note


def _total_multiprocessors(device: torch.device) -> int | None:
    nvml = Nvml.open()
    if nvml is None:
        return None
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    index = nvml.index_of(uuid)
    return None if index is None else nvml.multiprocessors(index)


def configure_process(begin: Begin, program: Program | None, fds: tuple[int, ...]) -> None:
    """Apply log, name, cores, threads, the lane's environment and, unless None, the job's settings."""
    for fd in fds[:1]:
        redirect_output(fd)
    for fd in fds:
        os.close(fd)
    set_process_name(f"carpool:{begin.job}")
    _limit_damage()
    if begin.cores:
        # an entry called earlier in this process may have started some
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), begin.cores)
    torch.set_num_threads(begin.threads)
    if program is not None:
        configure_job(program)
    os.environ.update(begin.environment)


def configure_job(program: Program) -> None:
    """Apply the job's environment, determinism and working folder; before anything starts CUDA."""
    os.environ.update(program.environment)
    enable_determinism(deterministic=program.deterministic)
    enter_job_folder(program)


def capture_output(threads: int) -> int:
    """Prepare a process that calls an entry before its job starts. Returns the memory file that receives its output."""
    output = os.memfd_create("output")
    redirect_output(output)
    _limit_damage()
    torch.set_num_threads(threads)
    return output


def redirect_output(fd: int) -> None:
    """Write what is printed from now on to a file."""
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _limit_damage() -> None:
    # When memory runs out, the kernel should kill a worker, which can be replaced, before the executor.
    Path("/proc/self/oom_score_adj").write_text("500")
    keep_freed_memory()


def enter_job_folder(program: Program) -> None:
    """Change to the job's folder and import from there."""
    if program.folder:
        os.chdir(program.folder)
        sys.path.insert(0, program.folder)
    if paths := program.environment.get("PYTHONPATH"):
        sys.path[:0] = paths.split(os.pathsep)
    sys.argv = [program.entry]


def checked_training(program: Program) -> Training:
    """Call the entry and check that its training could start on any device."""
    training = load_program(program)
    check_custom_step(training, exact=program.exact)
    source = StepSource(training, program.seed, program.shards if program.exact else None)
    for batch_size in filter(None, (training.batch_size, program.batch_size)):
        source.check_batch_size(batch_size, 0)
    return training


def make_trainer(
    begin: Begin,
    program: Program,
    timer: StartupTimer,
    await_admission: Callable[[], int] = lambda: 0,
    training: Training | None = None,  # returned by an entry check in this process
) -> Trainer:
    """Load the entry and move its training to the device; under a memory cap, first wait for free memory there."""
    device = torch.device(begin.device)
    if not begin.memory_cap:
        _start_cuda(device, program.memory_bytes or begin.lane_bytes)
    training = training or load_program(program)
    timer.lap("entry")
    if begin.memory_cap:  # not earlier, because CUDA itself takes memory
        free = max(1, await_admission() - CUDA_CONTEXT_BYTES)
        _start_cuda(device, min(free, program.memory_bytes or free))
        timer.lap("waiting for memory")
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
    release_freed_memory()  # freed memory of loading the data
    timer.lap(f"move to {device}")
    return trainer


def load_program(program: Program) -> Training:
    """Call the entry of a program."""
    folder = Path(program.folder) if program.folder else None
    return with_program_options(load_training(program.entry, program.args, seed=program.seed, folder=folder), program)


def with_program_options(training: Training, program: Program) -> Training:
    """The training with its job's precision and memory layout."""
    if program.precision == "bf16":
        training = replace(training, autocast="bf16")
    elif program.precision:
        training = replace(training, precision=program.precision)
    return replace(training, channels_last=True) if program.channels_last else training


def _start_cuda(device: torch.device, max_bytes: int) -> None:
    """Select the device and limit torch's allocator: a job that exceeds its memory fails, not its neighbour."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if max_bytes:
            limit_memory(max_bytes, device)


def start_cuda_lane(device: torch.device, environment: Mapping[str, str]) -> str:
    """Start CUDA on the process's lane, if it has one; a note for the story. `LaneMismatch` if the lane is wrong."""
    requested = environment.get(PERCENTAGE)
    if requested is None or device.type != "cuda":
        return ""
    gpu = inspect_gpu(device)
    if problem := lane_problem(int(requested), gpu):
        raise LaneMismatch(problem)
    return lane_note(int(requested), device, gpu)


def ready_message(trainer: Trainer, program: Program, contribution_bytes: int) -> Ready:
    """The `Ready` message of a training."""
    training, batch_size = trainer.training, trainer.batch_size
    notes = list(trainer.notes)
    if trainer.graphs is not None and training.autocast_dtype is torch.float16:
        notes.append("steps run without CUDA graphs: the fp16 loss scale is on the host")
    if program.sync_batchnorm and training.batch_norms:
        notes.append("sync_batchnorm: statistics are taken over all devices of a step, which is not time-sliced")
    return Ready(
        fingerprint=fingerprint(training.model),
        contribution_bytes=contribution_bytes,
        batch_size=batch_size,
        total_steps=most_steps(training, batch_size),
        num_samples=training.num_samples,
        sizes=tuple(parameter.numel() for parameter in trainer.layout.parameters),
        has_batch_norm=bool(training.batch_norms),
        can_shard_update=trainer.device.type == "cpu" and is_elementwise(training.whole_optimizer),
        notes=tuple(notes),
        target_loss=training.stop.target_loss,
        window=training.stop.window,
    )


def most_steps(training: Training, batch_size: int) -> int | None:
    """Steps after which a training ends at the latest; None: only a target ends it."""
    return training.stop.most_steps(-(-training.num_samples // batch_size) if training.num_samples else None)


def done_message(trainer: Trainer, reason: str, notes: Sequence[str] = ()) -> Done:
    """The `Done` message of a training, with more notes for its story."""
    caveats = [
        f"{each} has no deterministic implementation: equal bits are not promised"
        for each in trainer.nondeterministic_ops.operations
    ]
    return Done(
        step=trainer.cursor.step,
        epoch=trainer.cursor.epoch,
        loss=trainer.progress.last_loss,
        digest=digest(trainer.training.model),
        reason=reason,
        metrics=trainer.all_metrics(),
        notes=(*trainer.notes, *caveats, *notes),
        memory_bytes=peak_memory(trainer.device),
    )
