"""Device worker: hosts the tasks of one device of a federation, and works on all of them in each cycle."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from carpool.core.errors import InputError
from carpool.federated.messages import Outcome, TaskResult, Work
from carpool.federated.updates import Weights, decode_weights, encode_weights
from carpool.jobs.program import Program
from carpool.runtime.compat.process_lifetime import set_process_name
from carpool.runtime.engine.training import as_metrics
from carpool.runtime.errors import LaneMismatch, LeaveRequested
from carpool.runtime.federation.flower_task import ClientAppTask, Evaluate, load_model
from carpool.runtime.federation.local_runs import LocalRuns, RoundTask
from carpool.runtime.federation.local_task import (
    as_arrays,
    check_federated,
    load_local_task,
    trained_names,
)
from carpool.runtime.federation.task_processes import TaskProcesses, works_side_by_side
from carpool.runtime.process.channel import Channel, Heartbeat, close_all
from carpool.runtime.process.protocol import (
    EvaluateTask,
    Halt,
    HostTasks,
    Leave,
    RunTasks,
    TaskEvaluated,
    TasksDone,
    TasksReady,
    WorkerFailed,
)
from carpool.runtime.process.shared_memory import memory_file_of, read_memory_file
from carpool.runtime.process.worker_setup import configure_job, inspect_gpu, load_program, start_cuda_lane
from carpool.runtime.worker.error_classifier import describe_error, failure_message, is_process_lost, root_cause

_TIMED_STEPS = {False: (1, 2), True: (8, 10)}  # of a task before the first cycle, by graphs: not counted, and counted
_LOST = 3  # exit code of a task's process that has lost its lane or GPU


def host_tasks(channel: Channel, host: HostTasks) -> int:
    """Serve one device, or the server, of a federation until its channel ends. Returns the exit code."""
    if works_side_by_side(host):
        return TaskProcesses(channel, host, host_tasks).serve()
    Heartbeat(channel, host.heartbeat_s).start()
    worker: _Device | _Server = _Server(channel, host) if host.part is None else _Device(channel, host)
    try:
        _configure(host)
        worker.load()
    except (Exception, SystemExit) as raised:  # noqa: BLE001 - an entry may raise anything
        if host.lane and is_process_lost(error := root_cause(raised)):
            channel.send(failure_message(error, 0))
            return _LOST
        channel.send(TasksReady(error=describe_error(raised)))
    try:
        return _serve(channel, worker)
    except _Lost as lost:
        channel.send(lost.message)
        return _LOST


def _serve(channel: Channel, worker: _Device | _Server) -> int:
    while True:
        received = channel.receive()
        assert received is not None, "without a timeout there is a message or an end"
        try:
            match received.message:
                case Leave():
                    return 0
                case RunTasks() as run if isinstance(worker, _Device):
                    worker.run(run, [_read_weights(fd) for fd in received.fds])
                case EvaluateTask() as evaluate if isinstance(worker, _Server):
                    worker.evaluate(evaluate, _read_weights(received.fds[0]))
        finally:
            close_all(received.fds)


def _configure(host: HostTasks) -> None:
    set_process_name(f"carpool:{host.name}")
    if host.cores:
        os.sched_setaffinity(0, host.cores)
    torch.set_num_threads(host.threads)
    os.environ.update(host.lane)
    if host.device.startswith("cuda"):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        device = torch.device(host.device)
        if device.index >= count:
            raise InputError(f"device {host.name} is {host.device}, and torch sees {count} GPUs", way_out="Use 'cpu'.")
        torch.cuda.set_device(device)
        start_cuda_lane(device, host.lane)
        if host.lane and inspect_gpu(device).is_mps_client is False:  # with 100 % its multiprocessors do not tell
            raise LaneMismatch("MPS is not active")


class _Lost(Exception):
    """This process, a client of MPS, cannot continue."""

    def __init__(self, message: WorkerFailed) -> None:
        super().__init__(message.error)
        self.message = message


def _read_weights(fd: int) -> Weights:
    """Weights from a memory file."""
    return decode_weights(read_memory_file(fd))


class _Server:
    """Has the initial weights of the tasks, and evaluates."""

    def __init__(self, channel: Channel, host: HostTasks) -> None:
        self._channel = channel
        self._host = host
        self._models: dict[str, tuple[nn.Module, Evaluate | None]] = {}

    def load(self) -> None:
        found, fds = {}, []
        for name, spec in self._host.tasks.items():
            program = Program(**spec["program"])
            configure_job(program)
            if spec["client_app"]:
                model, evaluate, batch_size = *load_model(program), program.batch_size
            else:
                training = load_program(program)
                check_federated(training, program.entry, spec["proximal"])
                model, evaluate = training.model, training.evaluate
                batch_size = program.batch_size or training.batch_size
            self._models[name] = model, evaluate
            found[name] = {"batch_size": batch_size, "trained": trained_names(model)}
            fds.append(memory_file_of(encode_weights(as_arrays(model)), name))
        self._channel.send(TasksReady(found), fds)
        close_all(fds)

    def evaluate(self, request: EvaluateTask, weights: Weights) -> None:
        (model, evaluate), metrics, error = self._models[request.task], {}, ""
        if evaluate is not None:
            model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
            model.eval()
            try:
                with torch.no_grad():
                    metrics = as_metrics(evaluate(model))
            except Exception as raised:  # noqa: BLE001 - it is the user's function
                error = describe_error(raised)
        self._channel.send(TaskEvaluated(request.task, request.rounds, metrics, error))


class _Device:
    """Works on its tasks in turns, in proportion to their shares."""

    def __init__(self, channel: Channel, host: HostTasks) -> None:
        self._channel = channel
        self._host = host
        self._tasks: dict[str, RoundTask] = {}
        self._clock: Callable[[], float] = time.process_time if host.slowdown else time.perf_counter

    def load(self) -> None:
        found, part = {}, self._host.part
        assert part is not None
        for name, spec in self._host.tasks.items():
            configure_job(Program(**spec["program"]))
            task, volume = self._load(spec, part)
            found[name] = {"volume": volume, "sample_s": 0.0}
            if task is not None:
                self._tasks[name] = task
                found[name]["sample_s"] = self._sample_s(task)
        self._channel.send(TasksReady(found))

    def _load(self, spec: Mapping[str, Any], part: int) -> tuple[RoundTask | None, int]:
        if not spec["client_app"]:
            task, volume = load_local_task(spec, part, self._host.num_parts, torch.device(self._host.device))
            if task is not None:
                task.awaits_device = not self._host.lane  # a lane is the task's own
            return task, volume
        app = ClientAppTask(spec, part, self._host.num_parts)
        return (app, app.num_samples) if app.num_samples else (None, 0)

    def _sample_s(self, task: RoundTask) -> float:
        """Seconds per sample, from a few steps; each round loads its own weights, so they leave no trace.

        0 if a step fails: the first round reports it, and the other tasks continue.
        """
        try:
            return self._time_steps(task)
        except Exception as error:  # noqa: BLE001 - a training may raise anything
            self._check(error)
            return 0.0

    def _time_steps(self, task: RoundTask) -> float:
        if isinstance(task, ClientAppTask):
            warm_up, timed = 0, 1  # its first call was made when it was loaded
        else:
            warm_up, timed = _TIMED_STEPS[task.has_graphs]
        task.begin(task.weights(), 0, (warm_up + timed) * task.batch_size, task.batch_size)
        for _ in range(warm_up):
            task.step()
        before, seconds = task.progress.samples, 0.0
        while not task.progress.is_done:
            seconds += self._timed(task.step)
        return seconds / max(task.progress.samples - before, 1)

    def _check(self, error: Exception) -> None:
        """Raise if the process is a client of MPS that cannot continue, so that others on the GPU cannot either."""
        if self._host.lane and is_process_lost(cause := root_cause(error)):
            raise _Lost(failure_message(cause, 0)) from error

    def _timed(self, action: Callable[[], object]) -> float:
        """Seconds of an action; on an emulated device, its CPU seconds times the slowdown."""
        began = self._clock()
        action()
        return (self._clock() - began) * (self._host.slowdown or 1.0)

    def run(self, order: RunTasks, weights: list[Weights]) -> None:
        began = time.perf_counter()
        cycle = CycleRun(order, self._tasks, self._timed, self._check)
        for fields, given in zip(order.work, weights, strict=True):
            cycle.begin(Work(*fields), given)  # type: ignore[arg-type]
        while cycle.step() and not self._is_halted():
            pass
        seconds = sum(cycle.busy_s.values()) if self._host.slowdown else time.perf_counter() - began
        results, fds = [], []
        for result in cycle.results():
            if result.steps:
                data = encode_weights(cycle.weights(result.task))
                fds.append(memory_file_of(data, result.task))
                result = result._replace(num_bytes=len(data))
            results.append(result._asdict())
        self._channel.send(TasksDone(order.cycle, tuple(results), seconds), fds)
        close_all(fds)

    def _is_halted(self) -> bool:
        """Whether the cycle was closed without this device."""
        if not self._channel.poll():
            return False
        received = self._channel.receive()
        assert received is not None
        if isinstance(received.message, Leave):
            raise LeaveRequested
        return isinstance(received.message, Halt)


class CycleRun:
    """Steps the tasks of a device in turns until all are done or the deadline has passed.

    The next turn is that of the task whose time divided by its share is the least (stride scheduling). A task that is
    done, or fails, leaves its time to the others.
    """

    def __init__(
        self,
        order: RunTasks,
        tasks: Mapping[str, RoundTask],
        timed: Callable[[Callable[[], object]], float],
        check: Callable[[Exception], object] = lambda error: None,  # raises if no task can continue
    ) -> None:
        self._deadline_s = order.deadline_s
        self._tasks = tasks
        self._timed = timed
        self._check = check
        self._work: dict[str, Work] = {}
        self._runs: dict[str, LocalRuns] = {}
        self._errors: dict[str, str] = {}
        self._active: set[str] = set()
        self.busy_s: dict[str, float] = {}

    def begin(self, work: Work, weights: Weights) -> None:
        self._work[work.task], self.busy_s[work.task] = work, 0.0
        task = self._tasks.get(work.task)
        if task is None:
            self._errors[work.task] = "the device has no data of this task"
            return
        self._active.add(work.task)
        self._runs[work.task] = LocalRuns(task, work, weights)
        self._attempt(work.task, self._runs[work.task].begin)

    def step(self) -> bool:
        """Make one step of a task; False if none is left."""
        if not self._active or (self._deadline_s and sum(self.busy_s.values()) >= self._deadline_s):
            return False
        name = min(self._active, key=lambda name: (self.busy_s[name] / self._work[name].share, name))
        self._attempt(name, self._runs[name].step)
        if self._runs[name].progress.is_done:
            self._active.discard(name)
        return True

    def _attempt(self, name: str, action: Callable[[], object]) -> None:
        try:
            self.busy_s[name] += self._timed(action)
        except Exception as error:  # noqa: BLE001 - a training may raise anything; the other tasks continue
            self._check(error)
            self._errors[name] = describe_error(error)
            self._active.discard(name)

    def weights(self, name: str) -> Weights:
        """The update of a task."""
        return self._runs[name].weights()

    def results(self) -> list[TaskResult]:
        found = []
        for name, work in self._work.items():
            result = TaskResult(work.task, work.round, busy_s=self.busy_s[name])
            if name in self._errors:
                found.append(result._replace(outcome=Outcome.FAILED, detail=self._errors[name]))
            else:
                done = self._runs[name].progress
                found.append(result._replace(samples=done.samples, steps=done.steps, loss=done.loss))
        return found
