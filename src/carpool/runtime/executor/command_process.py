"""Process of a command job: launched under the reaper in its folder, on its cores, with its log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from carpool.core.messages import Fact
from carpool.core.model import JobId
from carpool.jobs.devices import LocalDevice, cuda_visible_names
from carpool.jobs.host import CoreAllocator
from carpool.jobs.program import Program
from carpool.runtime.executor.command_state import CommandAction, CommandState, Launch, Terminate
from carpool.runtime.executor.job_folder import JobFolder
from carpool.runtime.executor.reports import Evaluation, Report, Sized, Told
from carpool.runtime.job_state.actions import Emit, Ended, Stopped, Tell
from carpool.runtime.job_state.types import Target, WorkerSlot
from carpool.runtime.process.channel import AsyncChannel, Closed, ProtocolError, pair
from carpool.runtime.process.protocol import Evaluated, Joined, Message, Proceed
from carpool.runtime.process.reaper import NOT_STARTED

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

OnReports = Callable[["CommandProcess", Sequence[Fact], Sequence[Report]], None]
OnMessage = Callable[["CommandProcess", Message], None]
_DRAIN_S = 2.0  # after a command's end, for what its session said before


class CommandProcess:
    """Carries an errand's moves out."""

    def __init__(
        self,
        job: JobId,
        program: Program,
        folder: JobFolder,
        devices: Mapping[int, LocalDevice],
        cores: CoreAllocator,
        grace_s: float,
        tell: OnReports,
        hear: OnMessage,
    ) -> None:
        self.errand = CommandState(job, time_limit_s=program.time_limit_s, retries=program.retries)
        self.by_token = False
        self._program = program
        self._folder = folder
        self._devices = devices
        self._cores = cores
        self._grace_s = grace_s
        self._tell = tell
        self._hear = hear
        self._channel: AsyncChannel | None = None  # to its session, if it has one
        self._listener: asyncio.Task[None] | None = None
        self._formation = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None  # the guard kills everything when this is closed
        self._burial: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        self._ended.set()

    def order(self, at: float, wish: Target) -> None:
        """The scheduler wants this."""
        self._do(self.errand.order(at, wish))

    def stop(self, at: float) -> None:
        """End it; it can be begun again."""
        self._do(self.errand.stop(at))

    def tick(self, at: float) -> None:
        """Time has passed."""
        self._do(self.errand.tick(at))

    def send(self, message: Message) -> None:
        """Say something to its session; nothing happens if it has none."""
        if self._channel is not None:
            self._channel.send(message)

    def take_turns(self, by_token: bool) -> None:
        """Let its session ask for its turn before each step, or not."""
        self.by_token = by_token
        self._formation += 1
        self.send(Proceed(self._formation, by_token=by_token))

    def kill(self) -> None:
        """End everything of it now."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    @property
    def is_buried(self) -> bool:
        """Whether no process of it is left."""
        return self._ended.is_set()

    async def gone(self) -> None:
        """Wait until no process of it is left."""
        await self._ended.wait()
        self.close()

    def close(self) -> None:
        """Let go of its log."""
        self._folder.close()

    def _do(self, moves: Sequence[CommandAction]) -> None:
        facts: list[Fact] = []
        reports: list[Report] = []
        job = self.errand.job
        for move in moves:
            match move:
                case Launch(seats):
                    try:
                        self._launch(seats)
                    except (OSError, ValueError) as error:  # the latter for what no program can be given
                        why = f"the command could not be started: {error}"
                        asyncio.get_running_loop().call_soon(self._could_not_start, why)
                case Terminate():
                    if self._process is not None:
                        self._process.send_signal(signal.SIGTERM)
                case Tell(words):
                    reports.append(Told(job, words))
                case Emit(fact):
                    facts.append(fact)
                case Ended() as end:
                    reports.append(end.outcome(job))
                case Stopped():
                    pass
        self._tell(self, facts, reports)

    def _launch(self, seats: tuple[WorkerSlot, ...]) -> None:
        places = [self._devices[seat.device] for seat in seats]
        program = self._program
        cores = sorted({core for place in places for core in place.cores})
        cores = cores or [*self._cores.claim(self.errand.job, program.cpus * len(seats))]
        command = list(program.command)
        if Path(command[0]).name in {"python", "python3"} and "/" not in command[0]:
            command[0] = program.python or sys.executable
        folder = Path(program.folder) if program.folder else Path.cwd()
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is no folder")
        theirs, self._lifeline = os.pipe()
        ours, end = pair()
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "carpool.runtime.process.reaper"),
                    *(str(theirs), str(os.getpid()), str(self._grace_s), ",".join(map(str, cores)), "--"),
                    *command,
                ],
                pass_fds=[theirs, end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._folder.log(),
                stderr=self._folder.log(),
                cwd=folder,
                env={**self._environment(seats, places, cores), "CARPOOL_CHANNEL": str(end.fileno())},
                process_group=0,
            )
        except BaseException:
            ours.close()
            self.kill()
            raise
        finally:
            os.close(theirs)
            end.close()
        self._channel = AsyncChannel(ours)
        self._listener = asyncio.create_task(self._listen(self._channel))
        self._ended.clear()
        self._watch(self._process, self._listener)

    async def _listen(self, channel: AsyncChannel) -> None:
        job = self.errand.job
        with contextlib.suppress(Closed, ProtocolError):
            while True:
                message = (await channel.receive()).message
                at = asyncio.get_running_loop().time()
                self._do(self.errand.said(at, message))
                self._hear(self, message)
                if isinstance(message, Joined):
                    self._tell(self, (), [Sized(job, message.total_steps)])
                    self.take_turns(self.by_token)
                elif isinstance(message, Evaluated):
                    self._tell(self, (), [Evaluation(job, message.step, message.metrics)])

    def _environment(
        self, seats: tuple[WorkerSlot, ...], places: list[LocalDevice], cores: list[int]
    ) -> dict[str, str]:
        part = 1.0 if self._program.cpus and not places[0].cores else min(seat.fraction for seat in seats)
        threads = max(1, round(part * len(cores)))
        ours = [place.cuda for place in places if place.cuda is not None]
        gpus = cuda_visible_names(ours, os.environ.get("CUDA_VISIBLE_DEVICES"))
        return {
            **os.environ,
            **dict.fromkeys(_THREADS, str(threads)),
            **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
            "CARPOOL_JOB": self.errand.job,
            "CARPOOL_FOLDER": str(self._folder.path),
            "CARPOOL_DEVICES": ",".join(place.name for place in places),
            "CARPOOL_CORES": ",".join(map(str, cores)),
            "CARPOOL_FRACTION": ",".join(f"{seat.fraction:g}" for seat in seats),
            "CARPOOL_THREADS": str(threads),
            "CARPOOL_CHECKPOINT_S": f"{self._program.checkpoint_s:g}",
            "CARPOOL_KEEP": str(self._program.keep),
            **self._program.environment,
        }

    def _watch(self, process: subprocess.Popen[bytes], listener: asyncio.Task[None]) -> None:
        """Hear of its end without a thread."""
        loop = asyncio.get_running_loop()
        handle = os.pidfd_open(process.pid)

        def ended() -> None:
            loop.remove_reader(handle)
            os.close(handle)
            self._process = None
            self._cores.let_go(self.errand.job)
            self.kill()
            self._burial = asyncio.create_task(self._bury(process, listener))

        loop.add_reader(handle, ended)

    async def _bury(self, process: subprocess.Popen[bytes], listener: asyncio.Task[None]) -> None:
        """Hear what its session said last, and then of its end."""
        await asyncio.wait({listener}, timeout=_DRAIN_S)
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        code = process.wait()
        self._ended.set()
        if code == NOT_STARTED:
            self._could_not_start("the command could not be started: its log says why")
        else:
            self._do(self.errand.exited(asyncio.get_running_loop().time(), code))

    def _could_not_start(self, why: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._do(self.errand.could_not_start(asyncio.get_running_loop().time(), why))
