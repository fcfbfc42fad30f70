"""Executor of one node: carries out orders on its devices and runs the actions of its jobs' state machines.

What a training's workers do next is decided by `team.Team`, what a command does by `errand.Errand`, who computes on a
shared device by `turns.Turns` (held by `rota.Rota`): all of them pure. This file carries their wishes out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from carpool.core.messages import Fact, JobFailed, Order
from carpool.core.model import JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.program import Program
from carpool.runtime.executor.client_protocol import ExecutorOptions
from carpool.runtime.executor.command_process import CommandProcess
from carpool.runtime.executor.context import ExecutorContext, ExecutorDependencies
from carpool.runtime.executor.exclusive_access import ExclusiveAccess
from carpool.runtime.executor.job_table import ExecutorJobs, TrainingJob, job_options_of
from carpool.runtime.executor.reports import Evaluation, Report, ReportBatcher, Sized, Told
from carpool.runtime.job_state.actions import (
    Action,
    Drop,
    Emit,
    Ended,
    Kill,
    ReleaseExclusive,
    RequestExclusive,
    Send,
    Start,
    Stopped,
    Tell,
    Write,
)
from carpool.runtime.job_state.types import as_target
from carpool.runtime.process.launcher import Launcher
from carpool.runtime.process.protocol import (
    AdmissionRequested,
    Alive,
    Contributed,
    Done,
    Evaluated,
    Halted,
    Joined,
    Message,
    Proceed,
    Ready,
    TurnRequested,
    WorkerFailed,
)
from carpool.runtime.process.worker_pool import WorkerKey
from carpool.runtime.sharing.device_arbiter import ArbiterMessage, DeviceArbiter
from carpool.runtime.sharing.mps_admission import MpsAdmission, PendingWorker
from carpool.runtime.sharing.mps_daemon import is_mps_error
from carpool.runtime.sharing.time_slicing import TimeSlicing

_NEEDS_NO_TOKEN = (Halted, Done, WorkerFailed)  # nor the one it may still be waiting for


class Executor:
    """All jobs on the devices of one node."""

    def __init__(
        self,
        devices: Sequence[LocalDevice],
        state: Path,
        options: ExecutorOptions,
        report: Callable[[Report], None],
        means: ExecutorDependencies | None = None,
    ) -> None:
        means = means or ExecutorDependencies()
        self._devices = {device.id: device for device in devices}
        self._options = options
        self._reporting = ReportBatcher(report)
        self._report = self._reporting.report
        self._emit = self._reporting.emit
        self._clock = clock = means.clock
        self._staff = means.hire(self, clock)
        self.jobs = ExecutorJobs(state, self._devices, options.grace_s)
        self._trainings, self._commands = self.jobs.trainings, self.jobs.commands
        self._rota = DeviceArbiter(devices, options, self._say)
        self._solitude = ExclusiveAccess(self._trainings, self._do, clock)
        self._gate = MpsAdmission(
            devices, wanted=options.mps, on_change=self._reopen, tell=self._tell_sharers, make=means.make_mps
        )
        workshop = ExecutorContext(
            self._devices, options, self.jobs, self._staff, self._gate, self._rota, self._report, clock
        )
        self._entrance = Launcher(workshop, means.ask)
        self._alternation = TimeSlicing(workshop, self._do, self._tell_sharers)
        self._ticked_at = clock()
        self._stopping: bool | None = None
        self._waits = False  # for somebody who decides
        self.stopped = asyncio.Event()

    async def start(self) -> None:
        """Be able to start workers."""
        await asyncio.gather(self._staff.start(), self._gate.start())

    @property
    def broken(self) -> asyncio.Future[str]:
        """Done when no worker can be started any more."""
        return self._staff.broken

    async def end(self) -> None:
        """End every process and let go of everything."""
        for command in self._commands.values():
            command.kill()
        await self._staff.stop()
        await self._gate.stop()
        self._rota.close()
        for command in self._commands.values():
            await command.gone()
        for training in self._trainings.values():
            training.close()

    # -- orders -------------------------------------------------------------------------------------------------------

    def introduce(self, job: JobId, program: Program, *, resume: bool) -> None:
        """Make a job known; a second time it changes nothing."""
        if job in self.jobs:
            return
        ears = (self._on_moves, self._on_session)
        try:
            rules = job_options_of(program, self._options, has_lanes=self._gate.has_lanes)
            training = self.jobs.take(job, program, rules, ears, resume=resume)
            if training is not None:
                self._do(training, training.team.wait(self._clock(), waits=self._waits))
        except OSError as error:
            self._emit(JobFailed(job, 0, f"its folder cannot be written: {error}"))
            self._flush()

    def forget(self, job: JobId) -> None:
        """A job is over for whoever decides: end what is left of it, and let go."""
        self.jobs.let_go(job)
        if job in self._trainings:
            self._do(self._trainings[job], self._trainings[job].team.stop(self._clock(), checkpoint=False))
        elif job in self._commands:
            self._commands[job].stop(self._clock())
        self._flush()

    def carry(self, orders: Sequence[Order]) -> None:
        """Take orders; those of one call are taken together."""
        at = self._clock()
        for order in orders:
            wish = as_target(order)
            unknown = [seat.device for seat in wish.seats if seat.device not in self._devices]
            if order.job in self._trainings and not unknown:
                training = self._trainings[order.job]
                self._do(training, training.team.order(at, wish))
            elif order.job in self._commands and not unknown:
                self._commands[order.job].order(at, wish)
            else:
                what = f"device {unknown[0]} is not here" if unknown else "no such job was introduced"
                self._emit(JobFailed(order.job, order.generation, f"an order for {order.job!r}: {what}"))
        self._alternation.see_to(at)
        self._flush()

    def stop(self, *, checkpoint: bool) -> None:
        """Halt all jobs at a boundary; `stopped` is set when they are gone."""
        at = self._clock()
        self._stopping = checkpoint
        for training in list(self._trainings.values()):
            self._do(training, training.team.stop(at, checkpoint=checkpoint))
        for command in list(self._commands.values()):
            command.stop(at)
        self._flush()

    def wait(self) -> None:
        """Let all trainings stand still at a boundary, their states on disk, until `proceed`."""
        self._set_waiting(waits=True)

    def proceed(self) -> None:
        """Let all trainings go on: somebody decides again."""
        self._set_waiting(waits=False)

    def _set_waiting(self, *, waits: bool) -> None:
        self._waits = waits
        for training in list(self._trainings.values()):
            self._do(training, training.team.wait(self._clock(), waits=waits))
        self._flush()

    # -- what happens -------------------------------------------------------------------------------------------------

    def heard(self, who: WorkerKey, message: Message) -> None:
        """A worker said something."""
        if isinstance(message, Alive) or self._entrance.heard(who, message):
            return
        job, worker = JobId(who[0]), who[1]
        training = self._trainings[job]
        at = self._clock()
        device = training.devices[worker]
        if isinstance(message, TurnRequested):
            self._alternation.ask(at, training, who, device)
            return
        if isinstance(message, AdmissionRequested):
            self._rota.arrive(at, who, training.seat_on(device))
            return
        if isinstance(message, ArbiterMessage):
            self._rota.heard(at, device, who, message)
            return
        if isinstance(message, Contributed):
            self._rota.give_back(at, device, who)
        elif isinstance(message, _NEEDS_NO_TOKEN) and not (
            isinstance(message, WorkerFailed) and message.kind == "disk"
        ):
            self._rota.withdraw(at, device, who)
        if isinstance(message, WorkerFailed) and message.kind == "device" and self._gate.has_lanes:
            self._faulted(at, device, who, message.error)
            return
        if isinstance(message, WorkerFailed) and message.kind == "lane":
            self._gate.missed(message.error)
        is_first = isinstance(message, Ready) and training.team.ready is None
        self._do(training, training.team.said(at, worker, message))
        if is_first and isinstance(message, Ready):
            target = message.target_loss, message.window
            self._report(Sized(job, message.total_steps, message.batch_size, message.num_samples, *target))
        elif isinstance(message, Evaluated):
            self._report(Evaluation(job, message.step, message.metrics))
        if self._gate.progressed(device, job, training.team.done):
            self._entrance.let_in()
        self._rota.grant(at, device)
        self._flush()

    def ended(self, who: WorkerKey, why: str) -> None:
        """A worker's process is gone."""
        if self._entrance.ended(who, why):
            return
        training = self._trainings[JobId(who[0])]
        at = self._clock()
        device, steps = training.devices[who[1]], training.counted(who[1])
        training.bury(who[1])
        self._rota.leave(at, device, who)
        if not training.devices:
            training.drop_segment()  # a job that is off its devices takes no memory but its mirror
        self._gate.gone(device, who)
        self._do(training, training.team.died(at, who[1], why, steps))
        self._entrance.let_in()
        self._rota.grant(at, device)
        self._flush()

    def tick(self) -> None:
        """Look at the clock."""
        at = self._clock()
        was_late = at - self._ticked_at > 10 * self._options.tick_s
        self._ticked_at = at
        for training in list(self._trainings.values()):
            self._do(training, training.team.tick(at))
        for command in list(self._commands.values()):
            command.tick(at)
        self._entrance.tick()
        self._rota.tick()
        self.jobs.sweep()
        if not was_late:  # else what the workers said meanwhile has not been read yet
            for job, worker in self._staff.silent_for(self._options.hang_s):
                if not self._entrance.silent((job, worker)):
                    training = self._trainings[JobId(job)]
                    self._do(training, training.team.silent(at, worker, training.counted(worker)))
        self._flush()

    # -- what is to be done -------------------------------------------------------------------------------------------

    def _do(self, training: TrainingJob, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Start(worker, device, threads, lane):
                    training.devices[worker] = device
                    training.count(worker)
                    self._entrance.admit(PendingWorker((training.job, worker), device, lane, threads))
                case Send():
                    self._send(training, action)
                case Kill(worker):
                    self._kill((training.job, worker))
                case Drop(mirror, reusable):
                    training.drop(mirror, reusable=reusable)
                case Tell(words):
                    self._report(Told(training.job, words))
                case Emit(fact):
                    self._emit(fact)
                case RequestExclusive(device, clears):
                    (self._entrance.make_room if clears else self._entrance.keep_quiet)(device)
                    self._solitude.ask(training.job, action)
                case ReleaseExclusive():
                    self._solitude.leave(training.job)
                case Write(what):
                    with contextlib.suppress(OSError):
                        training.folder.write(what)
                case Ended() | Stopped():
                    self._conclude(training, action)
        self._solitude.see_to()

    def _kill(self, key: WorkerKey) -> None:
        if self._gate.give_up(key):  # it never started; its team hears of its end as of any other
            asyncio.get_running_loop().call_soon(self.ended, key, "it had not been started")
        else:
            self._staff.kill(key)

    def _send(self, training: TrainingJob, action: Send) -> None:
        key = (training.job, action.worker)
        if isinstance(action.message, Proceed):  # it will ask anew
            self._rota.begins_anew(self._clock(), training.devices[action.worker], key)
        self._staff.send(key, action.message, training.beside(action))

    def _conclude(self, training: TrainingJob, end: Ended | Stopped) -> None:
        if isinstance(end, Ended):
            self._report(end.outcome(training.job))
        if words := self._rota.story(training.job):
            self._report(Told(training.job, words))
        self._gate.over(training.job)
        training.close()

    def _on_moves(self, command: CommandProcess, facts: Sequence[Fact], reports: Sequence[Report]) -> None:
        for report in reports:
            self._report(report)
        for fact in facts:
            self._emit(fact)
        self._flush()
        if not command.errand.seats:
            self._rota.forget(self._clock(), (command.errand.job, 0))

    def _on_session(self, command: CommandProcess, message: Message) -> None:
        """A program with a loop of its own said something."""
        at, job = self._clock(), command.errand.job
        if isinstance(message, Joined):
            self._alternation.see_to(at)
        elif isinstance(message, TurnRequested):
            self._alternation.ask_for(at, command)
        elif isinstance(message, Done):
            self._rota.forget(at, (job, 0))
        self._flush()

    def _flush(self) -> None:
        """All that happened at this instant has been seen to."""
        self._reporting.flush()
        if self._stopping is not None and self.jobs.is_over:
            self.stopped.set()

    def _say(self, who: WorkerKey, message: Message) -> None:
        job = JobId(who[0])
        if job in self._commands:
            self._commands[job].send(message)
        else:
            self._staff.send(who, message)

    # -- lanes --------------------------------------------------------------------------------------------------------

    def _faulted(self, at: float, device: int, who: WorkerKey, error: str) -> None:
        """A GPU failed under one worker: with MPS, under all that are on it."""
        if self._gate.is_leaving(device, who):
            return
        here, counts = self._entrance.fault(device, error)
        how = f"lost its GPU ({error})" if counts else f"was on a GPU that failed under all of its jobs ({error})"
        for training, worker in here:
            steps = training.counted(worker)
            self._do(training, training.team.faulted(at, worker, how, counts=counts, steps=steps))
        if is_mps_error(error):
            self._gate.missed(error)
        self._flush()

    def _reopen(self) -> None:
        """The gate has opened, or there are no lanes any more."""
        self._alternation.see_to(self._clock())
        self._entrance.let_in()
        self._flush()

    def _tell_sharers(self, words: str, *jobs: TrainingJob) -> None:
        """Say something to all jobs, or to some, that have a worker on a GPU."""
        for training in jobs or self._trainings.values():
            if any(self._devices[device].cuda is not None for device in training.devices.values()):
                self._report(Told(training.job, words))
