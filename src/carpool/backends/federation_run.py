"""Run of a federation: carries out the coordinator's orders, checks and aggregates updates, and reports facts."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from carpool.backends.federation_devices import (
    NO_DEVICE,
    Devices,
    EmbeddedDevices,
    HostedProcess,
    Lost,
    send,
    start_process,
)
from carpool.backends.federation_store import FederationStore
from carpool.core.errors import InputError
from carpool.core.typed_fields import InvalidField, decode_value, shortened
from carpool.federated.aggregation import ServerModel, next_model
from carpool.federated.coordinator import Coordinator
from carpool.federated.federation import DeviceName, Federation, TaskName
from carpool.federated.federation_file import FederationFile
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
from carpool.runtime.process.channel import Received, close_all
from carpool.runtime.process.forkserver import ForkServer
from carpool.runtime.process.protocol import EvaluateTask, HostTasks, TaskEvaluated, TasksDone
from carpool.runtime.process.shared_memory import read_memory_file

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


@dataclass(order=True, slots=True)
class _Report:
    """Something a process did; `at` is emulated time."""

    at: float
    number: int
    facts: list[Fact] = field(compare=False)


@asynccontextmanager
async def fork_server() -> AsyncIterator[ForkServer]:
    """A fork server for one or more federations."""
    forks = ForkServer(lambda exited: None)  # a process's exit is noticed by the end of its channel
    await forks.start()
    try:
        yield forks
    finally:
        await forks.stop()


class FederationRun:
    """Carries out the coordinator's orders and reports facts.

    With emulated devices, time is emulated, too: a report counts at the time at which it would have arrived.
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
        self._models: dict[TaskName, ServerModel] = {}
        self._tasks = {task.name: task for task in file.federation.tasks}
        self._metrics: dict[TaskName, list[tuple[int, dict[str, float]]]] = {name: [] for name in self._tasks}
        self._evaluating = 0
        self._started_at = 0.0  # of the event loop's clock
        self._later: list[_Report] = []
        self._stored: set[tuple[int, DeviceName, TaskName]] = set()  # updates of this run that passed the checks
        self._num_events = 0
        self.coordinator: Coordinator

    async def run(self, forks: ForkServer, devices: Devices | None = None) -> dict[TaskName, TaskSummary]:
        """Run the federation to its end, on processes of this machine if no devices are given."""
        self._devices = devices or EmbeddedDevices(self._file, forks, self._store.folder)
        server: HostedProcess | None = None
        try:
            host = HostTasks(_SERVER, self._file.hosted_tasks())
            load_s = self._file.federation.load_s
            server, said, weights = await start_process(forks, host, self._store.folder, load_s)
            self._server = server
            server.listen(self._devices.events)
            ready = await self._devices.start()
            federation, records = self._stored_or_new(said, weights)
            with self._store.writer(federation) as writer:
                self.coordinator = Coordinator(federation, observers=(writer, *self._observers))
                self._recover(records)
                await self._work(ready)
        finally:
            if server is not None:
                server.close()
            await self._devices.close()
        return {name: self._summary(name) for name in self._tasks}

    async def initial_models(self, forks: ForkServer) -> dict[TaskName, ServerModel]:
        """The models before the first round, as a new run would have them."""
        host = HostTasks(_SERVER, self._file.hosted_tasks())
        server, said, weights = await start_process(forks, host, self._store.folder)
        server.close()
        self._stored_or_new(said, weights)
        return dict(self._models)

    async def _work(self, ready: Sequence[DeviceJoined]) -> None:
        facts: list[Fact] = [*[DeviceLost(name) for name in self.coordinator.devices], *ready]
        self._started_at = asyncio.get_running_loop().time() - self.coordinator.at
        for name, model in self._models.items():
            if model.rounds and model.rounds not in [rounds for rounds, _ in self._metrics[name]]:
                self._evaluate(name)
        self._carry(self.coordinator.handle(self.coordinator.at, facts))
        while not self.coordinator.is_over or self._evaluating:
            at, facts = await self._next()
            self._carry(self.coordinator.handle(at, facts))

    def _stored_or_new(self, said: dict[str, Any], weights: Sequence[bytes]) -> tuple[Federation, list[Record]]:
        """The federation and its records so far; loads the models."""
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

    async def _next(self) -> tuple[float, list[Fact]]:
        """The next facts and their time."""
        while True:
            is_busy = self._evaluating or self._devices.is_working
            wake_at = self.coordinator.wake_at
            if self._file.is_emulated and not is_busy and (self._later or wake_at is not None):
                if self._later and (wake_at is None or self._later[0].at <= wake_at):
                    report = heapq.heappop(self._later)
                    return max(report.at, self.coordinator.at), report.facts
                assert wake_at is not None
                return wake_at, []
            if not is_busy and wake_at is None and not self._devices.may_join:
                raise InputError(
                    f"the federation cannot continue: {self._why_stalled()}", way_out=f"See {self._store.folder}/*.log."
                )
            timeout = None if wake_at is None or self._file.is_emulated else max(0.0, wake_at - self._now())
            try:
                name, event = await asyncio.wait_for(self._devices.events.get(), timeout)
            except TimeoutError:
                return self._now(), []
            if found := self._facts_of(name, event):
                return found

    def _why_stalled(self) -> str:
        present = [device for device in self.coordinator.devices.values() if device.is_present]
        if len(present) < self.coordinator.federation.min_devices:
            return f"{len(present)} devices are left, {self.coordinator.federation.min_devices} needed"
        waiting = [name for name, state in self.coordinator.tasks.items() if not state.end_reason]
        return f"no device holds data of {', '.join(waiting)}"

    def _facts_of(self, name: str, event: Received | DeviceJoined | Lost) -> tuple[float, list[Fact]] | None:
        match event:
            case DeviceJoined():
                return self._now(), [event]
            case Lost(reason) if name in (_SERVER, NO_DEVICE):
                why = "the process that evaluates exited" if name else reason
                raise InputError(why, way_out=f"See {self._store.folder}/*.log.")
            case Lost(reason, back):
                return self._now(), [DeviceLost(DeviceName(name), reason), *([back] if back else [])]
        try:
            match event.message:
                case TasksDone() as done:
                    return self._on_done(DeviceName(name), done, event.fds)
                case TaskEvaluated() as evaluated:
                    return self._on_evaluated(evaluated)
        finally:
            close_all(event.fds)
        return None

    def _now(self) -> float:
        if self._file.is_emulated:
            return self.coordinator.at
        return max(asyncio.get_running_loop().time() - self._started_at, self.coordinator.at)

    def _on_done(self, name: DeviceName, done: TasksDone, fds: Sequence[int]) -> tuple[float, list[Fact]] | None:
        left, results = list(fds), []
        try:
            given = [_task_result(each) for each in done.results]
        except (InvalidField, TypeError) as error:
            return self._now(), [DeviceLost(name, f"its report cannot be read: {shortened(str(error), 200)}")]
        for result in given:
            data = left.pop(0) if result.steps and left else None
            results.append(self._checked(name, done.cycle, result, data))
        fact = WorkReported(name, done.cycle, tuple(results))
        if not self._file.is_emulated:
            return self._now(), [fact]
        self._num_events += 1
        cycle = self.coordinator.cycle
        started_at = self.coordinator.at if cycle is None else cycle.started_at
        heapq.heappush(self._later, _Report(started_at + done.seconds, self._num_events, [fact]))
        return None

    def _checked(self, device: DeviceName, cycle: int, result: TaskResult, fd: int | None) -> TaskResult:
        """The result with the outcome of its checks; an update that passes them is stored before it is reported."""
        model, key, is_open = self._models.get(result.task), (cycle, device, result.task), self._is_open(cycle)
        if model is None or result.round != model.rounds or result.outcome != Outcome.ACCEPTED or not result.steps:
            return result
        if not is_open:  # the coordinator refuses it; if stored, it would count in a later cycle of the same number
            return result
        if fd is None:
            return result._replace(outcome=Outcome.UNREADABLE, detail="no weights came with the result")
        if key in self._stored:  # the coordinator refuses it; what was accepted must not be replaced
            return result
        limits = self._tasks[result.task].limits
        data = read_memory_file(fd, max_update_bytes(model.weights, limits))
        checked = check_encoded(data, model.weights, limits)
        if checked.outcome is Outcome.ACCEPTED:
            self._store.save_update(cycle, device, result.task, data)
            self._stored.add(key)
        return result._replace(outcome=checked.outcome, detail=checked.detail, num_bytes=len(data))

    def _is_open(self, cycle: int) -> bool:
        return self.coordinator.cycle is not None and self.coordinator.cycle.number == cycle

    def _on_evaluated(self, evaluated: TaskEvaluated) -> tuple[float, list[Fact]]:
        self._evaluating -= 1
        if evaluated.error:
            raise InputError(f"evaluate of task {evaluated.task!r} raised {evaluated.error}")
        name = TaskName(evaluated.task)
        target = self._tasks[name].target
        if target is not None and target.metric not in evaluated.metrics:
            known = ", ".join(sorted(evaluated.metrics)) or "nothing"
            raise InputError(
                f"target of task {name!r} is about {target.metric!r}, and its evaluate returns {known}",
                way_out="Name a metric that evaluate returns.",
            )
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
                    self._devices.halt(order.missing)
                case Aggregate():
                    self._aggregate(order, cycle)
                    self._evaluate(order.task)
        if cycle:
            self._store.drop_updates(cycle + 1)
            self._stored = {key for key in self._stored if key[0] > cycle}

    def _start_work(self, order: StartWork) -> None:
        self._devices.run(order, [encode_weights(self._models[work.task].weights) for work in order.work])

    def _aggregate(self, order: Aggregate, cycle: int) -> None:
        updates = [self._store.load_update(cycle, device, order.task) for device in order.devices]
        task, model = self._tasks[order.task], self._models[order.task]
        self._models[order.task] = next_model(task, model, updates, order.weights)
        self._store.save_model(order.task, self._models[order.task])

    def _evaluate(self, name: TaskName) -> None:
        model = self._models[name]
        self._evaluating += 1
        send(self._server.channel, EvaluateTask(name, model.rounds), [encode_weights(model.weights)])

    def _summary(self, name: TaskName) -> TaskSummary:
        state, digest = self.coordinator.tasks[name], weights_digest(self._models[name].weights)
        return TaskSummary(state.rounds, state.end_reason, state.failed, digest, self._metrics[name])


def _task_result(given: dict[str, Any]) -> TaskResult:
    """A result as a device sent it; TypeError for unknown or missing fields, InvalidField for values out of range."""
    result: TaskResult = decode_value(TaskResult, list(TaskResult(**given)), "TasksDone.results")
    return result
