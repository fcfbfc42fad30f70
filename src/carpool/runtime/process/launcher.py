"""Launcher: starts workers after MPS admission, in a prewarmed process or a new one."""

from __future__ import annotations

from dataclasses import asdict

from carpool.core.model import JobId
from carpool.runtime.executor.context import ExecutorContext
from carpool.runtime.executor.job_table import TrainingJob
from carpool.runtime.executor.reports import Facts, Told
from carpool.runtime.process.protocol import Begin, Message
from carpool.runtime.process.warm_pool import WarmPool
from carpool.runtime.process.worker_pool import WorkerKey
from carpool.runtime.sharing.foreign_processes import ForeignProcessMonitor, ListProcesses
from carpool.runtime.sharing.mps_admission import PendingWorker


class Launcher:
    """Starts the workers of one node's jobs."""

    def __init__(self, workshop: ExecutorContext, ask: ListProcesses | None = None) -> None:
        options, clock = workshop.options, workshop.clock
        self._devices = workshop.devices
        self._trainings = workshop.jobs.trainings
        self._cores = workshop.jobs.cores
        self._gate = workshop.gate
        self._rota = workshop.rota
        self._report = workshop.report
        self._memory_cap = options.memory_cap
        self._is_closed = options.is_closed
        self._heartbeat_s = min(options.heartbeat_s, options.hang_s / 4)
        gpus = {number: device for number, device in self._devices.items() if device.cuda is not None}
        self._lookout = ForeignProcessMonitor(gpus, clock, ask)
        is_open = (self._gate.environment, self._may_sit)
        warm = 0 if options.memory_cap else options.warm  # a seat takes memory too
        self._pool = WarmPool(workshop.staff, gpus, warm, *is_open, clock, self._heartbeat_s)

    def admit(self, who: PendingWorker) -> None:
        """Start a worker as soon as it may."""
        if self._gate.may_start(who):
            self._start(who)

    def let_in(self) -> None:
        """Start whoever has been waiting and may."""
        for who in self._gate.admitted():
            self._start(who)

    def tick(self) -> None:
        """Time has passed: the daemon, the seats and other people's programs are looked at."""
        self._gate.tick()
        self._pool.tick()
        here = {device for training in self._trainings.values() for device in training.devices.values()}
        for device, words in self._lookout.tick(here):
            self._tell_on(device, words)
        if self._lookout.facts:
            self._report(Facts(tuple(self._lookout.facts)))
            self._lookout.facts.clear()

    def fault(self, device: int, error: str) -> tuple[list[tuple[TrainingJob, int]], bool]:
        """A fault on a GPU: all on it have to leave, seats as well. The workers there, and whether they are to blame.

        Who still waits at the gate was not there. Steps are those that the workers have counted: what they said last
        may be older, and whoever is let in alone has to pass the step that the fault was in.
        """
        here = [(t, worker) for t in self._trainings.values() for worker, on in t.devices.items() if on == device]
        here = [(t, worker) for t, worker in here if not self._gate.is_waiting((t.job, worker))]
        clients = [(t.job, worker) for t, worker in here]
        reached = {t.job: t.reached for t, _ in here}
        return here, self._gate.fault(device, error, [*clients, *self._pool.drop(device)], list(reached.items()))

    def make_room(self, device: int) -> None:
        """Somebody needs all of a device's memory."""
        self._pool.drop(device)

    def keep_quiet(self, device: int) -> None:
        """Somebody is measured on a device."""
        self._pool.hush(device)

    def heard(self, key: WorkerKey, message: Message) -> bool:
        """Somebody said something; whether it was a seat, and nobody's worker."""
        if self._pool.owns(key):
            self._tell_on(*self._pool.heard(key, message))
            return True
        return False

    def silent(self, key: WorkerKey) -> bool:
        """Somebody has given no sign of life for too long; whether it was a seat."""
        if self._pool.owns(key):
            self._pool.silent(key)
            return True
        return False

    def ended(self, key: WorkerKey, why: str) -> bool:
        """A process has ended; whether it was a seat."""
        self._cores.let_go(key)
        seat = self._pool.ended(key, why)
        if seat is not None:
            self._gate.gone(seat[0], key)
            self._tell_on(*seat)
            self.let_in()
        return self._pool.owns(key)

    def _tell_on(self, device: int, words: str) -> None:
        """Say something to all jobs on a device."""
        for training in self._trainings.values():
            if words and device in training.devices.values():
                self._report(Told(training.job, words))

    def _may_sit(self, device: int) -> bool:
        is_awaited = not self._is_closed or any(not t.devices and not t.team.is_over for t in self._trainings.values())
        return is_awaited and self._gate.is_calm(device) and not self._lookout.has_outsiders(device)

    def _start(self, who: PendingWorker) -> None:
        training, place = self._trainings[JobId(who.key[0])], self._devices[who.device]
        begin = Begin(
            training.job,
            asdict(training.program),
            device="cpu" if place.cuda is None else f"cuda:{place.cuda}",
            cores=place.cores or self._cores.claim(who.key, training.program.cpus),
            threads=who.threads,
            checkpoints=str(training.folder.checkpoints),
            heartbeat_s=self._heartbeat_s,
            environment=self._gate.environment(who.device, who.lane),
            memory_cap=self._memory_cap,
        )
        beside = training.folder.log(), training.counters[who.key[1]], *self._rota.descriptors(who.device)
        if words := self._pool.begin(who.key, who.device, who.lane, begin, *beside):
            self._report(Told(training.job, words))
