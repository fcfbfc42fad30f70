"""Training workers: carries out the actions of trainings' state machines, and passes them their workers' messages.

Workers run on this node's devices, or on devices of other nodes (remote workers).
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
from typing import NamedTuple

from carpool.core.model import JobId
from carpool.core.units import format_bytes
from carpool.jobs.devices import LocalDevice
from carpool.logs import log_event
from carpool.runtime.executor.client_protocol import ExecutorOptions
from carpool.runtime.executor.exclusive_access import ExclusiveAccess
from carpool.runtime.executor.job_guard import JobGuard
from carpool.runtime.executor.job_table import JobTable, TrainingJob
from carpool.runtime.executor.launcher import Launcher
from carpool.runtime.executor.remote_worker_host import RemoteWorkerHost
from carpool.runtime.executor.reports import Evaluation, ReportBatcher, Sized, Told
from carpool.runtime.job_state.actions import (
    Action,
    CopyMirror,
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
from carpool.runtime.job_state.types import WorkerMode
from carpool.runtime.memory.oom_kills import OomKills
from carpool.runtime.process.protocol import (
    AdmissionRequested,
    Alive,
    Contributed,
    Done,
    Evaluated,
    Halted,
    Message,
    Proceed,
    Ready,
    TurnRequested,
    WorkerFailed,
)
from carpool.runtime.process.worker_pool import WorkerKey, WorkerListener, WorkerPool
from carpool.runtime.remote.remote_worker_stream import Peer
from carpool.runtime.remote.remote_workers import RemoteWorkers
from carpool.runtime.sharing.device_arbiter import ArbiterMessage, DeviceArbiter
from carpool.runtime.sharing.foreign_processes import ListProcesses
from carpool.runtime.sharing.mps_admission import MpsAdmission, PendingWorker
from carpool.runtime.sharing.mps_daemon import MpsDaemon, is_mps_error

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExecutorDependencies:
    """What an executor uses of the outside world; tests replace it."""

    clock: Callable[[], float] = time.monotonic
    make_pool: Callable[[WorkerListener, Callable[[], float]], WorkerPool] = WorkerPool
    make_mps: Callable[[], MpsDaemon] = MpsDaemon
    list_processes: ListProcesses | None = None  # on a GPU; None: NVML
    make_oom_kills: Callable[[], OomKills] = OomKills


class WorkerHooks(NamedTuple):
    """What the executor does for its training workers."""

    flush: Callable[[], None]  # after each event
    on_mps_change: Callable[[], None]
    send_to_command: Callable[[JobId, Message], bool]  # False: the job is not a command


class TrainingWorkers:
    """The worker processes of all trainings of one executor."""

    def __init__(
        self,
        devices: Sequence[LocalDevice],
        state: Path,
        options: ExecutorOptions,
        batcher: ReportBatcher,
        guard: JobGuard,
        hooks: WorkerHooks,
        outside: ExecutorDependencies,
    ) -> None:
        self._devices = {device.id: device for device in devices}
        self._options = options
        self._batcher = batcher
        self._report = batcher.report
        self._guard = guard
        self._hooks = hooks
        self._flush = hooks.flush
        self._clock = clock = outside.clock
        self._oom_kills = outside.make_oom_kills()
        self._reachable: dict[int, LocalDevice] = dict(self._devices)  # also devices of other nodes
        self.jobs = jobs = JobTable(state, self._reachable, options.grace_s, self._oom_kills)
        self._trainings = jobs.trainings
        self.pool = pool = outside.make_pool(self, clock)
        self._remote = RemoteWorkers(self, state.absolute(), clock)
        self.arbiter = DeviceArbiter(devices, options, self._send_to_sharer)
        self._exclusive = ExclusiveAccess(self._trainings, self._devices, self.run, clock)
        self.mps = MpsAdmission(
            devices,
            enabled=options.mps,
            on_change=hooks.on_mps_change,
            note=self._note_on_gpus,
            make_daemon=outside.make_mps,
        )
        self.launcher = Launcher(
            self._devices, options, jobs, pool, self.mps, self.arbiter, self._report, clock, outside.list_processes
        )
        self.hosted = RemoteWorkerHost(self.launcher, pool, state.absolute(), self.kill)

    async def close(self) -> None:
        """End all workers and the MPS daemon."""
        began = self._clock()
        await self._remote.close()
        await self.pool.stop()
        without_workers = self._clock()
        await self.mps.stop()
        mps_s = self._clock() - without_workers
        log_event(_log, "closed", workers_s=round(without_workers - began, 3), mps_s=round(mps_s, 3))

    def introduce_peers(self, peers: Sequence[Peer]) -> None:
        """Record devices on other nodes that the next orders may name beside this node's."""
        for peer in peers:
            self._remote.introduce(peer)
        self._reachable |= {n: d for n, d in self._remote.devices.items() if n not in self._devices}

    def can_reach(self, device: int) -> bool:
        """Whether a device is of this node, or of a known peer."""
        return device in self._reachable

    def kill_hung(self, at: float) -> None:
        """Kill the workers without a heartbeat."""
        for key in self.pool.without_heartbeat(self._options.hang_s):
            with self._guard.handling(JobId(key[0])):
                self._on_hang(at, key)

    def on_message(self, key: WorkerKey, message: Message) -> None:
        if self.hosted.on_message(key, message):
            return
        with self._guard.handling(JobId(key[0])):
            self._on_message(key, message)

    def _on_message(self, key: WorkerKey, message: Message) -> None:
        if isinstance(message, Alive) or self.launcher.on_message(key, message):
            return
        training, at = self._trainings[JobId(key[0])], self._clock()
        if self._remote.owns(key):  # its device has no arbiter here
            self._on_training_message(at, training, key[1], message)
            self._flush()
            return
        device = training.devices[key[1]]
        if isinstance(message, TurnRequested):
            self._request_turn(at, training, key, device)
        elif isinstance(message, AdmissionRequested):
            self.arbiter.request_admission(at, key, training.slot_on(device))
        elif isinstance(message, ArbiterMessage):
            self.arbiter.on_message(at, device, key, message)
        else:
            self._on_job_message(at, training, key, message)

    def _memory_limit(self, training: TrainingJob, device: int, key: WorkerKey) -> str:
        """The limit on a worker's memory that is below that of its device."""
        own = training.program.memory_bytes
        if own and self._devices[device].cuda is not None:
            return f"its declared memory ({format_bytes(own)})"
        return self.arbiter.memory_limit(device, key)

    def _on_job_message(self, at: float, training: TrainingJob, key: WorkerKey, message: Message) -> None:
        device = training.devices[key[1]]
        if isinstance(message, WorkerFailed) and message.kind == "memory":
            message = replace(message, limit=self._memory_limit(training, device, key) or message.limit)
        if isinstance(message, Contributed):
            self.arbiter.release_turn(at, device, key)
        elif isinstance(message, Halted | Done):
            self.arbiter.cancel_turn(at, device, key)
        elif isinstance(message, WorkerFailed) and self._on_worker_failed(at, device, key, message):
            return
        self._on_training_message(at, training, key[1], message)
        if self.mps.on_progress(device, training.job, training.state.steps_done):
            self.launcher.start_admitted()
        self.arbiter.grant_next(at, device)
        self._flush()

    def _on_training_message(self, at: float, training: TrainingJob, worker: int, message: Message) -> None:
        is_first = isinstance(message, Ready) and training.state.ready is None
        self.run(training, training.machine.message(at, worker, message))
        if is_first and isinstance(message, Ready):
            size = (message.total_steps, message.batch_size, message.num_samples, message.target_loss, message.window)
            self._report(Sized(training.job, *size, gradient_bytes=message.contribution_bytes))
        elif isinstance(message, Evaluated):
            self._report(Evaluation(training.job, message.step, message.metrics))

    def _on_worker_failed(self, at: float, device: int, key: WorkerKey, failure: WorkerFailed) -> bool:
        """Handle the part of a failure that concerns other jobs. Returns True if that was all."""
        job, where = key[0], self._devices[device].name
        fields = {"job": job, "worker": key[1], "device": where, "step": failure.step, "error": failure.error}
        log_event(_log, "worker_failed", level=logging.WARNING, kind=failure.kind, **fields)
        if failure.kind != "disk":
            self.arbiter.cancel_turn(at, device, key)
        if failure.kind == "lane":
            self.mps.on_lane_mismatch(failure.error)
        if failure.kind == "device" and self.mps.has_lanes:
            self._on_gpu_fault(at, device, key, failure.error)
            return True
        return False

    def on_output(self, job: JobId, output: bytes) -> None:
        """Append to a job's log what its workers on other nodes have written."""
        if (training := self._trainings.get(job)) is not None:
            with contextlib.suppress(OSError):
                os.write(training.folder.log(), output)

    def on_peer_lost(self, key: WorkerKey, why: str) -> None:
        """Handle the loss of a worker with its node, which is not the job's fault."""
        with self._guard.handling(JobId(key[0])):
            training = self._trainings[JobId(key[0])]
            self.run(training, training.machine.faulted(self._clock(), key[1], f"is lost: {why}", counts=False))
            self._on_remote_exit(training, key[1], why)

    def _on_remote_exit(self, training: TrainingJob, worker: int, why: str) -> None:
        self._log_exit(training, worker, why, 0)
        training.remove_worker(worker)
        self.run(training, training.machine.exited(self._clock(), worker, why))
        self._flush()

    def on_exit(self, key: WorkerKey, why: str) -> None:
        if self.hosted.on_exit(key, why):
            return
        with self._guard.handling(JobId(key[0])):
            self._on_exit(key, why)

    def _on_exit(self, key: WorkerKey, why: str) -> None:
        if self.launcher.on_exit(key, why):
            return
        training, worker = self._trainings[JobId(key[0])], key[1]
        if training.devices[worker] not in self._devices:
            self._on_remote_exit(training, worker, why)
            return
        at = self._clock()
        device, steps = training.devices[worker], training.steps_of(worker)
        if signal.SIGKILL.name in why and (cause := self._oom_kills.claim()):
            why = f"{why}, {cause}"
        self._log_exit(training, worker, why, steps)
        training.remove_worker(worker)
        self.arbiter.on_exit(at, device, key)
        self.mps.on_exit(device, key)
        self.run(training, training.machine.exited(at, worker, why, steps))
        self.launcher.start_admitted()
        self.arbiter.grant_next(at, device)
        self._flush()

    def _log_exit(self, training: TrainingJob, worker: int, why: str, steps: int) -> None:
        known = training.state.workers.get(worker)
        was_expected = known is None or known.mode is WorkerMode.EXITING
        event, level = ("worker_exited", logging.INFO) if was_expected else ("worker_lost", logging.WARNING)
        device = self._reachable[training.devices[worker]].name
        log_event(_log, event, level=level, job=training.job, worker=worker, device=device, reason=why, steps=steps)

    def _on_hang(self, at: float, key: WorkerKey) -> None:
        if self.launcher.on_hang(key) or self.hosted.on_hang(key):
            return
        training = self._trainings[JobId(key[0])]
        seconds = self._options.hang_s
        log_event(_log, "worker_hung", level=logging.WARNING, job=key[0], worker=key[1], silent_s=seconds)
        self.run(training, training.machine.hung(at, key[1], training.steps_of(key[1])))

    def _on_gpu_fault(self, at: float, device: int, key: WorkerKey, error: str) -> None:
        """Handle a GPU fault under MPS: it ends all clients of the GPU."""
        if self.mps.is_exiting(device, key):
            return
        here, counts = self.launcher.on_gpu_fault(device, error)
        jobs = sorted({training.job for training, _ in here})
        log_event(_log, "gpu_fault", level=logging.WARNING, device=self._devices[device].name, error=error, jobs=jobs)
        how = f"lost its GPU ({error})" if counts else f"was on a GPU that failed for all of its jobs ({error})"
        for training, worker in here:
            steps = training.steps_of(worker)
            self.run(training, training.machine.faulted(at, worker, how, counts=counts, steps=steps))
        if is_mps_error(error):
            self.mps.on_lane_mismatch(error)
        self._flush()

    def run(self, training: TrainingJob, actions: Sequence[Action]) -> None:
        """Carry out actions of a training's state machine."""
        for action in actions:
            match action:
                case Start(worker, device, threads, lane):
                    training.add_worker(worker, device)
                    pending = PendingWorker((training.job, worker), device, lane, threads)
                    if device in self._devices:
                        self.launcher.start(pending)
                    else:
                        self._remote.start(pending, training.program)
                case Send():
                    self._send(training, action)
                case Kill(worker):
                    self.kill((training.job, worker))
                case CopyMirror(mirror):
                    training.copy_mirror(mirror)
                case DropMirror(mirror, reusable):
                    training.drop_mirror(mirror, reusable=reusable)
                case Note(text):
                    self._report(Told(training.job, text))
                case Emit(fact):
                    self._batcher.emit(fact)
                case RequestExclusive(device, release_memory):
                    if device in self._devices:
                        self.launcher.clear_device(device, release_memory=release_memory)
                    self._exclusive.request(training.job, action)
                case ReleaseExclusive():
                    self._exclusive.release(training.job)
                case Persist(record):
                    training.write(record)
                case Ended() | Stopped():
                    self._on_end(training, action)
        self._exclusive.update()

    def _send(self, training: TrainingJob, action: Send) -> None:
        key, device = (training.job, action.worker), training.devices[action.worker]
        message, fds = action.message, training.descriptors_for(action)
        if isinstance(message, Proceed) and message.size > 1 and action.memory is None:
            message, fds = training.add_rendezvous(message, self._remote.own_address(training.job))
        if device not in self._devices:
            self._remote.send(key, message, fds)
            return
        if isinstance(message, Proceed):
            self.arbiter.on_new_epoch(self._clock(), device, key)
        self.pool.send(key, message, fds)

    def kill(self, key: WorkerKey) -> None:
        """Kill a worker, started or not; its exit is reported as any other."""
        if self._remote.owns(key):
            self._remote.kill(key)
        elif self.mps.cancel(key):  # not started yet; the state machine gets its exit as any other
            asyncio.get_running_loop().call_soon(self.on_exit, key, "it had not been started")
        else:
            self.pool.kill(key)

    def _on_end(self, training: TrainingJob, end: Ended | Stopped) -> None:
        if isinstance(end, Ended):
            self._report(end.outcome(training.job))
            log_event(_log, "job_ended", job=training.job, steps=end.steps, reason=end.reason)
        if summary := self.arbiter.memory_summary(training.job):
            self._report(Told(training.job, summary))
        self.mps.on_job_end(training.job)
        training.close()

    def _request_turn(self, at: float, training: TrainingJob, key: WorkerKey, device: int) -> None:
        epoch = training.state.epoch
        if epoch is None or not epoch.layout.time_sliced or key[1] not in epoch.members:
            return  # sent before it learned of a change; it will halt or request again
        solo = epoch.is_solo
        self.arbiter.request_turn(at, key, training.slot_on(device), multi_step=solo, can_queue=solo)

    def _send_to_sharer(self, key: WorkerKey, message: Message) -> None:
        if not self._hooks.send_to_command(JobId(key[0]), message):
            self.pool.send(key, message)

    def _note_on_gpus(self, text: str) -> None:
        for training in self._trainings.values():
            self.note_if_on_gpu(training, text)

    def note_if_on_gpu(self, training: TrainingJob, text: str) -> None:
        """Report something about a job that has a worker on a GPU."""
        if any(self._reachable[device].cuda is not None for device in training.devices.values()):
            self._report(Told(training.job, text))
