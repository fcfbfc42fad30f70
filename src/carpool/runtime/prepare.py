"""From a forked process to a worker that is ready for its first step, and what it says after its last."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from carpool.runtime.allocator import give_freed_memory_back, keep_freed_memory
from carpool.runtime.arrival import ArrivalClock
from carpool.runtime.deathbed import call_oneself
from carpool.runtime.digest import digest, fingerprint
from carpool.runtime.entry import load_training
from carpool.runtime.errors import NoLane
from carpool.runtime.exchange import may_be_split
from carpool.runtime.footprint import limit_memory
from carpool.runtime.mps import PERCENTAGE
from carpool.runtime.program import Program
from carpool.runtime.protocol import Begin, Done, Ready
from carpool.runtime.residency import CONTEXT
from carpool.runtime.room import most_taken
from carpool.runtime.seeding import settle
from carpool.runtime.seen import lane_note, lane_problem, look
from carpool.runtime.step_source import StepSource
from carpool.runtime.trainer import Trainer
from carpool.runtime.training import Training


def settle_in(begin: Begin, program: Program, fds: tuple[int, ...]) -> None:
    """Take the place given: log, name, cores, threads, environment and working folder."""
    for fd in fds[:1]:
        os.dup2(fd, 1)
        os.dup2(fd, 2)
    for fd in fds:
        os.close(fd)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    call_oneself(f"carpool:{begin.job}")
    # Where memory runs out, the kernel shall take a worker, which can be replaced, before the executor.
    Path("/proc/self/oom_score_adj").write_text("500")
    keep_freed_memory()
    if begin.cores:
        os.sched_setaffinity(0, begin.cores)
    torch.set_num_threads(begin.threads)
    os.environ.update(program.environment)
    os.environ.update(begin.environment)
    settle(deterministic=program.deterministic)  # before anything starts CUDA
    stand_where_asked(program)


def stand_where_asked(program: Program) -> None:
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
        source.check(batch_size, 0)


def make_trainer(
    begin: Begin, program: Program, arrival: ArrivalClock, enter: Callable[[], int] = lambda: 0
) -> Trainer:
    """Load the entry and put its training on the device; ``enter``, in between, says how much memory there is."""
    device = torch.device(begin.device)
    if not begin.memory_cap:
        _start_cuda(device, program.memory_bytes)
    training = _loaded(program)
    arrival.passed("in its entry")
    if begin.memory_cap:  # only now, because CUDA itself takes memory
        room = max(1, enter() - CONTEXT)
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
    give_freed_memory_back()  # what loading the data took: a worker holds what its steps need and no more
    arrival.passed(f"to bring it to {device}")
    return trainer


def _loaded(program: Program) -> Training:
    folder = Path(program.folder) if program.folder else None
    return as_asked(load_training(program.entry, program.args, seed=program.seed, folder=folder), program)


def as_asked(training: Training, program: Program) -> Training:
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


def take_lane(begin: Begin) -> str:
    """Start CUDA on the lane, if there is one; what was given, in words. `NoLane` if it is not what was asked for."""
    asked = begin.environment.get(PERCENTAGE)
    if asked is None:
        return ""
    device = torch.device(begin.device)
    seen = look(device)
    if problem := lane_problem(int(asked), seen):
        raise NoLane(problem)
    return lane_note(int(asked), device, seen)


def ready(trainer: Trainer, program: Program, slot_bytes: int) -> Ready:
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
        may_split=trainer.device.type == "cpu" and may_be_split(training.optimizer),
        notes=tuple(notes),
        target_loss=training.stop.target_loss,
        window=training.stop.window,
    )


def farewell(trainer: Trainer, reason: str, more: Sequence[str] = ()) -> Done:
    """What the executor has to know about a training that is over; with more for its story."""
    unsure = [f"{each} has no deterministic form: equal bits are not promised" for each in trainer.caveats.operations]
    return Done(
        step=trainer.cursor.step,
        epoch=trainer.cursor.epoch,
        loss=trainer.progress.losses[-1] if trainer.progress.losses else math.nan,
        digest=digest(trainer.training.model),
        reason=reason,
        metrics=trainer.progress.metrics,
        notes=(*trainer.notes, *unsure, *more),
        memory_bytes=most_taken(trainer.device),
    )
