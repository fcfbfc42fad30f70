"""Process of a command job: launched under the reaper in its folder, on its cores, with its log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from carpool.core.errors import CarpoolError
from carpool.core.messages import Fact
from carpool.core.model import JobId
from carpool.core.typed_fields import shown
from carpool.jobs.devices import LocalDevice, cuda_visible_names
from carpool.jobs.host import CoreAllocator
from carpool.jobs.program import Program
from carpool.jobs.untrusted_file import last_line
from carpool.logs import log_event
from carpool.runtime.commands.command_metrics import CommandMetrics, EvaluationLimiter
from carpool.runtime.commands.command_parking import CommandParking, ParkingError
from carpool.runtime.commands.command_start import (
    Descriptors,
    ForkedCommand,
    RunInFork,
    StartedCommand,
    can_fork,
    command_line,
    spawn,
    start_progress_reader,
)
from carpool.runtime.commands.command_state import (
    Beside,
    CommandAction,
    CommandPhase,
    CommandState,
    Launch,
    Move,
    Park,
    Restore,
    Terminate,
)
from carpool.runtime.commands.metric_lines import MetricRow
from carpool.runtime.executor.job_folder import JobFolder
from carpool.runtime.executor.reports import Evaluation, Report, Sized, Told
from carpool.runtime.job_state.actions import Emit, Ended, Note, Stopped
from carpool.runtime.job_state.types import Target, WorkerSlot
from carpool.runtime.memory.declared_memory import resident_bytes
from carpool.runtime.memory.oom_kills import OomKills
from carpool.runtime.process.channel import AsyncChannel, Closed, ProtocolError, close_all, pair
from carpool.runtime.process.process_tree import bind_tree, continue_tree, descendants, kill_tree, stop_tree
from carpool.runtime.process.protocol import Evaluated, Joined, Message, Proceed, ProgressFound, RunProgram
from carpool.runtime.process.reaper import NOT_STARTED

_LEAST_FREE = 1 << 16  # bytes; with less free, the disk counts as full when a command fails
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_COLLECT_S = 1.0  # between readings of a command's metrics
_DRAIN_S = 2.0  # after a command's exit, for messages of its session
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # the second is what a shell reports
_log = logging.getLogger(__name__)
LookBeside = Callable[[Sequence[WorkerSlot]], Beside]  # the other jobs on the GPUs of slots
LaneEnvironment = Callable[[Sequence[WorkerSlot]], dict[str, str]]  # variables that keep it on its lanes of a GPU


class CommandListener(Protocol):
    """Receives the facts, reports and session messages of commands."""

    def on_command(self, command: CommandProcess, facts: Sequence[Fact], reports: Sequence[Report]) -> None: ...

    def on_session_message(self, command: CommandProcess, message: Message) -> None: ...


class CommandProcess:
    """Carries out the actions of a `CommandState`."""

    def __init__(
        self,
        job: JobId,
        program: Program,
        folder: JobFolder,
        devices: Mapping[int, LocalDevice],
        cores: CoreAllocator,
        grace_s: float,
        listener: CommandListener,
        parking: CommandParking | None = None,
        run_in_fork: RunInFork | None = None,
        lane_environment: LaneEnvironment = lambda slots: {},
        oom_kills: OomKills | None = None,
        look_beside: LookBeside = lambda slots: Beside(),
    ) -> None:
        self._parking = parking or CommandParking()
        self._look_beside = look_beside
        self._keeps_work = self._parking.keeps_work(devices.values())
        self.state = CommandState(
            job,
            time_limit_s=program.time_limit_s,
            retries=program.retries,
            resumable=program.resumable,
            can_park=self._keeps_work,
            cpu_devices=[number for number, device in devices.items() if device.cuda is None],
        )
        self.time_sliced = False
        self.program = program
        self._folder = folder
        self._devices = devices
        self._cores = cores
        self._grace_s = grace_s
        self._listener = listener
        self._channel: AsyncChannel | None = None  # to its session, if it has one
        self._run_in_fork = run_in_fork
        self._lane_environment = lane_environment
        self._oom_kills = oom_kills or OomKills()
        self._epoch = 0
        self._process: StartedCommand | None = None
        self._launching: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._lifeline: int | None = None  # the reaper kills everything when this is closed
        self._parking_task: asyncio.Task[None] | None = None
        self._finishing: asyncio.Task[None] | None = None
        self._exited = asyncio.Event()
        self._exited.set()
        self._metrics: CommandMetrics | None = None  # of the current process
        self._collecting: asyncio.Task[None] | None = None
        self._collected_at = 0.0
        self._evaluations = EvaluationLimiter()

    def order(self, at: float, target: Target) -> None:
        self._look(at, target.slots)
        self._run(self.state.order(at, target))

    def _look(self, at: float, slots: Sequence[WorkerSlot]) -> None:
        """Find out which other jobs are on these GPUs and, before it starts, whether it can be parked there."""
        self.state.look(at, self._look_beside(slots))
        if not self.state.has_processes and slots:  # the driver cannot park clients of MPS
            self.state.can_park = self._keeps_work and not self._lane_environment(slots)

    def stop(self, at: float) -> None:
        self._run(self.state.stop(at))

    def tick(self, at: float) -> None:
        self._look(at, self.state.target.slots)
        self._run(self.state.tick(at))
        self._report_metrics(self._evaluations.flush(at))
        if self._metrics is not None and self._collecting is None and at - self._collected_at >= _COLLECT_S:
            self._collected_at = at
            self._collecting = asyncio.create_task(self._collect(self._metrics))

    def resident_bytes(self) -> int:
        """RAM of all its processes; 0 while it has none."""
        process = self._process
        return 0 if process is None else resident_bytes([process.pid, *descendants(process.pid)])

    def fail(self, error: str) -> None:
        self._run(self.state.fail(asyncio.get_running_loop().time(), error))

    def send(self, message: Message) -> None:
        """Send a message to its session; ignored without one."""
        if self._channel is not None:
            self._channel.send(message)

    def set_time_sliced(self, *, time_sliced: bool) -> None:
        self.time_sliced = time_sliced
        self._epoch += 1
        self.send(Proceed(self._epoch, time_sliced=time_sliced))

    def freeze(self, *, frozen: bool) -> None:
        """Stop the processes of the command, or continue them unless it is parked.

        To be called again while frozen: a process may fork before it is stopped. If the command was told to terminate,
        it is killed: stopped, it could not exit.
        """
        if self._process is not None and frozen:
            is_ending = self.state.phase is CommandPhase.TERMINATING
            (kill_tree if is_ending else stop_tree)(self._process.pid)
        elif self._process is not None and self.state.phase is not CommandPhase.PARKED:
            continue_tree(self._process.pid)

    def kill(self) -> None:
        if self._launching is not None and asyncio.current_task() is not self._launching:
            self._launching.cancel()  # has no effect once it has started
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    @property
    def has_process(self) -> bool:
        return self._process is not None

    @property
    def has_exited(self) -> bool:
        return self._exited.is_set()

    async def wait(self) -> None:
        await self._exited.wait()
        if self._finishing is not None:
            await self._finishing
        self.close()

    def close(self) -> None:
        self._folder.close()

    def _run(self, actions: Sequence[CommandAction]) -> None:
        facts: list[Fact] = []
        reports: list[Report] = []
        job = self.state.job
        for action in actions:
            match action:
                case Launch(slots):
                    self._launch(slots)
                case Move(slots):
                    self._move(slots)
                case Park():
                    self._parking_task = asyncio.create_task(self._park())
                case Restore(slots):
                    self._parking_task = asyncio.create_task(self._restore(slots))
                case Terminate():
                    if self._parking_task is not None:
                        self._parking_task.cancel()
                    self._stopping = asyncio.create_task(self._stop())
                case Note(text):
                    reports.append(Told(job, text))
                case Emit(fact):
                    facts.append(fact)
                case Ended() as end:
                    reports.append(end.outcome(job))
                    log_event(_log, "job_ended", job=job, steps=end.steps, reason=end.reason)
                case Stopped():
                    pass
        self._listener.on_command(self, facts, reports)

    async def _stop(self) -> None:
        """Terminate the command, also one that is still starting."""
        process = await self._started()
        if process is not None:
            process.terminate()
            continue_tree(process.pid)  # stopped processes do not handle SIGTERM

    async def _started(self) -> StartedCommand | None:
        if self._launching is not None:
            await asyncio.wait({self._launching})
        return self._process

    def _move(self, slots: tuple[WorkerSlot, ...]) -> None:
        if self._process is not None and (cores := self._cores_of(slots)):
            bind_tree(self._process.pid, cores)

    async def _park(self) -> None:
        clock = asyncio.get_running_loop().time
        process = await self._started()
        if process is None:
            return
        devices = [self._devices[slot.device] for slot in self.state.slots]
        try:
            how = await self._parking.park(process.pid, devices)
        except ParkingError as error:
            self._run(self.state.parking_failed(clock(), str(error)))
        else:
            log_event(_log, "command_parked", job=self.state.job, how=how)
            self._run(self.state.parked(clock(), how))

    async def _restore(self, slots: tuple[WorkerSlot, ...]) -> None:
        clock = asyncio.get_running_loop().time
        process = self._process
        assert process is not None
        try:
            await self._parking.restore(process.pid, self._cores_of(slots))
        except ParkingError as error:
            self._run(self.state.restoring_failed(clock(), str(error)))
        else:
            log_event(_log, "command_restored", job=self.state.job)
            self._run(self.state.restored(clock()))

    def _launch(self, slots: tuple[WorkerSlot, ...]) -> None:
        self._exited.clear()
        self._launching = asyncio.create_task(self._start(slots))
        self._launching.add_done_callback(lambda task: self._exited.set() if task.cancelled() else None)

    async def _start(self, slots: tuple[WorkerSlot, ...]) -> None:
        """Start the command, and finish when it has exited."""
        theirs, self._lifeline = os.pipe()
        ours, end = pair()
        log, folder = self._folder.path / "log", Path(self.program.folder)
        metrics = CommandMetrics(log, folder, self.program.metrics, since=time.time() - 1.0)
        try:
            log_size = os.fstat(self._folder.log()).st_size
            process = await self._start_process(slots, Descriptors(self._folder.log(), theirs, end.fileno()))
        except (OSError, ValueError) as error:  # ValueError for arguments that no program can be given
            ours.close()
            self.kill()
            self._exited.set()
            self._start_failed(f"the command could not be started: {error}")
            return
        except asyncio.CancelledError:
            ours.close()
            raise
        finally:
            os.close(theirs)
            end.close()
        names = [self._devices[slot.device].name for slot in slots]
        log_event(_log, "command_started", job=self.state.job, pid=process.pid, devices=names)
        self._process, self._metrics = process, metrics
        self._channel = AsyncChannel(ours)
        receiving = asyncio.create_task(self._receive(self._channel))
        self._finishing = asyncio.create_task(self._finish(process, receiving))
        if self.program.progress:
            self._reading = asyncio.create_task(self._read_progress(log_size))

    async def _start_process(self, slots: tuple[WorkerSlot, ...], fds: Descriptors) -> StartedCommand:
        devices = [self._devices[slot.device] for slot in slots]
        cores = self._cores_of(slots) or [*self._cores.claim(self.state.job, self.program.cpus * len(slots))]
        folder = Path(self.program.folder) if self.program.folder else Path.cwd()
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is not a folder")
        command, environment = command_line(self.program), self._environment(slots, devices, cores)
        if self._run_in_fork is not None and can_fork(self.program, command, folder):
            request = RunProgram(tuple(command), str(folder), environment, tuple(cores), self._grace_s)
            forked = await self._try_fork(request, fds)
            if forked is not None:
                return forked
        return spawn(command, folder, environment, cores, self._grace_s, fds)

    async def _try_fork(self, request: RunProgram, fds: Descriptors) -> StartedCommand | None:
        """The command in a fork of the fork server; None if it needs a plain start."""
        assert self._run_in_fork is not None
        try:
            channel, answer = await self._run_in_fork(request, *fds)
        except (CarpoolError, OSError) as error:
            reason = str(error)
        else:
            if not answer.error:
                return ForkedCommand(channel, answer.pid)
            channel.close()
            reason = answer.error
        log_event(_log, "command_not_forked", job=self.state.job, reason=reason)
        return None

    def _cores_of(self, slots: tuple[WorkerSlot, ...]) -> list[int]:
        """Cores of the devices; none on GPUs."""
        return sorted({core for slot in slots for core in self._devices[slot.device].cores})

    async def _read_progress(self, start: int) -> None:
        """Report the progress that the command's output shows, until it has exited."""
        reader, channel = start_progress_reader(self.program.progress, self._folder.path / "log", start)
        total: float | None = None
        try:
            while True:
                message = (await channel.receive()).message
                self._run(self.state.message(asyncio.get_running_loop().time(), message))
                if isinstance(message, ProgressFound) and message.total != total:
                    total = message.total
                    size = None if total is None else round(total)
                    self._listener.on_command(self, (), [Sized(self.state.job, size)])
        except (Closed, ProtocolError):
            pass
        finally:
            channel.close()
            reader.kill()
            reader.wait()

    async def _receive(self, channel: AsyncChannel) -> None:
        try:
            while True:
                message, fds = await channel.receive()
                close_all(fds)
                self._on_message(message)
        except Closed:
            pass
        except ProtocolError as error:
            self.fail(f"its session sent {error}")
        except Exception as error:  # noqa: BLE001 - one job's message must not end the executor
            log_event(_log, "message_failed", level=logging.ERROR, job=self.state.job, error=repr(error))
            self.fail(f"a message of its session could not be handled: {shown(error)}")

    def _on_message(self, message: Message) -> None:
        now = asyncio.get_running_loop().time()
        self._run(self.state.message(now, message))
        self._listener.on_session_message(self, message)
        if isinstance(message, Joined):
            self._listener.on_command(self, (), [Sized(self.state.job, message.total_steps)])
            self.set_time_sliced(time_sliced=self.time_sliced)
        elif isinstance(message, Evaluated):
            self._report_metrics(self._evaluations.add(now, MetricRow(message.step, message.metrics)))

    async def _collect(self, metrics: CommandMetrics, *, is_last: bool = False) -> None:
        """Report the metrics that the command has printed or written; reading takes place in a thread."""
        rows = await asyncio.to_thread(metrics.poll, is_last=is_last)
        self._collecting = None
        self._report_metrics(rows)

    def _report_metrics(self, rows: Sequence[MetricRow]) -> None:
        if rows:
            self._listener.on_command(self, (), [Evaluation(self.state.job, row.step, row.metrics) for row in rows])

    def _environment(
        self, slots: tuple[WorkerSlot, ...], devices: list[LocalDevice], cores: list[int]
    ) -> dict[str, str]:
        share = 1.0 if self.program.cpus and not devices[0].cores else min(slot.fraction for slot in slots)
        threads = max(1, round(share * len(cores)))
        indices = dict.fromkeys(device.cuda for device in devices if device.cuda is not None)
        gpus = cuda_visible_names(indices, os.environ.get("CUDA_VISIBLE_DEVICES"))
        return {
            **os.environ,
            **dict.fromkeys(_THREAD_VARIABLES, self.program.environment.get(_THREAD_VARIABLES[0], str(threads))),
            **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
            **self._lane_environment(slots),
            "CARPOOL_JOB": self.state.job,
            "CARPOOL_FOLDER": str(self._folder.path),
            "CARPOOL_DEVICES": ",".join(device.name for device in devices),
            "CARPOOL_CORES": ",".join(map(str, cores)),
            "CARPOOL_FRACTION": ",".join(f"{slot.fraction:g}" for slot in slots),
            "CARPOOL_THREADS": str(threads),
            "CARPOOL_CHECKPOINT_S": f"{self.program.checkpoint_s:g}",
            "CARPOOL_KEEP": str(self.program.keep),
            **self.program.environment,
        }

    async def _finish(self, process: StartedCommand, receiving: asyncio.Task[None]) -> None:
        code = await process.wait()
        self._process = None
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        if self._parking_task is not None:
            self._parking_task.cancel()
        self._cores.release(self.state.job)
        self.kill()
        await asyncio.wait({receiving}, timeout=_DRAIN_S)
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._collecting is not None:
            await self._collecting
        metrics, self._metrics = self._metrics, None
        if metrics is not None:
            await self._collect(metrics, is_last=True)
        self._report_metrics(self._evaluations.flush(asyncio.get_running_loop().time(), is_last=True))
        self._exited.set()
        log_event(_log, "command_exited", job=self.state.job, pid=process.pid, code=code)
        if code == NOT_STARTED:
            self._start_failed(f"the command could not be started (carpool logs {self.state.job})")
        else:
            cause = self._oom_kills.claim() if code in _KILLED else _full_disk(self._folder.path) if code else ""
            said = await asyncio.to_thread(last_line, self._folder.path / "log") if code else ""
            now = asyncio.get_running_loop().time()
            self._look(now, self.state.target.slots)
            self._run(self.state.exited(now, code, cause, said))

    def _start_failed(self, why: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._run(self.state.start_failed(asyncio.get_running_loop().time(), why))


def _full_disk(folder: Path) -> str:
    """The cause "the disk is full", if less than `_LEAST_FREE` is left on the disk of a job's folder; else empty."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(folder).free < _LEAST_FREE:
            return f"the disk of {folder} is full. Free some space"
    return ""
