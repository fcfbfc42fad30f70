"""Task processes: a device works on its tasks side by side, each in a process of its own on a core or a GPU lane."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from carpool.federated.cycle_plan import dealt
from carpool.federated.messages import Outcome, TaskResult, Work
from carpool.runtime.compat.process_lifetime import exit_with_parent
from carpool.runtime.errors import LeaveRequested
from carpool.runtime.process.channel import Channel, Closed, Received, close_all, close_all_but, pair
from carpool.runtime.process.protocol import (
    Alive,
    Halt,
    HostTasks,
    Leave,
    RunTasks,
    TasksDone,
    TasksReady,
    WorkerFailed,
)
from carpool.runtime.sharing.lanes import FaultIsolation, percent
from carpool.runtime.sharing.mps_daemon import is_mps_error, with_percentage

_LEAST_S = 1e-3
_MAX_MPS_ERRORS = 3  # of the service and not of a task; then the tasks take turns

Host = Callable[[Channel, HostTasks], int]


def works_side_by_side(host: HostTasks) -> bool:
    """Whether a device needs a process for each of its tasks."""
    return host.part is not None and len(host.tasks) > 1 and (len(host.cores) > 1 or bool(host.lane))


@dataclass(slots=True)
class _Process:
    """The process of a task."""

    channel: Channel
    pid: int
    percent: int  # of a GPU that it was started with
    began: float
    is_idle: bool = False  # it has loaded its task, and has no work

    def end(self) -> None:
        """Let it exit if it is idle, else kill it; when this returns, its GPU memory is free."""
        with contextlib.suppress(Closed):
            self.channel.send(Leave())
        if not self.is_idle:
            os.kill(self.pid, signal.SIGKILL)
        self.channel.close()
        os.waitpid(self.pid, 0)


class TaskProcesses:
    """Has a process per task, as many of which work at once as the device has cores, or all of them on lanes of a GPU.

    The tasks of a cycle are dealt to the cores, those that take longest first; on a core they follow one another. At a
    deadline each gets its part of the time that is left, by shares. Each process is a device with one task, so that its
    update is bitwise that of the tasks in turn.

    On a GPU a task whose share has changed gets another process, since MPS fixes it at the start. A GPU fault ends all
    processes; those that worked start again from the round's weights, one at a time, and one that faults alone fails.
    This process has one thread and never starts CUDA, so that it can fork at any time.
    """

    def __init__(self, channel: Channel, host: HostTasks, run: Host) -> None:
        self._channel = channel
        self._host = host
        self._run = run
        self._processes: dict[str, _Process] = {}
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)
        self._about: dict[str, Any] = {}
        self._sample_s: dict[str, float] = {}
        self._orders: deque[tuple[RunTasks, tuple[int, ...]]] = deque()
        self._cycle: _Cycle | None = None
        self._isolation = FaultIsolation[str]()
        self._is_loaded = False
        self._mps_errors = 0

    def serve(self) -> int:
        """Serve until the channel ends. Returns the exit code."""
        try:
            self._load()
            while True:
                for number, _ in self._poll.poll(1000 * self._host.heartbeat_s):
                    self._drain(number)
                self._channel.send(Alive())
        except LeaveRequested:
            return 0

    def _load(self) -> None:
        """Start the processes: on a GPU one after another, so that each is timed alone."""
        for name in self._host.tasks:
            if name not in self._processes:
                self._start(name, 1.0)
                if self._host.lane:
                    return

    def _start(self, name: str, share: float) -> None:
        host = replace(self._host, tasks={name: self._host.tasks[name]})
        level = percent(share) if host.lane else 0
        if host.lane:
            host = replace(host, lane=with_percentage(host.lane, level))
        channel, pid = _fork(host, self._run)
        self._processes[name] = _Process(channel, pid, level, time.perf_counter())
        self._poll.register(channel.fileno(), select.POLLIN)

    def _stop(self, names: Iterable[str]) -> None:
        for name in list(names):
            process = self._processes.pop(name)
            self._poll.unregister(process.channel.fileno())
            process.end()

    def _order(self, work: Work, order: RunTasks, fd: int) -> None:
        """Give a task its work; in another process if it has none with this share. `in_turn` leaves it its lane."""
        process = self._processes.get(work.task)
        if process is not None and self._host.lane and process.percent != percent(work.share):
            self._stop([work.task])
        if work.task not in self._processes:
            self._start(work.task, work.share)
            if order.deadline_s:
                order = replace(order, deadline_s=max(order.deadline_s - self._about[work.task]["load_s"], _LEAST_S))
        process = self._processes[work.task]
        process.is_idle = False
        with contextlib.suppress(Closed):  # it has just died, which the poll tells
            process.channel.send(order, [fd])

    def _drain(self, number: int) -> None:
        """Handle all messages of a task's process, or of the device's own channel."""
        if number == self._channel.fileno():
            while (received := self._channel.receive(0.0)) is not None:
                self._on_order(received)
            return
        name = next((name for name, each in self._processes.items() if each.channel.fileno() == number), None)
        while name is not None and (process := self._processes.get(name)) is not None:
            try:
                received = process.channel.receive(0.0)
            except Closed:
                if not self._host.lane:
                    raise  # the device is started again
                self._on_lost(name, WorkerFailed("device", "its process exited"))
                return
            if received is None:
                return
            self._on_answer(name, process, received)

    def _on_order(self, received: Received) -> None:
        match received.message:
            case Leave():
                raise LeaveRequested
            case RunTasks() as order:
                self._orders.append((order, received.fds))
            case Halt() if self._cycle is not None:
                self._cycle.halt()
        self._proceed()

    def _on_answer(self, name: str, process: _Process, received: Received) -> None:
        match received.message:
            case TasksReady(error=error) as ready if error:
                if self._is_loaded and self._host.lane:
                    self._stop([name])
                    self._fail(name, error)
                    self._proceed()
                else:
                    self._channel.send(ready)
            case TasksReady(tasks=tasks):
                process.is_idle = not self._is_loaded
                self._on_ready(name, tasks, time.perf_counter() - process.began)
            case WorkerFailed() as failed:
                self._on_lost(name, failed)
            case TasksDone() as done:
                assert self._cycle is not None, f"{name} answered without an order"
                process.is_idle = True
                self._isolation.clear(name)
                self._cycle.on_done(name, done, received.fds)
                self._proceed()

    def _on_ready(self, name: str, tasks: dict[str, Any], seconds: float) -> None:
        if self._is_loaded:
            return
        if self._host.lane:
            tasks = {name: {**about, "load_s": seconds} for name, about in tasks.items()}
        self._about |= tasks
        self._sample_s |= {name: each["sample_s"] for name, each in tasks.items()}
        if len(self._about) < len(self._host.tasks):
            self._load()
            return
        self._is_loaded = True
        self._channel.send(TasksReady({task: self._about[task] for task in self._host.tasks}))

    def _on_lost(self, name: str, failed: WorkerFailed) -> None:
        """A process on a lane cannot continue: without lanes if that is why, else again from the round's weights."""
        self._mps_errors += is_mps_error(failed.error)
        if failed.kind in ("lane", "memory") or not self._is_loaded or self._mps_errors >= _MAX_MPS_ERRORS:
            self._stop(self._processes)
            self._channel.send(TasksReady(no_lanes=f"task {name!r}: {failed.error}"))
            raise LeaveRequested
        working = [] if self._cycle is None else self._cycle.working
        is_blamed = self._isolation.on_fault((), [(task, 0) for task in working]) and name in working
        is_blamed = is_blamed and not is_mps_error(failed.error)
        self._stop(self._processes)
        if self._cycle is not None:
            self._cycle.isolate()
        if is_blamed:
            self._fail(name, failed.error)
        self._proceed()

    def _fail(self, name: str, error: str) -> None:
        self._isolation.clear(name)
        if self._cycle is not None:
            self._cycle.fail(name, error)

    def _proceed(self) -> None:
        """Report the cycle when all its tasks are done, and begin the one that was ordered meanwhile."""
        if self._cycle is not None:
            self._cycle.start_next()
        if self._cycle is not None and self._cycle.is_done:
            self._cycle.report(self._channel)
            self._cycle = None
        if self._cycle is None and self._orders:
            order, fds = self._orders.popleft()
            self._cycle = _Cycle(order, fds, self._host, self._sample_s, self._order, self._halt)
            self._cycle.start_next()

    def _halt(self, name: str) -> None:
        if name in self._processes:
            self._processes[name].channel.send(Halt())


