"""The jobs in an executor's hands: trainings and commands by name, until they are let go."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from carpool.core.model import JobId
from carpool.runtime.command import Command, Hears, Tells
from carpool.runtime.cores import Cores
from carpool.runtime.crew import Rules
from carpool.runtime.devices import LocalDevice
from carpool.runtime.holding import HeldTraining
from carpool.runtime.inventory import Standing
from carpool.runtime.jobfolder import JobFolder
from carpool.runtime.program import Program


class Intake:
    """Who is in hand, and how they stand."""

    def __init__(self, state: Path, devices: Mapping[int, LocalDevice], grace_s: float) -> None:
        self.trainings: dict[JobId, HeldTraining] = {}
        self.commands: dict[JobId, Command] = {}
        self._state = state.absolute()
        self._devices = devices
        self._grace_s = grace_s
        self.cores = Cores()
        self._leaving: set[JobId] = set()

    def __contains__(self, job: JobId) -> bool:
        return job in self.trainings or job in self.commands

    def take(
        self, job: JobId, program: Program, rules: Rules, ears: tuple[Tells, Hears], *, resume: bool
    ) -> HeldTraining | None:
        """Take a job in; as a training, if it is one. OSError where its folder cannot be written."""
        folder = JobFolder(self._state, job)
        folder.make(resume=resume)
        folder.log()
        if program.command:
            self.commands[job] = Command(job, program, folder, self._devices, self.cores, self._grace_s, *ears)
            return None
        self.trainings[job] = HeldTraining.begin(job, program, folder, self._devices, rules, resume=resume)
        return self.trainings[job]

    def standings(self) -> dict[JobId, Standing]:
        """How all of them stand; a command makes no steps that we could keep it from."""
        found = {}
        for job, training in self.trainings.items():
            team = training.team
            found[job] = Standing(team.wish.generation, team.done, team.is_still, team.is_over)
        for job, command in self.commands.items():
            errand = command.errand
            found[job] = Standing(errand.wish.generation, errand.steps, not errand.seats, errand.is_over)
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
