"""Process of a command job: launched under the reaper in its folder, on its cores, with its log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from carpool.core.messages import Fact
from carpool.core.model import JobId
from carpool.jobs.devices import LocalDevice, cuda_visible_names
from carpool.jobs.host import CoreAllocator
from carpool.jobs.program import Program
from carpool.logs import log_event
from carpool.runtime.executor.command_state import CommandAction, CommandState, Launch, Terminate
from carpool.runtime.executor.job_folder import JobFolder
from carpool.runtime.executor.reports import Evaluation, Report, Sized, Told
from carpool.runtime.job_state.actions import Emit, Ended, Note, Stopped
from carpool.runtime.job_state.types import Target, WorkerSlot
from carpool.runtime.process.channel import AsyncChannel, Closed, ProtocolError, pair
from carpool.runtime.process.protocol import Evaluated, Joined, Message, Proceed
from carpool.runtime.process.reaper import FREEZE, NOT_STARTED, UNFREEZE

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_DRAIN_S = 2.0  # after a command's exit, for messages of its session
_log = logging.getLogger(__name__)


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
    ) -> None:
        self.state = CommandState(job, time_limit_s=program.time_limit_s, retries=program.retries)
        self.time_sliced = False
        self._program = program
        self._folder = folder
        self._devices = devices
        self._cores = cores
        self._grace_s = grace_s
        self._listener = listener
        self._channel: AsyncChannel | None = None  # to its session, if it has one
        self._receiving: asyncio.Task[None] | None = None
        self._epoch = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None  # the reaper kills everything when this is closed
        self._finishing: asyncio.Task[None] | None = None
        self._exited = asyncio.Event()
        self._exited.set()

    def order(self, at: float, target: Target) -> None:
        self._run(self.state.order(at, target))

    def stop(self, at: float) -> None:
        self._run(self.state.stop(at))

    def tick(self, at: float) -> None:
        self._run(self.state.tick(at))

    def send(self, message: Message) -> None:
        """Send a message to its session; ignored without one."""
        if self._channel is not None:
            self._channel.send(message)

    def set_time_sliced(self, *, time_sliced: bool) -> None:
        self.time_sliced = time_sliced
        self._epoch += 1
        self.send(Proceed(self._epoch, time_sliced=time_sliced))

    def freeze(self, *, frozen: bool) -> None:
        """Stop all processes of the command, or let them go on."""
        if self._process is not None:
            self._process.send_signal(FREEZE if frozen else UNFREEZE)

    def kill(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    @property
    def has_exited(self) -> bool:
        return self._exited.is_set()

    async def wait(self) -> None:
        await self._exited.wait()
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
                    self._try_launch(slots)
                case Terminate():
                    if self._process is not None:
                        self._process.send_signal(signal.SIGTERM)
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

    def _try_launch(self, slots: tuple[WorkerSlot, ...]) -> None:
        try:
            self._launch(slots)
        except (OSError, ValueError) as error:  # ValueError for arguments that no program can be given
            why = f"the command could not be started: {error}"
            asyncio.get_running_loop().call_soon(self._start_failed, why)

    def _launch(self, slots: tuple[WorkerSlot, ...]) -> None:
        devices = [self._devices[slot.device] for slot in slots]
        cores = sorted({core for device in devices for core in device.cores})
        cores = cores or [*self._cores.claim(self.state.job, self._program.cpus * len(slots))]
        theirs, self._lifeline = os.pipe()
        ours, end = pair()
        try:
            environment = self._environment(slots, devices, cores) | {"CARPOOL_CHANNEL": str(end.fileno())}
            self._process = self._spawn(cores, environment, theirs, end.fileno())
        except BaseException:
            ours.close()
            self.kill()
            raise
        finally:
            os.close(theirs)
            end.close()
        names = [device.name for device in devices]
        log_event(_log, "command_started", job=self.state.job, pid=self._process.pid, devices=names)
        self._channel = AsyncChannel(ours)
        self._receiving = asyncio.create_task(self._receive(self._channel))
        self._exited.clear()
        self._watch(self._process, self._receiving)

    def _spawn(
        self, cores: Sequence[int], environment: Mapping[str, str], lifeline: int, channel: int
    ) -> subprocess.Popen[bytes]:
        command = list(self._program.command)
        if Path(command[0]).name in {"python", "python3"} and "/" not in command[0]:
            command[0] = self._program.python or sys.executable
        folder = Path(self._program.folder) if self._program.folder else Path.cwd()
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is not a folder")
        return subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "carpool.runtime.process.reaper"),
                *(str(lifeline), str(os.getpid()), str(self._grace_s), ",".join(map(str, cores)), "--"),
                *command,
            ],
            pass_fds=[lifeline, channel],
            stdin=subprocess.DEVNULL,
            stdout=self._folder.log(),
            stderr=self._folder.log(),
            cwd=folder,
            env=environment,
            process_group=0,
        )

    async def _receive(self, channel: AsyncChannel) -> None:
        job = self.state.job
        with contextlib.suppress(Closed, ProtocolError):
            while True:
                message = (await channel.receive()).message
                self._run(self.state.message(asyncio.get_running_loop().time(), message))
                self._listener.on_session_message(self, message)
                if isinstance(message, Joined):
                    self._listener.on_command(self, (), [Sized(job, message.total_steps)])
                    self.set_time_sliced(time_sliced=self.time_sliced)
                elif isinstance(message, Evaluated):
                    self._listener.on_command(self, (), [Evaluation(job, message.step, message.metrics)])

    def _environment(
        self, slots: tuple[WorkerSlot, ...], devices: list[LocalDevice], cores: list[int]
    ) -> dict[str, str]:
        share = 1.0 if self._program.cpus and not devices[0].cores else min(slot.fraction for slot in slots)
        threads = max(1, round(share * len(cores)))
        indices = [device.cuda for device in devices if device.cuda is not None]
        gpus = cuda_visible_names(indices, os.environ.get("CUDA_VISIBLE_DEVICES"))
        return {
            **os.environ,
            **dict.fromkeys(_THREAD_VARIABLES, str(threads)),
            **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
            "CARPOOL_JOB": self.state.job,
            "CARPOOL_FOLDER": str(self._folder.path),
            "CARPOOL_DEVICES": ",".join(device.name for device in devices),
            "CARPOOL_CORES": ",".join(map(str, cores)),
            "CARPOOL_FRACTION": ",".join(f"{slot.fraction:g}" for slot in slots),
            "CARPOOL_THREADS": str(threads),
            "CARPOOL_CHECKPOINT_S": f"{self._program.checkpoint_s:g}",
            "CARPOOL_KEEP": str(self._program.keep),
            **self._program.environment,
        }

    def _watch(self, process: subprocess.Popen[bytes], receiving: asyncio.Task[None]) -> None:
        """Finish when the process exits; by pidfd, without a thread."""
        loop = asyncio.get_running_loop()
        handle = os.pidfd_open(process.pid)

        def on_exit() -> None:
            loop.remove_reader(handle)
            os.close(handle)
            self._process = None
            self._cores.release(self.state.job)
            self.kill()
            self._finishing = asyncio.create_task(self._finish(process, receiving))

        loop.add_reader(handle, on_exit)

    async def _finish(self, process: subprocess.Popen[bytes], receiving: asyncio.Task[None]) -> None:
        await asyncio.wait({receiving}, timeout=_DRAIN_S)
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        code = process.wait()
        self._exited.set()
        log_event(_log, "command_exited", job=self.state.job, pid=process.pid, code=code)
        if code == NOT_STARTED:
            self._start_failed("the command could not be started; see its log")
        else:
            self._run(self.state.exited(asyncio.get_running_loop().time(), code))

    def _start_failed(self, why: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._run(self.state.start_failed(asyncio.get_running_loop().time(), why))
