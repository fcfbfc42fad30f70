"""Task processes: a device of several cores works on its tasks side by side, each in a process of its own."""

from __future__ import annotations

import os
import select
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from carpool.federated.cycle_plan import dealt
from carpool.federated.messages import TaskResult, Work
from carpool.runtime.compat.process_lifetime import exit_with_parent
from carpool.runtime.errors import LeaveRequested
from carpool.runtime.process.channel import Channel, Closed, Heartbeat, Received, close_all, pair
from carpool.runtime.process.protocol import Halt, HostTasks, Leave, RunTasks, TasksDone, TasksReady

Host = Callable[[Channel, HostTasks], int]


@dataclass(slots=True)
class _Core:
    """The work of one core in a cycle."""

    waiting: list[Work] = field(default_factory=list)
    busy_s: float = 0.0  # of the tasks that are done


class TaskProcesses:
    """Forks a process per task, as many of which work at once as the device has cores.

    The tasks of a cycle are dealt to the cores, those that take longest first; on a core they follow one another. At a
    deadline each gets its part of the time that is left, by shares. Each process is a device with one task, so that its
    update is bitwise that of the tasks in turn.
    """

    def __init__(self, channel: Channel, host: HostTasks, run: Host) -> None:
        self._channel = channel
        self._host = host
        self._lanes = {name: _fork(replace(host, tasks={name: spec}), run) for name, spec in host.tasks.items()}
        self._names = {lane.fileno(): name for name, lane in self._lanes.items()}
        self._poll = select.poll()
        for number in (channel.fileno(), *self._names):
            self._poll.register(number, select.POLLIN)
        self._about: dict[str, Any] = {}
        self._sample_s: dict[str, float] = {}
        self._orders: deque[tuple[RunTasks, tuple[int, ...]]] = deque()
        self._cycle: _Cycle | None = None

    def serve(self) -> int:
        """Serve until the channel ends. Returns the exit code. If a task's process exits, the device ends."""
        Heartbeat(self._channel, self._host.heartbeat_s).start()  # a thread, which would not survive the forks
        try:
            while True:
                for number, _ in self._poll.poll():
                    self._drain(self._names.get(number, ""))
        except LeaveRequested:
            return 0

    def _drain(self, name: str) -> None:
        """Handle all messages of a task's process, or of the device's own channel."""
        channel = self._lanes[name] if name else self._channel
        while (received := channel.receive(0.0)) is not None:
            if name:
                self._on_answer(name, received)
            else:
                self._on_order(received)

    def _on_order(self, received: Received) -> None:
        match received.message:
            case Leave():
                raise LeaveRequested
            case RunTasks() as order:
                self._orders.append((order, received.fds))
            case Halt() if self._cycle is not None:
                self._cycle.halt()
        self._proceed()

    def _on_answer(self, name: str, received: Received) -> None:
        match received.message:
            case TasksReady(error=error) as ready if error:
                self._channel.send(ready)
            case TasksReady(tasks=tasks):
                self._about |= tasks
                self._sample_s |= {name: each["sample_s"] for name, each in tasks.items()}
                if len(self._about) == len(self._lanes):
                    self._channel.send(TasksReady({task: self._about[task] for task in self._lanes}))
            case TasksDone() as done:
                assert self._cycle is not None, f"{name} answered without an order"
                self._cycle.on_done(name, done, received.fds)
                self._proceed()

    def _proceed(self) -> None:
        """Report the cycle when all its tasks are done, and begin the one that was ordered meanwhile."""
        if self._cycle is not None and self._cycle.is_done:
            self._cycle.report(self._channel)
            self._cycle = None
        if self._cycle is None and self._orders:
            self._cycle = _Cycle(*self._orders.popleft(), self._lanes, self._host, self._sample_s)


class _Cycle:
    """The work of one cycle. Descriptors that it is given are its own."""

    def __init__(
        self,
        order: RunTasks,
        fds: tuple[int, ...],
        lanes: Mapping[str, Channel],
        host: HostTasks,
        sample_s: dict[str, float],
    ) -> None:
        self._order = order
        self._lanes = lanes
        self._is_emulated = bool(host.slowdown)
        self._sample_s = sample_s
        self._began = time.perf_counter()
        self._work = {str(fields[0]): Work(*fields) for fields in order.work}  # type: ignore[arg-type]
        self._given = dict(zip(self._work, fds, strict=True))
        self._results: dict[str, tuple[dict[str, Any], int | None]] = {}
        costs = {name: work.samples * sample_s.get(name, 0.0) for name, work in self._work.items()}
        self._cores = [_Core([self._work[name] for name in names]) for names in dealt(costs, len(host.cores))]
        self._core_of = {str(work.task): core for core in self._cores for work in core.waiting}
        for core in self._cores:
            self._start_next(core)

    @property
    def is_done(self) -> bool:
        return len(self._results) == len(self._work)

    def halt(self) -> None:
        """Stop the running tasks, and begin no others."""
        for core in self._cores:
            for work in core.waiting:
                self._skip(work)
            core.waiting.clear()
        for name in self._work.keys() - self._results.keys():
            self._lanes[name].send(Halt())

    def on_done(self, name: str, done: TasksDone, fds: tuple[int, ...]) -> None:
        (result,) = done.results
        self._results[name] = result, fds[0] if fds else None
        if result["samples"] and result["busy_s"]:
            self._sample_s[name] = result["busy_s"] / result["samples"]
        core = self._core_of[name]
        core.busy_s += done.seconds
        self._start_next(core)

    def report(self, channel: Channel) -> None:
        """Send the results in the order of the tasks."""
        seconds = max(core.busy_s for core in self._cores) if self._is_emulated else time.perf_counter() - self._began
        found = [self._results[name] for name in self._work]
        fds = [fd for _, fd in found if fd is not None]
        channel.send(TasksDone(self._order.cycle, tuple(result for result, _ in found), seconds), fds)
        close_all(fds)

    def _start_next(self, core: _Core) -> None:
        """Let the next task of a core work, if there is one and time is left."""
        while core.waiting:
            left_s = self._left_s(core)
            part = core.waiting[0].share / sum(work.share for work in core.waiting)
            work = core.waiting.pop(0)
            if self._order.deadline_s and left_s <= 0.0:
                self._skip(work)
                continue
            deadline_s = left_s * part if self._order.deadline_s else 0.0
            fd = self._given.pop(work.task)
            self._lanes[work.task].send(RunTasks(self._order.cycle, (work,), deadline_s), [fd])
            os.close(fd)
            return

    def _left_s(self, core: _Core) -> float:
        spent_s = core.busy_s if self._is_emulated else time.perf_counter() - self._began
        return self._order.deadline_s - spent_s

    def _skip(self, work: Work) -> None:
        """The result of a task that was not begun."""
        os.close(self._given.pop(work.task))
        self._results[work.task] = TaskResult(work.task, work.round)._asdict(), None


def _fork(host: HostTasks, run: Host) -> Channel:
    """Start a process that hosts these tasks. Returns our end of its channel."""
    ours, theirs = pair()
    parent = os.getpid()
    if not os.fork():
        ours.close()
        _become_host(parent, Channel(theirs), host, run)
    theirs.close()
    return Channel(ours)


def _become_host(parent: int, channel: Channel, host: HostTasks, run: Host) -> NoReturn:
    code = 1
    try:
        exit_with_parent(parent)
        code = run(channel, host)
    except (Closed, LeaveRequested):
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may reach the frames of the device
        traceback.print_exc()
    finally:
        os._exit(code)
