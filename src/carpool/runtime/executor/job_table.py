"""Job table of an executor: its trainings and commands with their folders and shared memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from carpool.core.model import JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.host import CoreAllocator
from carpool.jobs.program import Program
from carpool.runtime.executor.client_protocol import ExecutorOptions, HeldJobStatus
from carpool.runtime.executor.command_process import CommandProcess, OnMessage, OnReports
from carpool.runtime.executor.job_folder import JobFolder
from carpool.runtime.job_state.actions import Mirror, Segment, Send
from carpool.runtime.job_state.machine import JobMachine
from carpool.runtime.job_state.state import JobState
from carpool.runtime.job_state.types import JobOptions, WorkerSlot
from carpool.runtime.job_state.update_sharding import UpdateSharding
from carpool.runtime.process.shared_memory import counted, new_counter, new_memory_file


class TrainingJob:
    """What an executor holds for one training job beside its team."""

    def __init__(self, job: JobId, program: Program, folder: JobFolder, team: JobMachine) -> None:
        self.job = job
        self.program = program
        self.folder = folder
        self.team = team
        self.by_token = False
        self.devices: dict[int, int] = {}  # worker to device
        self.counters: dict[int, int] = {}  # worker to descriptor
        self.mirrors: dict[int, int] = {}  # key to descriptor
        self.spare: list[int] = []  # descriptors to be used again: their pages are there already
        self.segment: tuple[int, int] | None = None  # key and descriptor

    @classmethod
    def begin(
        cls,
        job: JobId,
        program: Program,
        folder: JobFolder,
        devices: Mapping[int, LocalDevice],
        rules: JobOptions,
        *,
        resume: bool,
    ) -> TrainingJob:
        """A training without workers; with `resume` it goes on from what its folder holds."""
        kept, cuts, splits = (folder.kept(), folder.cuts(), folder.splits()) if resume else ([], [], [])
        state = JobState(job, devices, rules, checkpoints=kept, cuts=cuts, splits=splits)
        return cls(job, program, folder, JobMachine(state))

    def seat_on(self, device: int) -> WorkerSlot:
        """What was wished for it on a device."""
        return next((seat for seat in self.team.wish.seats if seat.device == device), WorkerSlot(device))

    def count(self, worker: int) -> None:
        """Have a counter for the steps of a new worker."""
        self.counters[worker] = new_counter(self.job)

    def counted(self, worker: int) -> int:
        """The steps that a worker has done, whether it said so or not."""
        return counted(self.counters[worker])

    @property
    def reached(self) -> int:
        """Steps done by whoever is furthest."""
        return max([self.team.done, *map(self.counted, self.counters)])

    def bury(self, worker: int) -> None:
        """A worker is gone."""
        del self.devices[worker]
        os.close(self.counters.pop(worker))

    def beside(self, action: Send) -> tuple[int, ...]:
        """The descriptors that go with a message."""
        if isinstance(action.beside, Segment):
            return (self.shared(action.beside),)
        return () if action.beside is None else (self.memory(action.beside),)

    def memory(self, mirror: Mirror) -> int:
        """The descriptor of a mirror."""
        if mirror.key not in self.mirrors:
            self.mirrors[mirror.key] = self.spare.pop() if self.spare else new_memory_file(f"mirror-{self.job}"[:200])
        return self.mirrors[mirror.key]

    def shared(self, segment: Segment) -> int:
        """The descriptor of a segment; the one before it is let go."""
        if self.segment is None or self.segment[0] != segment.key:
            self.drop_segment()
            self.segment = (segment.key, new_memory_file(f"segment-{self.job}"[:200], segment.size_bytes))
        return self.segment[1]

    def drop_segment(self) -> None:
        """No formation needs it."""
        if self.segment is not None:
            os.close(self.segment[1])
            self.segment = None

    def drop(self, mirror: Mirror, *, reusable: bool) -> None:
        """A mirror is not needed any more."""
        fd = self.mirrors.pop(mirror.key, None)
        if fd is not None and reusable and not self.spare:
            self.spare.append(fd)
        elif fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Let go of everything."""
        for fd in (*self.mirrors.values(), *self.spare, *self.counters.values()):
            os.close(fd)
        self.mirrors.clear()
        self.counters.clear()
        self.spare.clear()
        self.drop_segment()
        self.folder.close()


def job_options_of(program: Program, options: ExecutorOptions, *, has_lanes: bool) -> JobOptions:
    """What a team has to know of its program and of the executor."""
    return JobOptions(
        exact=program.exact,
        shards=program.shards,
        retries=program.retries,
        batch_size=program.batch_size,
        batch_per_device=program.batch_per_device,
        checkpoint_s=program.checkpoint_s,
        time_limit_s=program.time_limit_s,
        mirror_s=options.mirror_s,
        grace_s=options.grace_s,
        division=UpdateSharding(options.updates),
        splits=options.splits,
        sync_batchnorm=program.sync_batchnorm,
        reducer=options.reducer,
        has_lanes=has_lanes,
        cpus=program.cpus,
    )


class ExecutorJobs:
    """Who is in hand, and how they stand."""

    def __init__(self, state: Path, devices: Mapping[int, LocalDevice], grace_s: float) -> None:
        self.trainings: dict[JobId, TrainingJob] = {}
        self.commands: dict[JobId, CommandProcess] = {}
        self._state = state.absolute()
        self._devices = devices
        self._grace_s = grace_s
        self.cores = CoreAllocator()
        self._leaving: set[JobId] = set()

    def __contains__(self, job: JobId) -> bool:
        return job in self.trainings or job in self.commands

    def take(
        self, job: JobId, program: Program, rules: JobOptions, ears: tuple[OnReports, OnMessage], *, resume: bool
    ) -> TrainingJob | None:
        """Take a job in; as a training, if it is one. OSError where its folder cannot be written."""
        folder = JobFolder(self._state, job)
        folder.make(resume=resume)
        folder.log()
        if program.command:
            self.commands[job] = CommandProcess(job, program, folder, self._devices, self.cores, self._grace_s, *ears)
            return None
        self.trainings[job] = TrainingJob.begin(job, program, folder, self._devices, rules, resume=resume)
        return self.trainings[job]

    def standings(self) -> dict[JobId, HeldJobStatus]:
        """How all of them stand; a command makes no steps that we could keep it from."""
        found = {}
        for job, training in self.trainings.items():
            team = training.team
            found[job] = HeldJobStatus(team.wish.generation, team.done, team.is_still, team.is_over)
        for job, command in self.commands.items():
            errand = command.errand
            found[job] = HeldJobStatus(errand.wish.generation, errand.steps, not errand.seats, errand.is_over)
        return found

    @property
    def is_over(self) -> bool:
        """Whether no job of it has a process, or will have one."""
        return all(training.team.is_over for training in self.trainings.values()) and all(
            command.errand.is_over for command in self.commands.values()
        )

    def let_go(self, job: JobId) -> None:
        """Nobody will ask for a job again: it is dropped once it has no process left."""
        self._leaving.add(job)

    def sweep(self) -> None:
        """Drop those that can be dropped."""
        for job in list(self._leaving):
            training, command = self.trainings.get(job), self.commands.get(job)
            if training is not None and training.team.is_over:
                training.close()
                del self.trainings[job]
            elif command is not None and command.errand.is_over and command.is_buried:
                command.close()
                del self.commands[job]
            if job not in self:
                self._leaving.discard(job)
