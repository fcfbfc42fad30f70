"""Job table of an executor: its trainings and commands with their folders and shared memory."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

from carpool.core.model import JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.host import CoreAllocator
from carpool.jobs.program import Program
from carpool.runtime.commands.command_process import CommandListener, CommandProcess, LaneEnvironment
from carpool.runtime.commands.command_start import RunInFork
from carpool.runtime.commands.command_state import Beside
from carpool.runtime.executor.client_protocol import ExecutorOptions, HeldJobStatus
from carpool.runtime.executor.job_folder import JobFolder
from carpool.runtime.executor.lease import LeaseEnds
from carpool.runtime.job_state.actions import BatchSplit, MicroBatchLimit, Mirror, Segment, Send
from carpool.runtime.job_state.machine import JobMachine
from carpool.runtime.job_state.state import JobState
from carpool.runtime.job_state.types import JobOptions, WorkerSlot
from carpool.runtime.job_state.update_sharding import UpdateSharding
from carpool.runtime.memory.declared_memory import DeclaredMemory, resident_bytes
from carpool.runtime.memory.oom_kills import OomKills
from carpool.runtime.process.protocol import Proceed
from carpool.runtime.process.shared_memory import (
    is_before,
    limit_worker,
    new_memory_file,
    new_step_counter,
    read_step_counter,
)
from carpool.runtime.process.worker_pool import WorkerKey
from carpool.runtime.state.mirror_file import MirrorFiles

_MEASURE_S = 5.0  # between comparisons of used with declared memory


class TrainingJob:
    """A training job: its state machine and the memory files that the executor owns for it."""

    def __init__(self, job: JobId, program: Program, folder: JobFolder, machine: JobMachine) -> None:
        self.job = job
        self.program = program
        self.folder = folder
        self.machine = machine
        self.state = machine.state
        self.devices: dict[int, int] = {}  # by worker
        self._counters: dict[int, int] = {}  # worker to descriptor
        self._ends = LeaseEnds()
        self._unwritten: list[BatchSplit | MicroBatchLimit] = []
        self._mirrors: dict[int, int] = {}  # key to descriptor
        self._mirror_files = MirrorFiles(may_write=self.may_write)
        self._checkpoints: int | None = None  # descriptor of its folder, as it was when the job began here
        self._spare: list[int] = []  # descriptors to reuse: their pages are already allocated
        self._segment: tuple[int, int] | None = None  # key and descriptor
        self._rendezvous: tuple[int, socket.socket] | None = None  # epoch across nodes, and where its ranks meet

    def slot_on(self, device: int) -> WorkerSlot:
        return next((slot for slot in self.state.target.slots if slot.device == device), WorkerSlot(device))

    def add_worker(self, worker: int, device: int) -> None:
        self.devices[worker] = device
        self._counters[worker] = new_step_counter(self.job)
        self._limit_worker(worker)

    def limit(self, ends: LeaseEnds) -> None:
        """Let no worker begin a step, and nothing write into the folder, after the end of the lease."""
        self._ends = ends
        for worker in self._counters:
            self._limit_worker(worker)
        self._write_records()

    def _limit_worker(self, worker: int) -> None:
        is_across = any(self.state.is_remote(device) for device in self.devices.values())
        steps_until = self._ends.steps_across_nodes if is_across else self._ends.steps
        limit_worker(self._counters[worker], steps_until, self._ends.writes)

    def may_write(self) -> bool:
        """Whether no other machine can be running the job by now."""
        return is_before(self._ends.writes)

    def write(self, record: BatchSplit | MicroBatchLimit) -> None:
        """Write a record to the folder; without a lease, once it is renewed."""
        self._unwritten.append(record)
        self._write_records()

    def _write_records(self) -> None:
        while self._unwritten and self.may_write():
            with contextlib.suppress(OSError):
                self.folder.write(self._unwritten.pop(0))

    def remove_worker(self, worker: int) -> None:
        del self.devices[worker]
        os.close(self._counters.pop(worker))
        if not self.devices:
            self._drop_segment()  # a job without devices only needs memory for its mirror
            self._close_rendezvous()

    def counter(self, worker: int) -> int:
        """The descriptor of a worker's step counter."""
        return self._counters[worker]

    def steps_of(self, worker: int) -> int:
        """Steps that a worker has done, reported or not."""
        return read_step_counter(self._counters[worker])

    @property
    def max_steps(self) -> int:
        return max([self.state.steps_done, *map(self.steps_of, self._counters)])

    def descriptors_for(self, action: Send) -> tuple[int, ...]:
        if isinstance(action.memory, Segment):
            return (self._segment_fd(action.memory),)
        return () if action.memory is None else (self._mirror_fd(action.memory),)

    def add_rendezvous(self, proceed: Proceed, address: str) -> tuple[Proceed, tuple[int, ...]]:
        """Add the address of rank 0's TCP store to the `Proceed` of an epoch across nodes; rank 0 gets the socket."""
        if self._rendezvous is None or self._rendezvous[0] != proceed.epoch:
            self._close_rendezvous()
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._rendezvous = proceed.epoch, socket.create_server((address, 0), family=family)
        listener = self._rendezvous[1]
        store = f"{address}:{listener.getsockname()[1]}"
        return replace(proceed, store=store, address=address), (listener.fileno(),) if proceed.rank == 0 else ()

    def _close_rendezvous(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous[1].close()
            self._rendezvous = None

    def _mirror_fd(self, mirror: Mirror) -> int:
        if mirror.key not in self._mirrors:
            fd = self._spare.pop() if self._spare else new_memory_file(f"mirror-{self.job}"[:200])
            self._mirrors[mirror.key] = fd
        return self._mirrors[mirror.key]

    def _segment_fd(self, segment: Segment) -> int:
        if self._segment is None or self._segment[0] != segment.key:
            self._drop_segment()
            self._segment = (segment.key, new_memory_file(f"segment-{self.job}"[:200], segment.size_bytes))
        return self._segment[1]

    def _drop_segment(self) -> None:
        if self._segment is not None:
            os.close(self._segment[1])
            self._segment = None

    def copy_mirror(self, mirror: Mirror) -> None:
        """Copy a mirror to the folder of checkpoints; skipped if the disk has no room."""
        if self._checkpoints is None and self.may_write():
            with contextlib.suppress(OSError):
                self._checkpoints = self.folder.open_checkpoints()
        if self._checkpoints is not None and mirror.key in self._mirrors:
            self._mirror_files.copy(self._mirrors[mirror.key], self._checkpoints)

    def drop_mirror(self, mirror: Mirror, *, reusable: bool) -> None:
        fd = self._mirrors.pop(mirror.key, None)
        if fd is not None and reusable and not self._spare:
            self._spare.append(fd)
        elif fd is not None:
            os.close(fd)

    def close(self) -> None:
        for fd in (*self._mirrors.values(), *self._spare, *self._counters.values()):
            os.close(fd)
        self._mirrors.clear()
        self._counters.clear()
        self._spare.clear()
        self._drop_segment()
        self._close_rendezvous()
        if self._checkpoints is not None:
            os.close(self._checkpoints)
            self._checkpoints = None
        self.folder.close()


def job_options_of(program: Program, options: ExecutorOptions, *, has_lanes: bool) -> JobOptions:
    """The options of a job's state machine."""
    return JobOptions(
        exact=program.exact,
        shards=program.shards,
        retries=program.retries,
        batch_size=program.batch_size,
        batch_per_device=program.batch_per_device,
        checkpoint_s=program.checkpoint_s,
        time_limit_s=program.time_limit_s,
        mirror_s=options.mirror_s,
        copies_mirrors=options.copies_mirrors,
        grace_s=options.grace_s,
        update_sharding=UpdateSharding(options.updates),
        micro_batching=options.splits,
        sync_batchnorm=program.sync_batchnorm,
        reducer=options.reducer,
        has_lanes=has_lanes,
        cpus=program.cpus,
    )


class JobTable:
    """Jobs that an executor holds."""

    def __init__(
        self, state: Path, devices: Mapping[int, LocalDevice], grace_s: float, oom_kills: OomKills | None = None
    ) -> None:
        self.trainings: dict[JobId, TrainingJob] = {}
        self.commands: dict[JobId, CommandProcess] = {}
        self.cores = CoreAllocator()
        self._state = state.absolute()
        self._devices = devices
        self._grace_s = grace_s
        self._oom_kills = oom_kills or OomKills()
        self._declared = DeclaredMemory()
        self._measured_at = -inf
        self._forgotten: set[JobId] = set()
        self._folders: dict[JobId, JobFolder] = {}
        self._ends = LeaseEnds()

    def __contains__(self, job: JobId) -> bool:
        return job in self.trainings or job in self.commands

    def memory_warnings(self, at: float, pid_of: Callable[[WorkerKey], int]) -> Iterator[tuple[JobId, str]]:
        """Jobs that use more memory than they declared, each once; reads the kernel's figures every few seconds.

        The largest worker of a training is compared with what was declared for one device.
        """
        if at - self._measured_at < _MEASURE_S:
            return
        self._measured_at = at
        for job, training in self.trainings.items():
            if self._declared.is_of_interest(job, training.program):
                slots = training.state.target.slots
                used_bytes = training.state.memory_bytes  # of its device
                if self._gpus_of(slot.device for slot in slots):
                    pids = [pid_of((job, worker)) for worker in training.devices]
                    used_bytes = max((resident_bytes([pid]) for pid in pids if pid), default=0)
                yield job, self._warning(job, training.program, used_bytes, slots)
        for job, command in self.commands.items():
            if self._declared.is_of_interest(job, command.program):
                yield job, self._warning(job, command.program, command.resident_bytes(), command.state.slots)

    def _warning(self, job: JobId, program: Program, used_bytes: int, slots: Sequence[WorkerSlot]) -> str:
        on_gpu = bool(self._gpus_of(slot.device for slot in slots))
        num_devices = len(slots) if program.command else 1
        return self._declared.warning(job, program, used_bytes, num_devices, on_gpu=on_gpu)

    def add_command(
        self,
        job: JobId,
        program: Program,
        listener: CommandListener,
        run_in_fork: RunInFork,
        lane_environment: LaneEnvironment,
        *,
        resume: bool,
    ) -> None:
        """Add a command. OSError if its folder cannot be written."""
        folder = self._make_folder(job, resume=resume)
        self.commands[job] = CommandProcess(
            job,
            program,
            folder,
            self._devices,
            self.cores,
            self._grace_s,
            listener,
            run_in_fork=run_in_fork,
            lane_environment=lane_environment,
            oom_kills=self._oom_kills,
            look_beside=partial(self._beside, job),
        )

    def _beside(self, job: JobId, slots: Sequence[WorkerSlot]) -> Beside:
        """The other jobs with memory on the GPUs of a command's slots."""
        command = self.commands[job].state
        gpus = self._gpus_of(slot.device for slot in slots)
        others = [
            other.state
            for other in self.commands.values()
            if other.state is not command
            and other.state.uses_devices
            and gpus & self._gpus_of(slot.device for slot in other.state.target.slots)
        ]
        has_training = any(gpus & self._gpus_of(training.devices.values()) for training in self.trainings.values())
        return Beside(bool(others) or has_training, any(state.runs_alone for state in others))

    def _gpus_of(self, devices: Iterable[int]) -> set[int]:
        """The GPUs of devices; several devices may be lanes of one."""
        found = [self._devices[device].cuda for device in devices if device in self._devices]
        return {cuda for cuda in found if cuda is not None}

    def add_training(self, job: JobId, program: Program, options: JobOptions, *, resume: bool) -> TrainingJob:
        """Add a training; with ``resume`` it continues from its folder. OSError if that cannot be written."""
        folder = self._make_folder(job, resume=resume)
        state = JobState(
            job,
            self._devices,
            options,
            checkpoints=folder.state_copies(),
            batch_splits=folder.batch_splits(),
            micro_batch_limits=folder.micro_batch_limits(),
        )
        self.trainings[job] = TrainingJob(job, program, folder, JobMachine(state))
        self.trainings[job].limit(self._ends)
        return self.trainings[job]

    def limit(self, ends: LeaseEnds) -> None:
        """Let no job begin a step or write into its folder after the end of the lease."""
        self._ends = ends
        for training in self.trainings.values():
            training.limit(ends)

    def _make_folder(self, job: JobId, *, resume: bool) -> JobFolder:
        folder = JobFolder(self._state, job)
        folder.make(resume=resume)
        folder.log()
        self._folders[job] = folder
        return folder

    def trim_log(self, job: JobId, kept_bytes: int) -> list[str]:
        """Discard the oldest part of a job's log if it is too long. Returns notes about its files for its story."""
        folder = self._folders.get(job)
        if folder is None:
            return []
        folder.trim_log(kept_bytes)
        return folder.take_problems()

    def statuses(self) -> dict[JobId, HeldJobStatus]:
        found = {}
        for job, training in self.trainings.items():
            state = training.state
            found[job] = HeldJobStatus(state.target.generation, state.steps_done, state.is_idle, state.is_over)
        for job, command in self.commands.items():
            running = command.state
            found[job] = HeldJobStatus(running.target.generation, running.steps, not running.slots, running.is_over)
        return found

    @property
    def is_over(self) -> bool:
        """Whether no job has a process, or will have one."""
        return all(training.state.is_over for training in self.trainings.values()) and all(
            command.state.is_over for command in self.commands.values()
        )

    def forget(self, job: JobId) -> None:
        """Drop a job once it has no process left."""
        self._forgotten.add(job)

    def drop_forgotten(self) -> None:
        for job in list(self._forgotten):
            if self.drop(job):
                self._forgotten.discard(job)

    def drop(self, job: JobId) -> bool:
        """Drop a job if it has no process left. Returns whether it is gone."""
        training, command = self.trainings.get(job), self.commands.get(job)
        if training is not None and training.state.is_over:
            training.close()
            del self.trainings[job]
        elif command is not None and command.state.is_over and command.has_exited:
            command.close()
            del self.commands[job]
        if job in self:
            return False
        self._folders.pop(job, None)
        return True
