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
from carpool.runtime.compat.process_lifetime import wait_for_exit
from carpool.runtime.executor.job_folder import JobFolder
from carpool.service.daemon.webhook import ADDRESS

_MARK = "notified"  # in a job's folder, once somebody was told
_TRIES = 3
_TRY_S = 20.0
_PAUSE_S = 5.0  # before the next try, then twice and four times as long
_AT_ONCE = 2  # of one person
_LAST_WORDS = 200  # bytes of what a command says that are told
_POST = (sys.executable, "-P", "-m", "carpool.service.daemon.webhook")


@dataclass(frozen=True, slots=True)
class JobEnd:
    """What is told of a job."""

    job: JobId
    user: str
    phase: str
    error: str = ""
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class Notification:
    """What is done to tell it: a command in a folder, or one address, with a text."""

    how: Sequence[str]
    folder: str
    environment: Mapping[str, str]
    text: str

    @property
    def address(self) -> str:
        """Where it is posted; empty for a command."""
        is_address = len(self.how) == 1 and self.how[0].startswith(("http://", "https://"))
        return self.how[0] if is_address else ""

    def __str__(self) -> str:
        """Without what may be a secret: people post to addresses that nobody else is to know."""
        return repr(f"{urlsplit(self.address).hostname}" if self.address else self.how[0])


Send = Callable[[Notification], Awaitable[None]]


class Notifier:
    """Tells each ending at least once: it is marked in the job's folder only when it was told.

    A daemon that died in between tells it when it is back. What cannot be told after some tries is said in the job's
    story (`tell`), and not tried again until the next start. Each person's are told a few at a time, in processes of
    their own, so that an address which is dead holds up nothing but what is told to the same person.
    """

    def __init__(
        self,
        state: Path,
        tell: Callable[[JobId, str], None],
        send: Send | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._state = state
        self._tell = tell
        self._send = send or deliver
        self._sleep = sleep
        self._going: set[asyncio.Task[None]] = set()
        self._turns: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_AT_ONCE))

    def announce(self, ending: JobEnd, how: Sequence[str], folder: str = "") -> None:
        """Tell it, aside, from a folder; nothing happens where it was told before or nobody wants to know."""
        mark = JobFolder(self._state, ending.job).path / _MARK
        if not how or _is_set(mark):
            return
        words = {"CARPOOL_JOB": ending.job, "CARPOOL_USER": ending.user, "CARPOOL_PHASE": ending.phase}
        text = json.dumps({"schema": 1, **asdict(ending)})
        notice = Notification(how, folder, {**words, "CARPOOL_ERROR": ending.error}, text)
        task = asyncio.get_running_loop().create_task(self._announce(ending, notice, mark))
        self._going.add(task)
        task.add_done_callback(self._going.discard)

    async def close(self) -> None:
        """Give up what is under way; the next start tells it."""
        for task in self._going:
            task.cancel()
        await asyncio.gather(*self._going, return_exceptions=True)

    async def _announce(self, ending: JobEnd, notice: Notification, mark: Path) -> None:
        problem = ""
        for number in range(_TRIES):
            if number:
                await self._sleep(_PAUSE_S * 2 ** (number - 1))
            try:
                async with self._turns[ending.user], asyncio.timeout(_TRY_S):
                    await self._send(notice)
            except TimeoutError:
                problem = f"no answer after {_TRY_S:.0f} s"
            except Exception as error:  # noqa: BLE001 - told in the story; what users ask for must not end the daemon
                problem = str(error) or type(error).__name__
            else:
                try:
                    _set(mark)
                except OSError as error:
                    self._tell(ending.job, f"its end was told, and will be again: that cannot be kept: {error}")
                return
        self._tell(ending.job, f"its end could not be told with {notice}: {problem}")


def _is_set(mark: Path) -> bool:
    """Whether it is known that an ending was told; one that is told twice is better than one that never is."""
    try:
        return mark.exists()
    except OSError:
        return False


def _set(mark: Path) -> None:
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


class DeliveryFailed(Exception):
    """A command ended with another code than 0, or an address did not take it."""


async def deliver(notice: Notification) -> None:
    """Run a command with the ending on its stdin, or one of ours that posts it; whoever gives it up ends all of it."""
    with TemporaryFile() as given, TemporaryFile() as said:  # no pipes, which a grandchild could keep open
        given.write(notice.text.encode())
        given.seek(0)
        process = _start(notice, given, said)
        try:
            await wait_for_exit(process)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            code = process.wait()
        said.seek(max(0, said.seek(0, os.SEEK_END) - _LAST_WORDS))
        words = said.read().decode("utf-8", "replace").strip()
    if code:
        raise DeliveryFailed(words if notice.address else f"it ended with {code}: {words}")


def _start(notice: Notification, given: IO[bytes], said: IO[bytes]) -> subprocess.Popen[bytes]:
    posted = {ADDRESS: notice.address} if notice.address else {}
    return subprocess.Popen(
        [*(_POST if notice.address else notice.how)],
        stdin=given,
        stdout=subprocess.DEVNULL,
        stderr=said,
        env={**os.environ, **notice.environment, **posted},
        cwd=notice.folder or None,
        start_new_session=True,
    )
