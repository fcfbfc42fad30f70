"""What an executor holds for one training: its team, its folder, and its memory files."""

from __future__ import annotations

import os
from collections.abc import Mapping

from carpool.core.model import JobId
from carpool.runtime.actions import Mirror, Segment, Send
from carpool.runtime.counter import counted, new_counter
from carpool.runtime.crew import Rules, Seat
from carpool.runtime.devices import LocalDevice
from carpool.runtime.division import Division
from carpool.runtime.jobfolder import JobFolder
from carpool.runtime.memory import new_memory
from carpool.runtime.program import Program
from carpool.runtime.team import Team
from carpool.runtime.team_state import TeamState
from carpool.runtime.wire import ExecutorOptions


class HeldTraining:
    """What an executor holds for one training job beside its team."""

    def __init__(self, job: JobId, program: Program, folder: JobFolder, team: Team) -> None:
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
        rules: Rules,
        *,
        resume: bool,
    ) -> HeldTraining:
        """A training without workers; with `resume` it goes on from what its folder holds."""
        kept, cuts, splits = (folder.kept(), folder.cuts(), folder.splits()) if resume else ([], [], [])
        state = TeamState(job, devices, rules, checkpoints=kept, cuts=cuts, splits=splits)
        return cls(job, program, folder, Team(state))

    def seat_on(self, device: int) -> Seat:
        """What was wished for it on a device."""
        return next((seat for seat in self.team.wish.seats if seat.device == device), Seat(device))

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
            self.mirrors[mirror.key] = self.spare.pop() if self.spare else new_memory(f"mirror-{self.job}"[:200])
        return self.mirrors[mirror.key]

    def shared(self, segment: Segment) -> int:
        """The descriptor of a segment; the one before it is let go."""
        if self.segment is None or self.segment[0] != segment.key:
            self.drop_segment()
            self.segment = (segment.key, new_memory(f"segment-{self.job}"[:200], segment.size_bytes))
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


def rules_of(program: Program, options: ExecutorOptions, *, has_lanes: bool) -> Rules:
    """What a team has to know of its program and of the executor."""
    return Rules(
        exact=program.exact,
        shards=program.shards,
        retries=program.retries,
        batch_size=program.batch_size,
        batch_per_device=program.batch_per_device,
        checkpoint_s=program.checkpoint_s,
        time_limit_s=program.time_limit_s,
        mirror_s=options.mirror_s,
        grace_s=options.grace_s,
        division=Division(options.updates),
        splits=options.splits,
        sync_batchnorm=program.sync_batchnorm,
        reducer=options.reducer,
        has_lanes=has_lanes,
        cpus=program.cpus,
    )
