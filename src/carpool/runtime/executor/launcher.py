"""Launcher: starts workers after MPS admission, in a prewarmed process or a new one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict

from carpool.core.model import JobId
from carpool.jobs.devices import LocalDevice, devices_of_gpu
from carpool.jobs.program import Program
from carpool.logs import log_event
from carpool.runtime.executor.client_protocol import ExecutorOptions
from carpool.runtime.executor.job_table import JobTable, TrainingJob
from carpool.runtime.executor.reports import Facts, Report, Told
from carpool.runtime.process.entry_check import EntryChecks
from carpool.runtime.process.protocol import Begin, Message
from carpool.runtime.process.warm_pool import WarmPool
from carpool.runtime.process.worker_pool import WorkerKey, WorkerPool
from carpool.runtime.sharing.device_arbiter import DeviceArbiter
from carpool.runtime.sharing.foreign_processes import ForeignProcessMonitor, ListProcesses
from carpool.runtime.sharing.mps_admission import MpsAdmission, PendingWorker

_MAX_STARTING_ON_GPU = 8
_log = logging.getLogger(__name__)


class Launcher:
    """Starts the workers of one node's jobs."""

    def __init__(
        self,
        devices: Mapping[int, LocalDevice],
        options: ExecutorOptions,
        jobs: JobTable,
        pool: WorkerPool,
        mps: MpsAdmission,
        arbiter: DeviceArbiter,
        report: Callable[[Report], None],
        clock: Callable[[], float],
        list_processes: ListProcesses | None = None,
    ) -> None:
        self._devices = devices
        self._options = options
        self._trainings = jobs.trainings
        self._cores = jobs.cores
        self._pool = pool
        self._mps = mps
        self._arbiter = arbiter
        self._report = report
        self._hosted: dict[WorkerKey, tuple[Program, int]] = {}  # program and log of workers for other executors
        self.checks = EntryChecks(pool, self._usual_threads, sum(map(_max_starting, devices.values())))
        self._heartbeat_s = min(options.heartbeat_s, options.hang_s / 4)
        gpus = {number: device for number, device in devices.items() if device.cuda is not None}
        self._foreign = ForeignProcessMonitor(gpus, clock, list_processes)
        size = 0 if options.memory_cap else options.warm  # prewarmed processes take memory
        self._warm = WarmPool(pool, gpus, size, mps.environment, self._may_prewarm, clock, self._heartbeat_s)

    def start(self, worker: PendingWorker) -> None:
        """Start a worker as soon as MPS admits it."""
        if self._mps.admit(worker):
            self._launch(worker)

    def start_hosted(self, worker: PendingWorker, program: Program, log: int) -> None:
        """Start a worker of a job that another machine leads; the log stays open until it has exited."""
        self._hosted[worker.key] = program, log
        self.start(worker)

    def on_hosted_exit(self, device: int, key: WorkerKey) -> None:
        self._hosted.pop(key, None)
        self._cores.release(key)
        self._mps.on_exit(device, key)
        self.start_admitted()

    def start_admitted(self) -> None:
        for worker in self._mps.take_admitted():
            self._launch(worker)

    def _launch(self, worker: PendingWorker) -> None:
        if worker.key in self._hosted:
            program, log = self._hosted[worker.key]
            self._pool.launch(worker.key, self._begin(program, worker), log)
            return
        training = self._trainings[JobId(worker.key[0])]
        begin = self._begin(training.program, worker, str(training.folder.checkpoints))
        counter = training.counter(worker.key[1])
        fds = training.folder.log(), counter, *self._arbiter.handoff_descriptors(worker.device)
        prewarmed = self._warm.take(worker.key, worker.device, worker.lane, begin)
        checked = self.checks.take(begin) if prewarmed is None else None
        if prewarmed is not None:
            key, note = prewarmed
            self._pool.assign(key, worker.key, begin, *fds)
            self._report(Told(training.job, note))
        elif checked is not None:
            self._pool.assign(checked, worker.key, begin, *fds)
        else:
            self._pool.launch(worker.key, begin, *fds)
        job, number = worker.key
        device, lane, restarts = self._devices[worker.device].name, worker.lane, training.state.lost_workers
        log_event(_log, "worker_launched", job=job, worker=number, device=device, lane=lane, restarts=restarts)

    def _usual_threads(self, program: Program) -> int:
        """Threads of a worker that has a whole device."""
        device = next(iter(self._devices.values()))
        return max(1, len(device.cores) if device.cuda is None else program.cpus)

    def _begin(self, program: Program, worker: PendingWorker, checkpoints: str = "") -> Begin:
        device = self._devices[worker.device]
        return Begin(
            worker.key[0],
            asdict(program),
            device="cpu" if device.cuda is None else f"cuda:{device.cuda}",
            cores=device.cores or self._cores.claim(worker.key, program.cpus),
            threads=worker.threads,
            checkpoints=checkpoints,
            heartbeat_s=self._heartbeat_s,
            environment=self._mps.environment(worker.device, worker.lane),
            memory_cap=self._options.memory_cap,
            lane_bytes=device.memory_bytes if device.is_lane else 0,
        )

    def tick(self) -> None:
        self._mps.tick()
        if self._pool.is_ready:  # the time to import torch must not count as a slow warm-up
            self._warm.tick()
        in_use = {device for training in self._trainings.values() for device in training.devices.values()}
        for device, note in self._foreign.tick(in_use):
            self._note_on(device, note)
        if self._foreign.facts:
            self._report(Facts(tuple(self._foreign.facts)))
            self._foreign.facts.clear()

    def on_gpu_fault(self, device: int, error: str) -> tuple[list[tuple[TrainingJob, int]], bool]:
        """Make all processes on a GPU exit after a fault. Returns its workers and whether a single job is to blame.

        Steps are read from the shared counters: reports lag behind, and a suspect that runs alone is cleared only after
        the step that failed.
        """
        lanes = devices_of_gpu(self._devices.values(), self._devices[device])
        here = [(t, worker) for t in self._trainings.values() for worker, on in t.devices.items() if on in lanes]
        here = [(t, worker) for t, worker in here if not self._mps.is_waiting((t.job, worker))]
        clients: list[WorkerKey] = [(t.job, worker) for t, worker in here]
        steps = {t.job: t.max_steps for t, _ in here}
        clients += [client for lane in lanes for client in self._warm.clear(lane)]
        return here, self._mps.on_fault(device, error, clients, list(steps.items()))

    def clear_device(self, device: int, *, release_memory: bool) -> None:
        """Prepare a device for exclusive access: free all its memory, or only start nothing there."""
        if release_memory:
            for lane in devices_of_gpu(self._devices.values(), self._devices[device]):
                self._warm.clear(lane)
        else:
            self._warm.keep_quiet(device)

    def on_message(self, key: WorkerKey, message: Message) -> bool:
        """Handle a message of a process without a job; False if it is a worker's."""
        if self.checks.owns(key):
            self.checks.on_message(key, message)
            return True
        if not self._warm.owns(key):
            return False
        self._note_on(*self._warm.on_message(key, message))
        return True

    def on_hang(self, key: WorkerKey) -> bool:
        """Kill a prewarmed process that hangs; False if it is a worker. Entry checks have their own timeout."""
        if self.checks.owns(key):
            return True
        if not self._warm.owns(key):
            return False
        self._warm.on_hang(key)
        return True

    def on_exit(self, key: WorkerKey, why: str) -> bool:
        """Handle a process's exit; False if it was a worker."""
        if self.checks.owns(key):
            self.checks.on_exit(key)
            return True
        self._cores.release(key)
        exited = self._warm.on_exit(key, why)
        if exited is not None:
            self._mps.on_exit(exited[0], key)
            self._note_on(*exited)
            self.start_admitted()
        return self._warm.owns(key)

    def _note_on(self, device: int, note: str) -> None:
        for training in self._trainings.values():
            if note and device in training.devices.values():
                self._report(Told(training.job, note))

    def _may_prewarm(self, device: int) -> bool:
        is_job_waiting = any(not t.devices and not t.state.is_over for t in self._trainings.values())
        is_wanted = is_job_waiting or not self._options.is_closed
        return is_wanted and self._mps.allows_warm_processes(device) and not self._foreign.has_foreign_processes(device)


def _max_starting(device: LocalDevice) -> int:
    """How many jobs can start on a device at once; that many entry-check processes are kept to become their workers."""
    return 1 if device.cuda is None else _MAX_STARTING_ON_GPU
