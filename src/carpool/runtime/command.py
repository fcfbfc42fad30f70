"""A command job's process: started under a guard, in its folder, on its cores, with its log."""

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
from carpool.runtime.actions import Emit, Ended, Stopped, Tell
from carpool.runtime.crew import Seat, Wish
from carpool.runtime.devices import LocalDevice
from carpool.runtime.errand import Errand, Launch, Move, Terminate
from carpool.runtime.guard import NOT_STARTED
from carpool.runtime.jobfolder import JobFolder
from carpool.runtime.program import Program
from carpool.runtime.reports import Outcome, Report, Told

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

Tells = Callable[["Command", Sequence[Fact], Sequence[Report]], None]


class Command:
    """Carries an errand's moves out."""

    def __init__(
        self,
        job: JobId,
        program: Program,
        folder: JobFolder,
        devices: Mapping[int, LocalDevice],
        grace_s: float,
        tell: Tells,
    ) -> None:
        self.errand = Errand(job, time_limit_s=program.time_limit_s)
        self._program = program
        self._folder = folder
        self._devices = devices
        self._grace_s = grace_s
        self._tell = tell
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None  # the guard kills everything when this is closed
        self._ended = asyncio.Event()
        self._ended.set()

    def order(self, at: float, wish: Wish) -> None:
        """The scheduler wants this."""
        self._do(self.errand.order(at, wish))

    def stop(self, at: float) -> None:
        """End it; it can be begun again."""
        self._do(self.errand.stop(at))

    def tick(self, at: float) -> None:
        """Time has passed."""
        self._do(self.errand.tick(at))

    def kill(self) -> None:
        """End everything of it now."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    async def gone(self) -> None:
        """Wait until no process of it is left."""
        await self._ended.wait()
        self._folder.close()

    def _do(self, moves: Sequence[Move]) -> None:
        facts: list[Fact] = []
        reports: list[Report] = []
        job = self.errand.job
        for move in moves:
            match move:
                case Launch(seats):
                    try:
                        self._launch(seats)
                    except OSError as error:
                        why = f"the command could not be started: {error}"
                        asyncio.get_running_loop().call_soon(self._could_not_start, why)
                case Terminate():
                    if self._process is not None:
                        self._process.send_signal(signal.SIGTERM)
                case Tell(words):
                    reports.append(Told(job, words))
                case Emit(fact):
                    facts.append(fact)
                case Ended(reason):
                    reports.append(Outcome(job, 0, 0, None, reason=reason))
                case Stopped():
                    pass
        self._tell(self, facts, reports)

    def _launch(self, seats: tuple[Seat, ...]) -> None:
        places = [self._devices[seat.device] for seat in seats]
        cores = sorted({core for place in places for core in place.cores})
        program = self._program
        command = list(program.command)
        if Path(command[0]).name in {"python", "python3"} and "/" not in command[0]:
            command[0] = program.python or sys.executable
        folder = Path(program.folder) if program.folder else Path.cwd()
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is no folder")
        theirs, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "carpool.runtime.guard"),
                    *(str(theirs), str(os.getpid()), str(self._grace_s), ",".join(map(str, cores)), "--"),
                    *command,
                ],
                pass_fds=[theirs],
                stdin=subprocess.DEVNULL,
                stdout=self._folder.log(),
                stderr=self._folder.log(),
                cwd=folder,
                env=self._environment(seats, places, cores),
                process_group=0,
            )
        finally:
            os.close(theirs)
        self._ended.clear()
        self._watch(self._process)

    def _environment(self, seats: tuple[Seat, ...], places: list[LocalDevice], cores: list[int]) -> dict[str, str]:
        threads = max(1, round(min(seat.fraction for seat in seats) * len(cores)))
        gpus = [str(place.cuda) for place in places if place.cuda is not None]
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
            **self._program.environment,
        }

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Hear of its end without a thread."""
        loop = asyncio.get_running_loop()
        handle = os.pidfd_open(process.pid)

        def ended() -> None:
            loop.remove_reader(handle)
            os.close(handle)
            self._process = None
            self.kill()
            self._ended.set()
            code = process.wait()
            if code == NOT_STARTED:
                self._could_not_start("the command could not be started: its log says why")
            else:
                self._do(self.errand.exited(loop.time(), code))

        loop.add_reader(handle, ended)

    def _could_not_start(self, why: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._do(self.errand.could_not_start(asyncio.get_running_loop().time(), why))
