"""Embedded federation: a coordinator and its devices as processes of this machine, kept ready between rounds."""

from __future__ import annotations

import asyncio
import heapq
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

from carpool.backends.federation_store import FederationStore
from carpool.core.errors import CarpoolError, InputError
from carpool.core.model import Kind
from carpool.core.typed_fields import decode_value
from carpool.federated.aggregation import ServerModel, next_model
from carpool.federated.coordinator import Coordinator
from carpool.federated.federation import DeviceName, Federation, TaskName
from carpool.federated.federation_file import FederatedDevice, FederationFile
from carpool.federated.messages import (
    Aggregate,
    CloseCycle,
    DeviceJoined,
    DeviceLost,
    Evaluated,
    Fact,
    Order,
    Outcome,
    Record,
    StartWork,
    TaskResult,
    WorkReported,
)
from carpool.federated.updates import (
    check_encoded,
    decode_weights,
    encode_weights,
    max_update_bytes,
    weights_digest,
)
from carpool.runtime.process.channel import AsyncChannel, Closed, ProtocolError, Received, close_all, pair
from carpool.runtime.process.forkserver import ForkServer
from carpool.runtime.process.protocol import (
    Alive,
    EvaluateTask,
    Halt,
    HostTasks,
    Message,
    RunTasks,
    TaskEvaluated,
    TasksDone,
    TasksReady,
)
from carpool.runtime.process.shared_memory import memory_file_of, read_memory_file

_MAX_RESTARTS = 3  # of a device without a report in between
_SERVER = "(server)"
Observer = Callable[[Record], object]


@dataclass(frozen=True, slots=True)
class TaskSummary:
    """The end of a task."""

    rounds: int
    reason: str
    failed: bool
    digest: str
    metrics: Sequence[tuple[int, dict[str, float]]]  # after each round


@dataclass(slots=True)
class _Process:
    """A device, or the server, as this side sees it."""

    name: str
    channel: AsyncChannel
    reader: asyncio.Task[None] | None = None
    is_working: bool = False
    restarts: int = 0


@dataclass(order=True, slots=True)
class _Event:
    """Something a process did; `at` is emulated time."""

    at: float
    number: int
    facts: list[Fact] = field(compare=False)


@asynccontextmanager
async def fork_server() -> AsyncIterator[ForkServer]:
    """A fork server for one or more federations."""
    forks = ForkServer(lambda exited: None)  # the end of its channel tells that a process has exited
    await forks.start()
    try:
        yield forks
    finally:
        await forks.stop()


