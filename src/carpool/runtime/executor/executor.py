"""Executor of one node: adds and removes its jobs, and carries out orders on its devices.

`JobMachine` decides what a training's workers do next, `CommandState` what a command does, and `DeviceArbiter` which
worker computes on a shared device. `TrainingWorkers` connects the first to processes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from carpool.core.messages import Fact, JobCrashed, JobFailed, Order
from carpool.core.model import JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.program import Program
from carpool.logs import log_event
from carpool.runtime.commands.command_process import CommandProcess
from carpool.runtime.executor.client_protocol import ExecutorOptions
from carpool.runtime.executor.job_guard import JobGuard
from carpool.runtime.executor.job_table import TrainingJob, job_options_of
from carpool.runtime.executor.lease import LeaseEnds
from carpool.runtime.executor.reports import HandedOver, Report, ReportBatcher, Told
from carpool.runtime.executor.training_workers import ExecutorDependencies, TrainingWorkers, WorkerHooks
from carpool.runtime.job_state.types import Target, local_first, target_of
from carpool.runtime.process.entry_check import EntryChecks
from carpool.runtime.process.launch import Launched
from carpool.runtime.process.protocol import (
    Done,
    Joined,
    Message,
    TurnRequested,
)
from carpool.runtime.sharing.lanes import max_concurrent_jobs
from carpool.runtime.sharing.stride_scheduler import time_sliced_jobs

_MAX_TICK_DELAY = 10  # ticks; after a longer delay the messages of workers have not been read yet
_log = logging.getLogger(__name__)


class Executor:
    """All jobs on the devices of one node."""

    def __init__(
        self,
        devices: Sequence[LocalDevice],
        state: Path,
        options: ExecutorOptions,
        report: Callable[[Report], None],
        dependencies: ExecutorDependencies | None = None,
    ) -> None:
        outside = dependencies or ExecutorDependencies()
        self._devices = {device.id: device for device in devices}
        self._options = options
        self._batcher = ReportBatcher(report)
        self._report = self._batcher.report
        self._clock = clock = outside.clock
        self._guard = JobGuard(self._fail_job, options.job_marker)
        hooks = WorkerHooks(self._flush, self._on_mps_change, self._send_to_command)
        self.workers = workers = TrainingWorkers(devices, state, options, self._batcher, self._guard, hooks, outside)
        self.jobs = jobs = workers.jobs
        self._trainings, self._commands = jobs.trainings, jobs.commands
        self._rejected: dict[JobId, str] = {}  # jobs that could not be added, and why
        self._ticked_at = clock()
        self.is_stopping = False
        self._leaving: set[JobId] = set()  # jobs to hand over to another executor
        self._is_suspended = False  # no client controls the jobs
        self._is_frozen = False  # commands must not compute
        self.stopped = asyncio.Event()

    async def start(self, forkserver: Launched | None = None) -> None:
        """Start; workers are forked once the fork server, launched earlier or here, has imported torch."""
        self.workers.pool.begin(forkserver)
        await self.workers.mps.start()

    @property
    def checks(self) -> EntryChecks:
        return self.workers.launcher.checks

    @property
    def broken(self) -> asyncio.Future[str]:
        """Resolves, with the reason, once no worker can be started any longer."""
        return self.workers.pool.broken

    async def close(self) -> None:
        for command in self._commands.values():
            command.kill()
        await self.workers.close()
        for command in self._commands.values():
            await command.wait()
        self.workers.arbiter.close()  # a command that exits gives up its turn
        for training in self._trainings.values():
            training.close()

    def add_job(self, job: JobId, program: Program, *, resume: bool) -> None:
        """Add a job; with ``resume`` it continues from its folder. Repeating it has no effect.

        An executor that is stopping accepts no jobs: it would fail them, as its fork server exits.
        """
        if job in self.jobs or self.is_stopping:
            return
        with self._guard.handling(job):
            try:
                self._add_job(job, program, resume=resume)
            except OSError as error:
                self._fail_job(job, f"its folder cannot be written: {error}")

    def _add_job(self, job: JobId, program: Program, *, resume: bool) -> None:
        if program.command:
            mps, run_in_fork = self.workers.mps, self.workers.pool.run_program
            self.jobs.add_command(job, program, self, run_in_fork, mps.command_environment, resume=resume)
            return
        options = job_options_of(program, self._options, has_lanes=self.workers.mps.has_lanes)
        training = self.jobs.add_training(job, program, options, resume=resume)
        self.workers.run(training, training.machine.suspend(self._clock(), suspended=self._is_suspended))

    def remove_job(self, job: JobId) -> None:
        self.jobs.forget(job)
        self._rejected.pop(job, None)
        with self._guard.handling(job):
            if job in self._trainings:
                self.workers.run(
                    self._trainings[job], self._trainings[job].machine.stop(self._clock(), checkpoint=False)
                )
            elif job in self._commands:
                self._commands[job].stop(self._clock())
        self._flush()

    def _fail_job(self, job: JobId, error: str) -> None:
        """Fail a job for an error of the executor; a job whose state machine fails, too, is abandoned."""
        training = self._trainings.get(job)
        if training is None:
            if job in self._commands:
                self._commands[job].fail(error)
            else:
                self._rejected[job] = error  # repeated with the generation of its first order
                self._batcher.emit(JobFailed(job, 0, error))
        else:
            try:
                self.workers.run(training, training.machine.fail(self._clock(), error))
            except Exception:  # noqa: BLE001 - its state is unusable
                self._abandon(training, error)
        self._flush()

    def _abandon(self, training: TrainingJob, error: str) -> None:
        state = training.state
        for worker in training.devices:
            self.workers.kill((training.job, worker))
        if not state.is_over:
            state.is_over = True
            self._batcher.emit(JobFailed(training.job, state.acks.final_generation(state.target), error))

    def hand_over(self, job: JobId) -> None:
        """Stop a job at a step boundary with its state on disk, then drop it: another executor continues it."""
        self._leaving.add(job)
        self._rejected.pop(job, None)
        with self._guard.handling(job):
            if job in self._trainings:
                self.workers.run(
                    self._trainings[job], self._trainings[job].machine.stop(self._clock(), checkpoint=True)
                )
            elif job in self._commands:
                self._commands[job].stop(self._clock())
        self._flush()

    def _finish_handovers(self) -> None:
        for job in sorted(self._leaving):
            with self._guard.handling(job):
                held, training = self.jobs.statuses().get(job), self._trainings.get(job)
                if held is None or (held.is_over and self.jobs.drop(job)):
                    self._leaving.discard(job)
                    saved = [] if training is None else [copy.step for copy in training.folder.state_copies()]
                    steps = held.steps if held is not None and training is None else max(saved, default=0)
                    self._report(HandedOver(job, steps))

    def apply_orders(self, orders: Sequence[Order]) -> None:
        """Carry out orders; those of one call take effect together."""
        at = self._clock()
        orders = [order for order in orders if order.job in self.jobs or not self.is_stopping]
        for order in orders:
            with self._guard.handling(order.job):
                self._apply_order(at, order)
        self.checks.release_others({order.job for order in orders})
        self._update_time_slicing(at)
        self._flush()

    def _apply_order(self, at: float, order: Order) -> None:
        target = local_first(target_of(order), lambda device: device not in self._devices)
        self._log_order(order.job, target)
        training = self._trainings.get(order.job)
        knows = self._devices.__contains__ if training is None else self.workers.can_reach
        unknown = [slot.device for slot in target.slots if not knows(slot.device)]
        lane_problem = self.workers.mps.lane_problem(slot.device for slot in target.slots)
        if training is not None and not unknown and (problem := self._why_not_across(training, target) or lane_problem):
            self.workers.run(training, training.machine.fail(at, problem))
        elif order.job in self._commands and not unknown and lane_problem:
            self._commands[order.job].fail(lane_problem)
        elif training is not None and not unknown:
            self.workers.run(training, training.machine.order(at, target))
        elif order.job in self._commands and not unknown:
            self._commands[order.job].order(at, target)
        else:
            self._refuse(order, unknown)

    def _why_not_across(self, training: TrainingJob, target: Target) -> str:
        """Why a job cannot run on the nodes of an order; empty if it can."""
        if not training.state.spans_nodes([slot.device for slot in target.slots]):
            return ""
        if training.program.sync_batchnorm:
            return "sync_batchnorm = true needs shared memory, and the job was assigned devices of several nodes"
        if self._options.memory_cap:
            return "under --memory-cap a job runs on one node, and it was assigned devices of several"
        if training.state.is_remote(target.slots[0].device):
            return "the job was assigned devices of other nodes only"
        return ""

    def _refuse(self, order: Order, unknown: Sequence[int]) -> None:
        """Report an order that cannot be carried out; devices of another node are not the job's fault."""
        where = f"order {order.generation} for job {order.job!r}"
        if unknown and order.job in self.jobs:
            done = float(self.jobs.statuses()[order.job].steps)
            error = f"{where}: device {unknown[0]} is not one of this executor"
            self._batcher.emit(JobCrashed(order.job, order.generation, done, error))
        else:
            error = self._rejected.get(order.job) or f"{where}: unknown job"
            self._batcher.emit(JobFailed(order.job, order.generation, error))

    def _log_order(self, job: JobId, target: Target) -> None:
        devices = [slot.device for slot in target.slots]
        shares = [slot.fraction for slot in target.slots]
        log_event(_log, "order", job=job, generation=target.generation, devices=devices, shares=shares)

    def stop(self, *, checkpoint: bool) -> None:
        """Stop all jobs at a step boundary; `stopped` is set when their processes have exited."""
        at = self._clock()
        self.is_stopping = True
        for training in list(self._trainings.values()):
            with self._guard.handling(training.job):
                self._stop(training, checkpoint=checkpoint)
        for command in list(self._commands.values()):
            with self._guard.handling(command.state.job):
                command.stop(at)
        self._flush()

    def _stop(self, training: TrainingJob, *, checkpoint: bool) -> None:
        self.workers.run(training, training.machine.stop(self._clock(), checkpoint=checkpoint))

    def suspend(self, *, suspended: bool) -> None:
        """Halt all trainings at a step boundary, with their states on disk, or let them continue."""
        if suspended != self._is_suspended:
            log_event(_log, "jobs_suspended" if suspended else "jobs_resumed", jobs=len(self._trainings))
        self._is_suspended = suspended
        for training in list(self._trainings.values()):
            with self._guard.handling(training.job):
                self.workers.run(training, training.machine.suspend(self._clock(), suspended=suspended))
        self._flush()

    def limit(self, ends: LeaseEnds) -> None:
        """Let workers stop by themselves at the end of the lease, even if this process hangs or is stopped."""
        self.jobs.limit(ends)

    def freeze(self, *, frozen: bool) -> None:
        """Stop the processes of all commands, also of later ones, or let them continue."""
        self._is_frozen = frozen
        if frozen:
            self.workers.hosted.end_all()
        for command in list(self._commands.values()):
            with self._guard.handling(command.state.job):
                command.freeze(frozen=frozen)

    def tick(self) -> None:
        at = self._clock()
        was_delayed = at - self._ticked_at > _MAX_TICK_DELAY * self._options.tick_s
        self._ticked_at = at
        for training in list(self._trainings.values()):
            with self._guard.handling(training.job):
                self.workers.run(training, training.machine.tick(at))
                self._look_after_files(training.job)
        for command in list(self._commands.values()):
            with self._guard.handling(command.state.job):
                command.tick(at)
                if self._is_frozen:
                    command.freeze(frozen=True)
                self._look_after_files(command.state.job)
        for job, words in self.jobs.memory_warnings(at, self.workers.pool.pid_of):
            if words:
                self._report(Told(job, words, is_warning=True))
        self.workers.launcher.tick()
        self.workers.arbiter.tick()
        self.jobs.drop_forgotten()
        if self._leaving:
            self._finish_handovers()
        if not was_delayed:
            self.workers.kill_hung(at)
        self._flush()

    def _look_after_files(self, job: JobId) -> None:
        for problem in self.jobs.trim_log(job, self._options.log_bytes):
            self._report(Told(job, problem))

    def _flush(self) -> None:
        self._batcher.flush()
        if self.is_stopping and self.jobs.is_over:
            self.stopped.set()

    def _update_time_slicing(self, at: float) -> None:
        slots = {job: t.state.target.slots for job, t in self._trainings.items() if not t.state.is_over}
        # A job across nodes is never time-sliced: it would wait for turns on several machines at once.
        slots = {job: own for job, own in slots.items() if all(slot.device in self._devices for slot in own)}
        # A program with its own loop can wait for one turn, not for several.
        commands = {job: command.state for job, command in self._commands.items() if command.state.has_session}
        slots |= {job: state.slots for job, state in commands.items() if state.is_solo}
        has_lanes, has_cap = self.workers.mps.has_lanes, bool(self._options.memory_cap)
        limits = {
            number: max_concurrent_jobs(self._devices.values(), device, has_lanes=has_lanes, has_cap=has_cap)
            for number, device in self._devices.items()
        }
        time_sliced = time_sliced_jobs(slots, limits)
        for job in commands:
            if self._commands[job].time_sliced != (job in time_sliced):
                self._commands[job].set_time_sliced(time_sliced=job in time_sliced)
        for job, training in self._trainings.items():
            if not training.state.is_over and training.state.time_sliced != (job in time_sliced):
                self._set_time_sliced(at, training, time_sliced=job in time_sliced)

    def _set_time_sliced(self, at: float, training: TrainingJob, *, time_sliced: bool) -> None:
        if time_sliced and self.workers.mps.unavailable:
            self.workers.note_if_on_gpu(
                training, f"jobs on the GPU are time-sliced without MPS: {self.workers.mps.unavailable}"
            )
        self.workers.run(training, training.machine.set_time_sliced(at, time_sliced=time_sliced))

    def _send_to_command(self, job: JobId, message: Message) -> bool:
        if job not in self._commands:
            return False
        self._commands[job].send(message)
        return True

    def on_command(self, command: CommandProcess, facts: Sequence[Fact], reports: Sequence[Report]) -> None:
        for report in reports:
            self._report(report)
        for fact in facts:
            self._batcher.emit(fact)
        self._flush()
        if not command.state.slots:
            self.workers.arbiter.remove(self._clock(), (command.state.job, 0))

    def on_session_message(self, command: CommandProcess, message: Message) -> None:
        at, key = self._clock(), (command.state.job, 0)
        if isinstance(message, Joined):
            self._update_time_slicing(at)
        elif isinstance(message, TurnRequested):
            if command.time_sliced and command.state.slots:
                self.workers.arbiter.request_turn(at, key, command.state.slots[0], multi_step=True)
        elif isinstance(message, Done):
            self.workers.arbiter.remove(at, key)
        self._flush()

    def _on_mps_change(self) -> None:
        self._update_time_slicing(self._clock())
        self.workers.launcher.start_admitted()
        self._flush()
