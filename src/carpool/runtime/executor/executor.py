"""Executor of one node: carries out orders on its devices and runs the actions of its jobs' state machines.

What a training's workers do next is decided by `JobMachine`, what a command does by `CommandState`, and which worker
computes on a shared device by `DeviceArbiter`. This class connects them to processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from carpool.core.messages import Fact, JobCrashed, JobFailed, Order
from carpool.core.model import JobId
from carpool.core.units import format_bytes
from carpool.jobs.devices import LocalDevice
from carpool.jobs.program import Program
from carpool.logs import log_event
from carpool.runtime.commands.command_process import CommandProcess
from carpool.runtime.executor.client_protocol import ExecutorOptions
from carpool.runtime.executor.exclusive_access import ExclusiveAccess
from carpool.runtime.executor.job_guard import JobGuard
from carpool.runtime.executor.job_table import JobTable, TrainingJob, job_options_of
from carpool.runtime.executor.launcher import Launcher
from carpool.runtime.executor.lent_workers import LentWorkers
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
from carpool.runtime.job_state.types import Target, WorkerMode, local_first, target_of
from carpool.runtime.memory.oom_kills import OomKills
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
from carpool.runtime.remote.borrowed_workers import BorrowedWorkers
from carpool.runtime.remote.lending import Lender
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
    make_oom_kills: Callable[[], OomKills] = OomKills


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
        self._oom_kills = outside.make_oom_kills()
        self._borrowed = BorrowedWorkers(self, state.absolute(), clock)
        self._reachable: dict[int, LocalDevice] = dict(self._devices)  # and those that other nodes lend
        self.jobs = jobs = JobTable(state, self._reachable, options.grace_s, self._oom_kills)
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
        self.lent = LentWorkers(self._launcher, pool, state.absolute(), self._kill)
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
        await self._borrowed.close()
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
            self._kill((training.job, worker))
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
                    steps = held.steps if held is not None and training is None else max(saved, default=0)
                    self._report(HandedOver(job, steps))

    def apply_orders(self, orders: Sequence[Order]) -> None:
        """Carry out orders; those of one call take effect together."""
        at = self._clock()
        for order in orders:
            with self._guard.handling(order.job):
                self._apply_order(at, order)
        self.checks.release_others({order.job for order in orders})
        self._update_time_slicing(at)
        self._flush()

    def introduce_lenders(self, lenders: Sequence[Lender]) -> None:
        """Learn of devices on other nodes that the next orders may name beside this node's."""
        for lender in lenders:
            self._borrowed.introduce(lender)
        self._reachable |= {n: d for n, d in self._borrowed.devices.items() if n not in self._devices}

    def _apply_order(self, at: float, order: Order) -> None:
        target = local_first(target_of(order), lambda device: device not in self._devices)
        self._log_order(order.job, target)
        training = self._trainings.get(order.job)
        known = self._devices if training is None else self._reachable
        unknown = [slot.device for slot in target.slots if slot.device not in known]
        if training is not None and not unknown and (problem := self._why_not_across(training, target)):
            self._run(training, training.machine.fail(at, problem))
        elif training is not None and not unknown:
            self._run(training, training.machine.order(at, target))
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
        if training.state.is_lent(target.slots[0].device):
            return "the job was assigned devices of other nodes only"
        return ""

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

    def limit_steps(self, until: float) -> None:
        """Let no training begin a step after an instant of the boot clock; 0: no limit."""
        self.jobs.limit_steps(until)

    def freeze(self, *, frozen: bool) -> None:
        """Stop the processes of all commands, also of those started meanwhile, or let them go on."""
        self._is_frozen = frozen
        if frozen:
            self.lent.end_all()
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
        for job, words in self.jobs.memory_warnings(at):
            if words:
                self._report(Told(job, words, is_warning=True))
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
        if self.lent.on_message(key, message):
            return
        with self._guard.handling(JobId(key[0])):
            self._on_message(key, message)

    def _on_message(self, key: WorkerKey, message: Message) -> None:
        if isinstance(message, Alive) or self._launcher.on_message(key, message):
            return
        training, at = self._trainings[JobId(key[0])], self._clock()
        if self._borrowed.owns(key):  # its device has no arbiter here
            self._on_training_message(at, training, key[1], message)
            self._flush()
            return
        device = training.devices[key[1]]
        if isinstance(message, TurnRequested):
            self._request_turn(at, training, key, device)
        elif isinstance(message, AdmissionRequested):
            self._arbiter.request_admission(at, key, training.slot_on(device))
        elif isinstance(message, ArbiterMessage):
            self._arbiter.on_message(at, device, key, message)
        else:
            self._on_job_message(at, training, key, message)

    def _memory_limit(self, training: TrainingJob, device: int, key: WorkerKey) -> str:
        """What limits a worker's memory below that of its device."""
        own = training.program.memory_bytes
        if own and self._devices[device].cuda is not None:
            return f"its declared memory ({format_bytes(own)})"
        return self._arbiter.memory_limit(device, key)

    def _on_job_message(self, at: float, training: TrainingJob, key: WorkerKey, message: Message) -> None:
        device = training.devices[key[1]]
        if isinstance(message, WorkerFailed) and message.kind == "memory":
            message = replace(message, limit=self._memory_limit(training, device, key))
        if isinstance(message, Contributed):
            self._arbiter.release_turn(at, device, key)
        elif isinstance(message, Halted | Done):
            self._arbiter.cancel_turn(at, device, key)
        elif isinstance(message, WorkerFailed) and self._on_worker_failed(at, device, key, message):
            return
        self._on_training_message(at, training, key[1], message)
        if self._mps.on_progress(device, training.job, training.state.steps_done):
            self._launcher.start_admitted()
        self._arbiter.grant_next(at, device)
        self._flush()

    def _on_training_message(self, at: float, training: TrainingJob, worker: int, message: Message) -> None:
        is_first = isinstance(message, Ready) and training.state.ready is None
        self._run(training, training.machine.message(at, worker, message))
        if is_first and isinstance(message, Ready):
            target = message.target_loss, message.window
            self._report(Sized(training.job, message.total_steps, message.batch_size, message.num_samples, *target))
        elif isinstance(message, Evaluated):
            self._report(Evaluation(training.job, message.step, message.metrics))

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

    def on_output(self, job: JobId, output: bytes) -> None:
        """Append to a job's log what its workers on other nodes have written."""
        if (training := self._trainings.get(job)) is not None:
            with contextlib.suppress(OSError):
                os.write(training.folder.log(), output)

    def on_lender_lost(self, key: WorkerKey, why: str) -> None:
        """Handle the loss of a worker with its node, which is no fault of the job."""
        with self._guard.handling(JobId(key[0])):
            training = self._trainings[JobId(key[0])]
            self._run(training, training.machine.faulted(self._clock(), key[1], f"is lost: {why}", counts=False))
            self._on_borrowed_exit(training, key[1], why)

    def _on_borrowed_exit(self, training: TrainingJob, worker: int, why: str) -> None:
        self._log_exit(training, worker, why, 0)
        training.remove_worker(worker)
        self._run(training, training.machine.exited(self._clock(), worker, why))
        self._flush()

    def on_exit(self, key: WorkerKey, why: str) -> None:
        if self.lent.on_exit(key, why):
            return
        with self._guard.handling(JobId(key[0])):
            self._on_exit(key, why)

    def _on_exit(self, key: WorkerKey, why: str) -> None:
        if self._launcher.on_exit(key, why):
            return
        training, worker = self._trainings[JobId(key[0])], key[1]
        if training.devices[worker] not in self._devices:
            self._on_borrowed_exit(training, worker, why)
            return
        at = self._clock()
        device, steps = training.devices[worker], training.steps_of(worker)
        if signal.SIGKILL.name in why and (cause := self._oom_kills.claim()):
            why = f"{why}, {cause}"
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
        device = self._reachable[training.devices[worker]].name
        log_event(_log, event, level=level, job=training.job, worker=worker, device=device, reason=why, steps=steps)

    def _on_hang(self, at: float, key: WorkerKey) -> None:
        if self._launcher.on_hang(key) or self.lent.on_hang(key):
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
                    pending = PendingWorker((training.job, worker), device, lane, threads)
                    if device in self._devices:
                        self._launcher.start(pending)
                    else:
                        self._borrowed.start(pending, training.program)
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
                    if device in self._devices:
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
        key, device = (training.job, action.worker), training.devices[action.worker]
        message, fds = action.message, training.descriptors_for(action)
        if isinstance(message, Proceed) and message.size > 1 and action.memory is None:
            message, fds = training.meet(message, self._borrowed.own_address(training.job))
        if device not in self._devices:
            self._borrowed.send(key, message, fds)
            return
        if isinstance(message, Proceed):
            self._arbiter.on_new_epoch(self._clock(), device, key)
        self._pool.send(key, message, fds)

    def _kill(self, key: WorkerKey) -> None:
        if self._borrowed.owns(key):
            self._borrowed.kill(key)
        elif self._mps.cancel(key):  # not started yet; the state machine gets its exit as any other
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
        # A job across nodes is never time-sliced: it would wait for turns on several machines at once.
        slots = {job: own for job, own in slots.items() if all(slot.device in self._devices for slot in own)}
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
        if any(self._reachable[device].cuda is not None for device in training.devices.values()):
            self._report(Told(training.job, text))