class EmbeddedFederation:
    """Carries out the coordinator's orders and reports facts.

    Where devices are emulated, time is theirs: a device's report counts at the time it would have come.
    """

    def __init__(
        self,
        file: FederationFile,
        store: FederationStore,
        observers: Sequence[Observer] = (),
        *,
        resume: bool = False,
    ) -> None:
        self._file = file
        self._store = store
        self._observers = tuple(observers)
        self._resume = resume
        self._events: asyncio.Queue[tuple[_Process, Received | None]] = asyncio.Queue()
        self._processes: dict[str, _Process] = {}
        self._models: dict[TaskName, ServerModel] = {}
        self._tasks = {task.name: task for task in file.federation.tasks}
        self._metrics: dict[TaskName, list[tuple[int, dict[str, float]]]] = {name: [] for name in self._tasks}
        self._evaluating = 0
        self._started_at = 0.0  # of the event loop's clock
        self._later: list[_Event] = []
        self._num_events = 0
        self.coordinator: Coordinator

    async def run(self, forks: ForkServer) -> dict[TaskName, TaskSummary]:
        """Run the federation to its end; InputError if a task cannot be loaded."""
        self._forks = forks
        try:
            server = await self._host(_SERVER)
            devices = await asyncio.gather(*[self._host(each.name, each) for each in self._file.devices])
            federation, records = self._stored_or_new(server)
            with self._store.writer(federation) as writer:
                self.coordinator = Coordinator(federation, observers=(writer, *self._observers))
                self._recover(records)
                await self._work([about for about, _ in devices])
        finally:
            for process in self._processes.values():
                if process.reader is not None:
                    process.reader.cancel()
                process.channel.close()  # the process exits
        return {name: self._summary(name) for name in self._tasks}

    async def _work(self, devices: Sequence[dict[str, Any]]) -> None:
        joined = [self._joined(each, about) for each, about in zip(self._file.devices, devices, strict=True)]
        facts: list[Fact] = [*[DeviceLost(name) for name in self.coordinator.devices], *joined]
        self._started_at = asyncio.get_running_loop().time() - self.coordinator.at
        for name, model in self._models.items():
            if model.rounds and model.rounds not in [rounds for rounds, _ in self._metrics[name]]:
                self._evaluate(name)
        self._carry(self.coordinator.handle(self.coordinator.at, facts))
        while not self.coordinator.is_over or self._evaluating:
            at, facts = await self._next()
            self._carry(self.coordinator.handle(at, facts))

    async def _host(self, name: str, device: FederatedDevice | None = None) -> tuple[dict[str, Any], list[bytes]]:
        """Start the process of a device, or of the server; what it says about its tasks, and their weights."""
        ours, theirs = pair()
        path = self._store.folder / f"{quote(name, safe='')}.log"
        log = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        try:
            await self._forks.fork(theirs, log)
        finally:
            theirs.close()
            os.close(log)
        process = _Process(name, AsyncChannel(ours))
        if old := self._processes.get(name):
            process.restarts = old.restarts + 1
        self._processes[name] = process
        process.channel.send(self._host_message(name, device))
        try:
            received = await process.channel.receive()
            while isinstance(received.message, Alive):
                received = await process.channel.receive()
        except Closed:
            raise CarpoolError(f"the process of {name} exited while it loaded its tasks") from None
        ready = received.message
        assert isinstance(ready, TasksReady), f"expected TasksReady, got {ready}"
        if ready.error:
            raise InputError(ready.error)
        weights = [read_memory_file(fd) for fd in received.fds]
        close_all(received.fds)
        process.reader = asyncio.create_task(self._listen(process))
        return ready.tasks, weights

    def _host_message(self, name: str, device: FederatedDevice | None) -> HostTasks:
        tasks = self._file.hosted_tasks()
        if device is None:
            return HostTasks(name, tasks)
        cores, part = sorted(os.sched_getaffinity(0)), self._file.devices.index(device)
        own = (cores[part % len(cores)],) if device.device == "cpu" else ()
        return HostTasks(name, tasks, part, len(self._file.devices), device.device, own, slowdown=device.slowdown)

    async def _listen(self, process: _Process) -> None:
        try:
            while True:
                received = await process.channel.receive()
                if not isinstance(received.message, Alive):
                    self._events.put_nowait((process, received))
        except (Closed, ProtocolError):
            self._events.put_nowait((process, None))

    def _stored_or_new(self, server: tuple[dict[str, Any], list[bytes]]) -> tuple[Federation, list[Record]]:
        """The federation and its records so far; loads the models."""
        said, weights = server
        federation, records = self._with_batch_sizes(said), list[Record]()
        if self._resume:
            stored, records = self._store.read()
            if stored != federation:
                raise InputError(
                    "the file has changed since the federation was started",
                    way_out="Undo the change, or start anew with another --out.",
                )
        self._tasks = {task.name: task for task in federation.tasks}
        for (name, about), data in zip(said.items(), weights, strict=True):
            trained = frozenset(about["trained"])
            model = self._store.load_model(TaskName(name), trained)
            self._models[TaskName(name)] = model or ServerModel(decode_weights(data), trained)
        return federation, records

    def _with_batch_sizes(self, said: dict[str, Any]) -> Federation:
        """The federation with the batch sizes of the trainings where the file gives none."""
        federation = self._file.federation
        tasks = [
            task if task.name in self._file.has_batch_size else replace(task, batch_size=said[task.name]["batch_size"])
            for task in federation.tasks
        ]
        return replace(federation, tasks=tuple(tasks))

    def _recover(self, records: Sequence[Record]) -> None:
        """Fold records, and make the aggregations that were ordered but not saved."""
        self.coordinator.recover(records)
        cycle = 0
        for record in records:
            for observe in self._observers:
                observe(record)
            for order in record.orders:
                if isinstance(order, CloseCycle):
                    cycle = order.cycle
                elif isinstance(order, Aggregate) and order.round == self._models[order.task].rounds:
                    self._aggregate(order, cycle)
            for fact in record.facts:
                if isinstance(fact, Evaluated):
                    self._metrics[fact.task].append((fact.rounds, dict(fact.metrics)))

    def _joined(self, device: FederatedDevice, about: dict[str, Any]) -> DeviceJoined:
        volumes = {task: int(each["volume"]) for task, each in about.items()}
        sample_s = {task: float(each["sample_s"]) for task, each in about.items() if each["volume"]}
        return DeviceJoined(device.name, Kind(device.device), volumes, sample_s)

    async def _next(self) -> tuple[float, list[Fact]]:
        """The next facts and their time."""
        while True:
            is_busy = self._evaluating or any(process.is_working for process in self._processes.values())
            wake_at = self.coordinator.wake_at
            if self._file.is_emulated and not is_busy and (self._later or wake_at is not None):
                if self._later and (wake_at is None or self._later[0].at <= wake_at):
                    event = heapq.heappop(self._later)
                    return max(event.at, self.coordinator.at), event.facts
                assert wake_at is not None
                return wake_at, []
            if not is_busy and wake_at is None and self._events.empty():
                raise InputError(
                    f"the federation cannot continue: {self._why_stalled()}", way_out=f"See {self._store.folder}/*.log."
                )
            timeout = None if wake_at is None or self._file.is_emulated else max(0.0, wake_at - self._now())
            try:
                process, received = await asyncio.wait_for(self._events.get(), timeout)
            except TimeoutError:
                return self._now(), []
            if found := await self._facts_of(process, received):
                return found

    def _why_stalled(self) -> str:
        present = [device for device in self.coordinator.devices.values() if device.is_present]
        if len(present) < self.coordinator.federation.min_devices:
            return f"{len(present)} devices are left, {self.coordinator.federation.min_devices} needed"
        waiting = [name for name, state in self.coordinator.tasks.items() if not state.end_reason]
        return f"no device holds data of {', '.join(waiting)}"

    async def _facts_of(self, process: _Process, received: Received | None) -> tuple[float, list[Fact]] | None:
        if received is None:
            return await self._on_lost(process)
        try:
            match received.message:
                case TasksDone() as done:
                    process.is_working, process.restarts = False, 0
                    return self._on_done(process, done, received.fds)
                case TaskEvaluated() as evaluated:
                    return self._on_evaluated(evaluated)
        finally:
            close_all(received.fds)
        return None

    async def _on_lost(self, process: _Process) -> tuple[float, list[Fact]]:
        """A device's process exited: start another, whose device is back in the same round."""
        if process.name == _SERVER:
            raise CarpoolError("the process that evaluates exited")
        name, process.is_working = DeviceName(process.name), False
        facts: list[Fact] = [DeviceLost(name, "its process exited")]
        process.channel.close()
        if process.restarts < _MAX_RESTARTS:
            (device,) = [each for each in self._file.devices if each.name == name]
            try:
                facts.append(self._joined(device, (await self._host(name, device))[0]))
            except CarpoolError as error:
                facts[0] = DeviceLost(name, str(error))
        return self._now(), facts

    def _now(self) -> float:
        if self._file.is_emulated:
            return self.coordinator.at
        return max(asyncio.get_running_loop().time() - self._started_at, self.coordinator.at)

    def _on_done(self, process: _Process, done: TasksDone, fds: Sequence[int]) -> tuple[float, list[Fact]] | None:
        name, left, results = DeviceName(process.name), list(fds), []
        for given in done.results:
            result: TaskResult = decode_value(TaskResult, list(given.values()), "TasksDone.results")
            data = left.pop(0) if result.steps and left else None
            results.append(self._checked(name, done.cycle, result, data))
        fact = WorkReported(name, done.cycle, tuple(results))
        if not self._file.is_emulated:
            return self._now(), [fact]
        self._num_events += 1
        cycle = self.coordinator.cycle
        started_at = self.coordinator.at if cycle is None else cycle.started_at
        heapq.heappush(self._later, _Event(started_at + done.seconds, self._num_events, [fact]))
        return None

    def _checked(self, device: DeviceName, cycle: int, result: TaskResult, fd: int | None) -> TaskResult:
        """The result with the outcome of its checks; an update that passes them is stored before it is reported."""
        model = self._models.get(result.task)
        if fd is None or model is None or result.round != model.rounds or result.outcome != Outcome.ACCEPTED:
            return result
        limits = self._tasks[result.task].limits
        data = read_memory_file(fd, max_update_bytes(model.weights, limits))
        checked = check_encoded(data, model.weights, limits)
        if checked.outcome is Outcome.ACCEPTED:
            self._store.save_update(cycle, device, result.task, data)
        return result._replace(outcome=checked.outcome, detail=checked.detail)

    def _on_evaluated(self, evaluated: TaskEvaluated) -> tuple[float, list[Fact]]:
        self._evaluating -= 1
        if evaluated.error:
            raise InputError(f"evaluate of task {evaluated.task!r} raised {evaluated.error}")
        name = TaskName(evaluated.task)
        self._metrics[name].append((evaluated.rounds, dict(evaluated.metrics)))
        return self._now(), [Evaluated(name, evaluated.rounds, dict(evaluated.metrics))]

    def _carry(self, orders: Sequence[Order]) -> None:
        cycle = 0
        for order in orders:
            match order:
                case StartWork():
                    self._start_work(order)
                case CloseCycle():
                    cycle = order.cycle
                    for name in order.missing:
                        if self._processes[name].is_working:
                            self._processes[name].channel.send(Halt())
                case Aggregate():
                    self._aggregate(order, cycle)
                    self._evaluate(order.task)
        if cycle:
            self._store.drop_updates(cycle + 1)

    def _start_work(self, order: StartWork) -> None:
        process = self._processes[order.device]
        process.is_working = True
        weights = [encode_weights(self._models[work.task].weights) for work in order.work]
        _send(process, RunTasks(order.cycle, order.work, order.deadline_s), weights)

    def _aggregate(self, order: Aggregate, cycle: int) -> None:
        updates = [self._store.load_update(cycle, device, order.task) for device in order.devices]
        task, model = self._tasks[order.task], self._models[order.task]
        self._models[order.task] = next_model(task, model, updates, order.weights)
        self._store.save_model(order.task, self._models[order.task])

    def _evaluate(self, name: TaskName) -> None:
        model = self._models[name]
        self._evaluating += 1
        _send(self._processes[_SERVER], EvaluateTask(name, model.rounds), [encode_weights(model.weights)])

    def _summary(self, name: TaskName) -> TaskSummary:
        state, digest = self.coordinator.tasks[name], weights_digest(self._models[name].weights)
        return TaskSummary(state.rounds, state.end_reason, state.failed, digest, self._metrics[name])


def _send(process: _Process, message: Message, files: Sequence[bytes]) -> None:
    fds = [memory_file_of(data, "weights") for data in files]
    process.channel.send(message, fds)
    close_all(fds)