@dataclass(slots=True)
class _Core:
    """What one core, or lane, has to do in a cycle."""

    waiting: list[Work] = field(default_factory=list)
    working: str = ""  # its task
    busy_s: float = 0.0  # of the tasks that are done


class _Cycle:
    """The work of one cycle. Descriptors that it is given are its own; weights are kept until their task is done."""

    def __init__(
        self,
        order: RunTasks,
        fds: tuple[int, ...],
        host: HostTasks,
        sample_s: dict[str, float],
        start: Callable[[Work, RunTasks, int], object],
        halt: Callable[[str], object],
    ) -> None:
        self._order = order
        self._start = start
        self._halt = halt
        self._is_emulated = bool(host.slowdown)
        self._sample_s = sample_s
        self._began = time.perf_counter()
        self._work = {str(fields[0]): Work(*fields) for fields in order.work}  # type: ignore[arg-type]
        self._given = dict(zip(self._work, fds, strict=True))
        self._results: dict[str, tuple[dict[str, Any], int | None]] = {}
        at_once = len(host.cores) if not host.lane else 1 if order.in_turn else len(self._work)
        costs = {name: work.samples * sample_s.get(name, 0.0) for name, work in self._work.items()}
        self._cores = [_Core([self._work[name] for name in names]) for names in dealt(costs, at_once)]

    @property
    def is_done(self) -> bool:
        return len(self._results) == len(self._work)

    @property
    def working(self) -> list[str]:
        """The tasks whose processes work."""
        return [core.working for core in self._cores if core.working]

    def halt(self) -> None:
        """Stop the running tasks, and begin no others."""
        for core in self._cores:
            for work in core.waiting:
                self._skip(work)
            core.waiting.clear()
        for name in self.working:
            self._halt(name)

    def isolate(self) -> None:
        """Begin all tasks that are not done again, one after the other."""
        begun = [self._work[name] for name in self.working]
        left = [work for core in self._cores for work in core.waiting]
        self._cores = [_Core(begun + left, busy_s=max(core.busy_s for core in self._cores))]

    def on_done(self, name: str, done: TasksDone, fds: tuple[int, ...]) -> None:
        (result,) = done.results
        if result["samples"] and result["busy_s"]:
            self._sample_s[name] = result["busy_s"] / result["samples"]
        self._end(name, result, fds[0] if fds else None, done.seconds)

    def fail(self, name: str, error: str) -> None:
        """Report a task that cannot be done, unless it is done already."""
        if name in self._work and name not in self._results:
            work = self._work[name]
            failed = TaskResult(work.task, work.round, outcome=Outcome.FAILED, detail=error)
            self._end(name, failed._asdict(), None)

    def _end(self, name: str, result: dict[str, Any], fd: int | None, seconds: float = 0.0) -> None:
        os.close(self._given.pop(name))
        self._results[name] = result, fd
        for core in self._cores:
            core.waiting = [work for work in core.waiting if work.task != name]
            if core.working == name:
                core.working = ""
                core.busy_s += seconds

    def report(self, channel: Channel) -> None:
        """Send the results in the order of the tasks."""
        seconds = max(core.busy_s for core in self._cores) if self._is_emulated else time.perf_counter() - self._began
        found = [self._results[name] for name in self._work]
        fds = [fd for _, fd in found if fd is not None]
        channel.send(TasksDone(self._order.cycle, tuple(result for result, _ in found), seconds), fds)
        close_all(fds)

    def start_next(self) -> None:
        """Let the next task of each idle core work, if there is one and time is left."""
        for core in self._cores:
            while core.waiting and not core.working:
                left_s = self._left_s(core)
                part = core.waiting[0].share / sum(work.share for work in core.waiting)
                work = core.waiting.pop(0)
                if self._order.deadline_s and left_s <= 0.0:
                    self._skip(work)
                    continue
                deadline_s = left_s * part if self._order.deadline_s else 0.0
                core.working = work.task
                self._start(work, replace(self._order, work=(work,), deadline_s=deadline_s), self._given[work.task])

    def _left_s(self, core: _Core) -> float:
        spent_s = core.busy_s if self._is_emulated else time.perf_counter() - self._began
        return self._order.deadline_s - spent_s

    def _skip(self, work: Work) -> None:
        """The result of a task that was not begun."""
        os.close(self._given.pop(work.task))
        self._results[work.task] = TaskResult(work.task, work.round)._asdict(), None


def _fork(host: HostTasks, run: Host) -> tuple[Channel, int]:
    """Start a process that hosts these tasks. Returns our end of its channel, and its pid."""
    ours, theirs = pair()
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        ours.close()
        _become_host(parent, Channel(theirs), host, run)
    theirs.close()
    return Channel(ours), pid


def _become_host(parent: int, channel: Channel, host: HostTasks, run: Host) -> NoReturn:
    code = 1
    try:
        exit_with_parent(parent)
        close_all_but(channel.fileno())  # the weights of other tasks
        code = run(channel, host)
    except (Closed, LeaveRequested):
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may reach the frames of the device
        traceback.print_exc()
    finally:
        os._exit(code)
