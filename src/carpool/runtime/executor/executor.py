"""Executor of one node: carries out orders on its devices and runs the actions of its jobs' state machines.

What a training's workers do next is decided by `JobMachine`, what a command does by `CommandState`, and which worker
computes on a shared device by `DeviceArbiter`. This class connects them to processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from carpool.core.messages import Fact, JobCrashed, JobFailed, Order
from carpool.core.model import JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.program import Program
from carpool.logs import log_event
from carpool.runtime.commands.command_process import CommandProcess
from carpool.runtime.executor.client_protocol import ExecutorOptions
from carpool.runtime.executor.exclusive_access import ExclusiveAccess
from carpool.runtime.executor.job_guard import JobGuard
from carpool.runtime.executor.job_table import JobTable, TrainingJob, job_options_of
from carpool.runtime.executor.launcher import Launcher
from carpool.runtime.executor.reports import Evaluation, HandedOver, Report, ReportBatcher, Sized, Told
from carpool.runtime.job_state.actions import (
    Action,
    DropMirror,
    Emit,
    Ended,
    Kill,
    Note,
    Persist,
    ReleaseExclusive,
    RequestExclusive,
    Send,
    Start,
    Stopped,
)
from carpool.runtime.job_state.types import Target, WorkerMode, target_of
from carpool.runtime.process.entry_check import EntryChecks
from carpool.runtime.process.launch import Launched
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
from carpool.runtime.process.worker_pool import WorkerKey, WorkerListener, WorkerPool
from carpool.runtime.sharing.device_arbiter import ArbiterMessage, DeviceArbiter
from carpool.runtime.sharing.foreign_processes import ListProcesses
from carpool.runtime.sharing.lanes import max_concurrent_jobs
from carpool.runtime.sharing.mps_admission import MpsAdmission, PendingWorker
from carpool.runtime.sharing.mps_daemon import MpsDaemon, is_mps_error
from carpool.runtime.sharing.stride_scheduler import time_sliced_jobs

_MAX_TICK_DELAY = 10  # ticks; after a longer delay the messages of workers have not been read yet
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExecutorDependencies:
    """What an executor uses of the outside world; tests replace it."""

    clock: Callable[[], float] = time.monotonic
    make_pool: Callable[[WorkerListener, Callable[[], float]], WorkerPool] = WorkerPool
    make_mps: Callable[[], MpsDaemon] = MpsDaemon
    list_processes: ListProcesses | None = None  # on a GPU; None: NVML


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
        self._pool = pool = outside.make_pool(self, clock)
        self.jobs = jobs = JobTable(state, self._devices, options.grace_s)
        self._trainings, self._commands = jobs.trainings, jobs.commands
        self._arbiter = DeviceArbiter(devices, options, self._send_to_sharer)
        self._exclusive = ExclusiveAccess(self._trainings, self._run, clock)
        self._mps = MpsAdmission(
            devices,
            enabled=options.mps,
            on_change=self._on_mps_change,
            note=self._note_on_gpus,
            make_daemon=outside.make_mps,
        )
        self._launcher = Launcher(
            self._devices, options, jobs, pool, self._mps, self._arbiter, self._report, clock, outside.list_processes
        )
        self._guard = JobGuard(self._fail_job, options.job_marker)
        self._rejected: dict[JobId, str] = {}  # jobs that could not be added, and why
        self._ticked_at = clock()
        self.is_stopping = False
        self._leaving: set[JobId] = set()  # jobs to hand over to another executor
        self._is_suspended = False  # no client decides about the jobs
        self._is_frozen = False  # no command may compute
        self.stopped = asyncio.Event()

    async def start(self, forkserver: Launched | None = None) -> None:
        """Begin; workers are forked once the fork server, launched already or here, has imported torch."""
        self._pool.begin(forkserver)
        await self._mps.start()

    @property
    def checks(self) -> EntryChecks:
        return self._launcher.checks

    @property
    def broken(self) -> asyncio.Future[str]:
        """Done, with the reason, when no worker can be started any more."""
        return self._pool.broken

    async def close(self) -> None:
        for command in self._commands.values():
            command.kill()
        began = self._clock()
        await self._pool.stop()
        without_workers = self._clock()
        await self._mps.stop()
        mps_s = self._clock() - without_workers
        log_event(_log, "closed", workers_s=round(without_workers - began, 3), mps_s=round(mps_s, 3))
        for command in self._commands.values():
            await command.wait()
        self._arbiter.close()  # a command that exits gives up its turn
        for training in self._trainings.values():
            training.close()

    def add_job(self, job: JobId, program: Program, *, resume: bool) -> None:
        """Add a job; with ``resume`` it continues from its folder. Repeating it has no effect."""
        if job in self.jobs:
            return
        with self._guard.handling(job):
            try:
                self._add_job(job, program, resume=resume)
            except OSError as error:
                self._fail_job(job, f"its folder cannot be written: {error}")

    def _add_job(self, job: JobId, program: Program, *, resume: bool) -> None:
        if program.command:
            self.jobs.add_command(job, program, self, self._pool.run_program, resume=resume)
            return
        options = job_options_of(program, self._options, has_lanes=self._mps.has_lanes)
        training = self.jobs.add_training(job, program, options, resume=resume)
        self._run(training, training.machine.suspend(self._clock(), suspended=self._is_suspended))

    def remove_job(self, job: JobId) -> None:
        self.jobs.forget(job)
        self._rejected.pop(job, None)
        with self._guard.handling(job):
            if job in self._trainings:
                self._run(self._trainings[job], self._trainings[job].machine.stop(self._clock(), checkpoint=False))
            elif job in self._commands:
                self._commands[job].stop(self._clock())
        self._flush()

    def _fail_job(self, job: JobId, error: str) -> None:
        """Fail a job for an error of the executor's; a job whose state machine fails too is abandoned."""
        training = self._trainings.get(job)
        if training is None:
            if job in self._commands:
                self._commands[job].fail(error)
            else:
                self._rejected[job] = error  # repeated with the generation of its first order
                self._batcher.emit(JobFailed(job, 0, error))
        else:
            try:
                self._run(training, training.machine.fail(self._clock(), error))
            except Exception:  # noqa: BLE001 - its state is unusable
                self._abandon(training, error)
        self._flush()

    def _abandon(self, training: TrainingJob, error: str) -> None:
        state = training.state
        for worker in training.devices:
            self._pool.kill((training.job, worker))
        if not state.is_over:
            state.is_over = True
            self._batcher.emit(JobFailed(training.job, state.acks.final_generation(state.target), error))

    def hand_over(self, job: JobId) -> None:
        """Stop a job at a step boundary with its state on disk, then drop it: another executor continues it."""
        self._leaving.add(job)
        self._rejected.pop(job, None)
        with self._guard.handling(job):
            if job in self._trainings:
                self._run(self._trainings[job], self._trainings[job].machine.stop(self._clock(), checkpoint=True))
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
                    self._report(HandedOver(job, max([0 if held is None else held.steps, *saved])))

    def apply_orders(self, orders: Sequence[Order]) -> None:
        """Carry out orders; those of one call take effect together."""
        at = self._clock()
        for order in orders:
            with self._guard.handling(order.job):
                self._apply_order(at, order)
        self.checks.release_others({order.job for order in orders})
        self._update_time_slicing(at)
        self._flush()

    def _apply_order(self, at: float, order: Order) -> None:
        target = target_of(order)
        self._log_order(order.job, target)
        unknown = [slot.device for slot in target.slots if slot.device not in self._devices]
        if order.job in self._trainings and not unknown:
            training = self._trainings[order.job]
            self._run(training, training.machine.order(at, target))
        elif order.job in self._commands and not unknown:
            self._commands[order.job].order(at, target)
        else:
            self._refuse(order, unknown)

    def _refuse(self, order: Order, unknown: Sequence[int]) -> None:
        """Report an order that cannot be carried out; devices of another node are no fault of the job."""
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
                self._run(training, training.machine.stop(at, checkpoint=checkpoint))
        for command in list(self._commands.values()):
            with self._guard.handling(command.state.job):
                command.stop(at)
        self._flush()

    def suspend(self, *, suspended: bool) -> None:
        """Halt all trainings at a step boundary, with their states on disk, or let them continue."""
        if suspended != self._is_suspended:
            log_event(_log, "jobs_suspended" if suspended else "jobs_resumed", jobs=len(self._trainings))
        self._is_suspended = suspended
        for training in list(self._trainings.values()):
            with self._guard.handling(training.job):
                self._run(training, training.machine.suspend(self._clock(), suspended=suspended))
        self._flush()

    def freeze(self, *, frozen: bool) -> None:
        """Stop the processes of all commands, also of those started meanwhile, or let them go on."""
        self._is_frozen = frozen
        for command in list(self._commands.values()):
            with self._guard.handling(command.state.job):
                command.freeze(frozen=frozen)

    def tick(self) -> None:
        at = self._clock()
        was_delayed = at - self._ticked_at > _MAX_TICK_DELAY * self._options.tick_s
        self._ticked_at = at
        for training in list(self._trainings.values()):
            with self._guard.handling(training.job):
                self._run(training, training.machine.tick(at))
                self._look_after_files(training.job)
        for command in list(self._commands.values()):
            with self._guard.handling(command.state.job):
                command.tick(at)
                if self._is_frozen:
                    command.freeze(frozen=True)
                self._look_after_files(command.state.job)
        self._launcher.tick()
        self._arbiter.tick()
        self.jobs.drop_forgotten()
        if self._leaving:
            self._finish_handovers()
        if not was_delayed:
            for key in self._pool.without_heartbeat(self._options.hang_s):
                with self._guard.handling(JobId(key[0])):
                    self._on_hang(at, key)
        self._flush()

    def _look_after_files(self, job: JobId) -> None:
        for problem in self.jobs.trim_log(job, self._options.log_bytes):
            self._report(Told(job, problem))

    def on_message(self, key: WorkerKey, message: Message) -> None:
        with self._guard.handling(JobId(key[0])):
            self._on_message(key, message)

    def _on_message(self, key: WorkerKey, message: Message) -> None:
        if isinstance(message, Alive) or self._launcher.on_message(key, message):
            return
        training, at = self._trainings[JobId(key[0])], self._clock()
        device = training.devices[key[1]]
        if isinstance(message, TurnRequested):
            self._request_turn(at, training, key, device)
        elif isinstance(message, AdmissionRequested):
            self._arbiter.request_admission(at, key, training.slot_on(device))
        elif isinstance(message, ArbiterMessage):
            self._arbiter.on_message(at, device, key, message)
        else:
            self._on_job_message(at, training, key, message)

    def _on_job_message(self, at: float, training: TrainingJob, key: WorkerKey, message: Message) -> None:
        device = training.devices[key[1]]
        if isinstance(message, Contributed):
            self._arbiter.release_turn(at, device, key)
        elif isinstance(message, Halted | Done):
            self._arbiter.cancel_turn(at, device, key)
        elif isinstance(message, WorkerFailed) and self._on_worker_failed(at, device, key, message):
            return
        is_first = isinstance(message, Ready) and training.state.ready is None
        self._run(training, training.machine.message(at, key[1], message))
        if is_first and isinstance(message, Ready):
            target = message.target_loss, message.window
            self._report(Sized(training.job, message.total_steps, message.batch_size, message.num_samples, *target))
        elif isinstance(message, Evaluated):
            self._report(Evaluation(training.job, message.step, message.metrics))
        if self._mps.on_progress(device, training.job, training.state.steps_done):
            self._launcher.start_admitted()
        self._arbiter.grant_next(at, device)
        self._flush()

    def _on_worker_failed(self, at: float, device: int, key: WorkerKey, failure: WorkerFailed) -> bool:
        """Handle the part of a failure that concerns other jobs; True if nothing else is to be done."""
        job, where = key[0], self._devices[device].name
        fields = {"job": job, "worker": key[1], "device": where, "step": failure.step, "error": failure.error}
        log_event(_log, "worker_failed", level=logging.WARNING, kind=failure.kind, **fields)
        if failure.kind != "disk":
            self._arbiter.cancel_turn(at, device, key)
        if failure.kind == "lane":
            self._mps.on_lane_mismatch(failure.error)
        if failure.kind == "device" and self._mps.has_lanes:
            self._on_gpu_fault(at, device, key, failure.error)
            return True
        return False

    def on_exit(self, key: WorkerKey, why: str) -> None:
        with self._guard.handling(JobId(key[0])):
            self._on_exit(key, why)

    def _on_exit(self, key: WorkerKey, why: str) -> None:
        if self._launcher.on_exit(key, why):
            return
        training, worker = self._trainings[JobId(key[0])], key[1]
        at = self._clock()
        device, steps = training.devices[worker], training.steps_of(worker)
        self._log_exit(training, worker, why, steps)
        training.remove_worker(worker)
        self._arbiter.on_exit(at, device, key)
        self._mps.on_exit(device, key)
        self._run(training, training.machine.exited(at, worker, why, steps))
        self._launcher.start_admitted()
        self._arbiter.grant_next(at, device)
        self._flush()

    def _log_exit(self, training: TrainingJob, worker: int, why: str, steps: int) -> None:
        known = training.state.workers.get(worker)
        was_expected = known is None or known.mode is WorkerMode.EXITING
        event, level = ("worker_exited", logging.INFO) if was_expected else ("worker_lost", logging.WARNING)
        device = self._devices[training.devices[worker]].name
        log_event(_log, event, level=level, job=training.job, worker=worker, device=device, reason=why, steps=steps)

    def _on_hang(self, at: float, key: WorkerKey) -> None:
        if self._launcher.on_hang(key):
            return
        training = self._trainings[JobId(key[0])]
        seconds = self._options.hang_s
        log_event(_log, "worker_hung", level=logging.WARNING, job=key[0], worker=key[1], silent_s=seconds)
        self._run(training, training.machine.hung(at, key[1], training.steps_of(key[1])))

    def _on_gpu_fault(self, at: float, device: int, key: WorkerKey, error: str) -> None:
        """Handle a GPU fault under MPS: it ends all clients of the GPU."""
        if self._mps.is_exiting(device, key):
            return
        here, counts = self._launcher.on_gpu_fault(device, error)
        jobs = sorted({training.job for training, _ in here})
        log_event(_log, "gpu_fault", level=logging.WARNING, device=self._devices[device].name, error=error, jobs=jobs)
        how = f"lost its GPU ({error})" if counts else f"was on a GPU that failed for all of its jobs ({error})"
        for training, worker in here:
            steps = training.steps_of(worker)
            self._run(training, training.machine.faulted(at, worker, how, counts=counts, steps=steps))
        if is_mps_error(error):
            self._mps.on_lane_mismatch(error)
        self._flush()

    def _run(self, training: TrainingJob, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Start(worker, device, threads, lane):
                    training.add_worker(worker, device)
                    self._launcher.start(PendingWorker((training.job, worker), device, lane, threads))
                case Send():
                    self._send(training, action)
                case Kill(worker):
                    self._kill((training.job, worker))
                case DropMirror(mirror, reusable):
                    training.drop_mirror(mirror, reusable=reusable)
                case Note(text):
                    self._report(Told(training.job, text))
                case Emit(fact):
                    self._batcher.emit(fact)
                case RequestExclusive(device, release_memory):
                    self._launcher.clear_device(device, release_memory=release_memory)
                    self._exclusive.request(training.job, action)
                case ReleaseExclusive():
                    self._exclusive.release(training.job)
                case Persist(record):
                    with contextlib.suppress(OSError):
                        training.folder.write(record)
                case Ended() | Stopped():
                    self._on_end(training, action)
        self._exclusive.update()

    def _send(self, training: TrainingJob, action: Send) -> None:
        key = (training.job, action.worker)
        if isinstance(action.message, Proceed):
            self._arbiter.on_new_epoch(self._clock(), training.devices[action.worker], key)
        self._pool.send(key, action.message, training.descriptors_for(action))

    def _kill(self, key: WorkerKey) -> None:
        if self._mps.cancel(key):  # not started yet; the state machine gets its exit as any other
            asyncio.get_running_loop().call_soon(self.on_exit, key, "it had not been started")
        else:
            self._pool.kill(key)

    def _on_end(self, training: TrainingJob, end: Ended | Stopped) -> None:
        if isinstance(end, Ended):
            self._report(end.outcome(training.job))
            log_event(_log, "job_ended", job=training.job, steps=end.steps, reason=end.reason)
        if summary := self._arbiter.memory_summary(training.job):
            self._report(Told(training.job, summary))
        self._mps.on_job_end(training.job)
        training.close()

    def _flush(self) -> None:
        self._batcher.flush()
        if self.is_stopping and self.jobs.is_over:
            self.stopped.set()

    def _update_time_slicing(self, at: float) -> None:
        slots = {job: t.state.target.slots for job, t in self._trainings.items() if not t.state.is_over}
        # A program with its own loop can wait for one turn, not for several.
        commands = {job: command.state for job, command in self._commands.items() if command.state.has_session}
        slots |= {job: state.slots for job, state in commands.items() if state.is_solo}
        has_lanes, has_cap = self._mps.has_lanes, bool(self._options.memory_cap)
        limits = {
            number: max_concurrent_jobs(device, has_lanes=has_lanes, has_cap=has_cap)
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
        if time_sliced and self._mps.unavailable:
            self._note_if_on_gpu(training, f"jobs on the GPU are time-sliced without MPS: {self._mps.unavailable}")
        self._run(training, training.machine.set_time_sliced(at, time_sliced=time_sliced))

    def _request_turn(self, at: float, training: TrainingJob, key: WorkerKey, device: int) -> None:
        epoch = training.state.epoch
        if epoch is None or not epoch.layout.time_sliced or key[1] not in epoch.members:
            return  # sent before it learned of a change; it will halt or request again
        solo = epoch.is_solo
        self._arbiter.request_turn(at, key, training.slot_on(device), multi_step=solo, can_queue=solo)

    def _send_to_sharer(self, key: WorkerKey, message: Message) -> None:
        job = JobId(key[0])
        if job in self._commands:
            self._commands[job].send(message)
        else:
            self._pool.send(key, message)

    def on_command(self, command: CommandProcess, facts: Sequence[Fact], reports: Sequence[Report]) -> None:
        for report in reports:
            self._report(report)
        for fact in facts:
            self._batcher.emit(fact)
        self._flush()
        if not command.state.slots:
            self._arbiter.remove(self._clock(), (command.state.job, 0))

    def on_session_message(self, command: CommandProcess, message: Message) -> None:
        at, key = self._clock(), (command.state.job, 0)
        if isinstance(message, Joined):
            self._update_time_slicing(at)
        elif isinstance(message, TurnRequested):
            if command.time_sliced and command.state.slots:
                self._arbiter.request_turn(at, key, command.state.slots[0], multi_step=True)
        elif isinstance(message, Done):
            self._arbiter.remove(at, key)
        self._flush()

    def _on_mps_change(self) -> None:
        self._update_time_slicing(self._clock())
        self._launcher.start_admitted()
        self._flush()

    def _note_on_gpus(self, text: str) -> None:
        for training in self._trainings.values():
            self._note_if_on_gpu(training, text)

    def _note_if_on_gpu(self, training: TrainingJob, text: str) -> None:
        if any(self._devices[device].cuda is not None for device in training.devices.values()):
            self._report(Told(training.job, text))
