"""Time slicing: selects the jobs that take turns on a device and requests their turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from carpool.runtime.executor.command_process import CommandProcess
from carpool.runtime.executor.context import ExecutorContext
from carpool.runtime.executor.job_table import TrainingJob
from carpool.runtime.job_state.actions import Action
from carpool.runtime.process.worker_pool import WorkerKey
from carpool.runtime.sharing.lanes import max_concurrent_jobs
from carpool.runtime.sharing.stride_scheduler import time_sliced_jobs


class TimeSlicing:
    """Lets jobs go by token where they must, and free where there is room for all of them."""

    def __init__(
        self,
        workshop: ExecutorContext,
        do: Callable[[TrainingJob, Sequence[Action]], None],
        tell: Callable[[str, TrainingJob], None],
    ) -> None:
        self._devices = workshop.devices
        self._trainings = workshop.jobs.trainings
        self._commands = workshop.jobs.commands
        self._gate = workshop.gate
        self._rota = workshop.rota
        self._has_cap = bool(workshop.options.memory_cap)
        self._do = do
        self._tell = tell

    def see_to(self, at: float) -> None:
        """Who takes turns: jobs on a device with unlike turns, or more of them than it has room for side by side."""
        seats = {job: t.team.wish.seats for job, t in self._trainings.items() if not t.team.is_over}
        # A program with a loop of its own can wait for one token, not for several.
        seats |= {job: c.errand.seats for job, c in self._commands.items() if c.errand.has_session and c.errand.is_solo}
        how = {"has_lanes": self._gate.has_lanes, "has_cap": self._has_cap}
        by_token = time_sliced_jobs(
            seats, {number: max_concurrent_jobs(d, **how) for number, d in self._devices.items()}
        )
        for job, command in self._commands.items():
            if command.errand.has_session and command.by_token != (job in by_token):
                command.take_turns(job in by_token)
        for job, training in self._trainings.items():
            if not training.team.is_over and training.by_token != (job in by_token):
                training.by_token = job in by_token
                if training.by_token and self._gate.why_not:
                    self._tell(f"jobs take turns on the GPU, without MPS: {self._gate.why_not}", training)
                self._do(training, training.team.take_turns(at, by_token=training.by_token))

    def ask(self, at: float, training: TrainingJob, who: WorkerKey, device: int) -> None:
        """A worker asks for its turn."""
        formation = training.team.formation
        if formation is None or not formation.shape.by_token or who[1] not in formation.members:
            return  # it asked before it heard that things have changed, and will rest or ask anew
        solo = formation.is_solo
        self._rota.ask(at, who, training.seat_on(device), may_take_several=solo, may_inherit=solo)

    def ask_for(self, at: float, command: CommandProcess) -> None:
        """A program with a loop of its own asks for its turn."""
        if command.by_token and command.errand.seats:
            self._rota.ask(at, (command.errand.job, 0), command.errand.seats[0], may_take_several=True)
