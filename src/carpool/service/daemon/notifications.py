"""Job-end notifications: run the user's command or post to a webhook, at least once, with retries."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO
from urllib.parse import urlsplit

from carpool.core.model import JobId
from carpool.core.typed_fields import shortened
from carpool.jobs.environment import daemon_environment
from carpool.runtime.compat.process_lifetime import wait_for_exit
from carpool.runtime.executor.job_folder import JobFolder
from carpool.service.daemon.webhook import ADDRESS

_MARK = "notified"  # in a job's folder, once its notification was delivered
_TRIES = 3
_TRY_S = 20.0
_PAUSE_S = 5.0  # before the next try, doubled each time
_CONCURRENT = 2  # deliveries of one user
_OUTPUT_BYTES = 200  # of a failed command, in the job's history
_ERROR_CHARACTERS = 4096  # of a job's error in a command's environment, whose size is limited
_POST = (sys.executable, "-P", "-m", "carpool.service.daemon.webhook")


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended, for its notification."""

    job: JobId
    user: str
    phase: str
    error: str = ""
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class Notification:
    """A command in a folder, or a webhook address, and the text for it."""

    target: Sequence[str]  # a command, or one address
    folder: str
    environment: Mapping[str, str]
    text: str
    pass_env: Sequence[str] = ()  # variables of the daemon that a command gets

    @property
    def address(self) -> str:
        is_address = len(self.target) == 1 and self.target[0].startswith(("http://", "https://"))
        return self.target[0] if is_address else ""

    def __str__(self) -> str:
        """Without the address's path, which often holds a secret."""
        return repr(f"{urlsplit(self.address).hostname}" if self.address else self.target[0])


Send = Callable[[Notification], Awaitable[None]]


class Notifier:
    """Delivers each notification at least once: the job's folder is marked only after the delivery.

    A restarted daemon delivers the unmarked ones. After some failed tries the job's history says so (`tell`), and the
    next start tries again. Each user has a few deliveries at a time, in processes of their own, so that a dead address
    delays only the same user.
    """

    def __init__(
        self,
        state: Path,
        tell: Callable[[JobId, str], None],
        send: Send | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        pass_env: Sequence[str] = (),
    ) -> None:
        self._pass_env = pass_env
        self._state = state
        self._tell = tell
        self._send = send or deliver
        self._sleep = sleep
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_CONCURRENT))

    def announce(self, ending: JobEnd, target: Sequence[str], folder: str = "") -> None:
        """Deliver in the background, unless the folder is marked already or there is no target."""
        mark = JobFolder(self._state, ending.job).path / _MARK
        if not target or _is_set(mark):
            return
        variables = {"CARPOOL_JOB": ending.job, "CARPOOL_USER": ending.user, "CARPOOL_PHASE": ending.phase}
        text = json.dumps({"schema": 1, **asdict(ending)})
        variables["CARPOOL_ERROR"] = shortened(ending.error, _ERROR_CHARACTERS)
        notice = Notification(target, folder, variables, text, self._pass_env)
        task = asyncio.get_running_loop().create_task(self._announce(ending, notice, mark))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel deliveries under way; the next start repeats them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _announce(self, ending: JobEnd, notice: Notification, mark: Path) -> None:
        problem = ""
        for number in range(_TRIES):
            if number:
                await self._sleep(_PAUSE_S * 2 ** (number - 1))
            try:
                async with self._slots[ending.user], asyncio.timeout(_TRY_S):
                    await self._send(notice)
            except TimeoutError:
                problem = f"no answer after {_TRY_S:.0f} s"
            except Exception as error:  # noqa: BLE001 - reported in the history; a user's command must not end the daemon
                problem = str(error) or type(error).__name__
            else:
                try:
                    _set(mark)
                except OSError as error:
                    self._tell(
                        ending.job, f"notified of its end, and will be again: the mark cannot be written: {error}"
                    )
                return
        self._tell(ending.job, f"notification with {notice} failed: {problem}")


def _is_set(mark: Path) -> bool:
    """Whether the delivery is marked; if that cannot be read, it is repeated."""
    try:
        return mark.exists()
    except OSError:
        return False


def _set(mark: Path) -> None:
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


class DeliveryFailed(Exception):
    """A command exited with a code other than 0, or an address refused the request."""


async def deliver(notice: Notification) -> None:
    """Run a command with the text on its stdin, or post it; cancelling kills the whole process group."""
    with TemporaryFile() as given, TemporaryFile() as output:  # a grandchild could keep pipes open
        given.write(notice.text.encode())
        given.seek(0)
        process = _start(notice, given, output)
        try:
            await wait_for_exit(process)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            code = process.wait()
        output.seek(max(0, output.seek(0, os.SEEK_END) - _OUTPUT_BYTES))
        words = output.read().decode("utf-8", "replace").strip()
    if code:
        raise DeliveryFailed(words if notice.address else f"exit code {code}: {words}")


def _start(notice: Notification, given: IO[bytes], output: IO[bytes]) -> subprocess.Popen[bytes]:
    posted = {ADDRESS: notice.address} if notice.address else {}
    return subprocess.Popen(
        [*(_POST if notice.address else notice.target)],
        stdin=given,
        stdout=subprocess.DEVNULL,
        stderr=output,
        env={**daemon_environment(os.environ, notice.pass_env), **notice.environment, **posted},
        cwd=notice.folder or None,
        start_new_session=True,
    )
