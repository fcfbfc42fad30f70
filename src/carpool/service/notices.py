"""Telling people that their job is over: by a command of theirs, or by posting to an address."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from carpool.core.model import JobId
from carpool.runtime.jobfolder import JobFolder

_MARK = "notified"  # in a job's folder, once somebody was told
_TRIES = 3
_TRY_S = 20.0
_PAUSE_S = 5.0  # before the next try, then twice and four times as long

Send = Callable[[Sequence[str], Mapping[str, str], str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Ending:
    """What is told of a job."""

    job: JobId
    user: str
    phase: str
    error: str = ""
    digest: str | None = None


class Notices:
    """Tells each ending at least once: it is marked in the job's folder only when it was told.

    A daemon that died in between tells it when it is back. What cannot be told after some tries is said in the job's
    story (`tell`), and not tried again until the next start.
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

    def announce(self, ending: Ending, how: Sequence[str]) -> None:
        """Tell it, aside; nothing happens where it was told before or nobody wants to know."""
        mark = JobFolder(self._state, ending.job).path / _MARK
        if not how or _is_set(mark):
            return
        task = asyncio.get_running_loop().create_task(self._announce(ending, how, mark))
        self._going.add(task)
        task.add_done_callback(self._going.discard)

    async def close(self) -> None:
        """Give up what is under way; the next start tells it."""
        for task in self._going:
            task.cancel()
        await asyncio.gather(*self._going, return_exceptions=True)

    async def _announce(self, ending: Ending, how: Sequence[str], mark: Path) -> None:
        text = json.dumps({"schema": 1, **asdict(ending)})
        words = {"CARPOOL_JOB": ending.job, "CARPOOL_USER": ending.user, "CARPOOL_PHASE": ending.phase}
        environment = {**words, "CARPOOL_ERROR": ending.error}
        problem = ""
        for number in range(_TRIES):
            if number:
                await self._sleep(_PAUSE_S * 2 ** (number - 1))
            try:
                await asyncio.wait_for(self._send(how, environment, text), _TRY_S)
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
        self._tell(ending.job, f"its end could not be told with {how[0]!r}: {problem}")


def _is_set(mark: Path) -> bool:
    """Whether it is known that an ending was told; one that is told twice is better than one that never is."""
    try:
        return mark.exists()
    except OSError:
        return False


def _set(mark: Path) -> None:
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


class Unanswered(Exception):
    """A command ended with another code than 0, or an address did not take it."""


async def deliver(how: Sequence[str], environment: Mapping[str, str], text: str) -> None:
    """Run a command with the ending on its stdin, or post it where `how` is one address."""
    if len(how) == 1 and how[0].startswith(("http://", "https://")):
        await asyncio.to_thread(_post, how[0], text)
        return
    process = await asyncio.create_subprocess_exec(
        *how,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    try:
        _, said = await process.communicate(text.encode())
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        raise Unanswered(f"it ended with {process.returncode}: {said.decode('utf-8', 'replace').strip()[-200:]}")


def _post(address: str, text: str) -> None:
    headers = {"Content-Type": "application/json", "User-Agent": "carpool"}
    request = urllib.request.Request(address, text.encode(), headers, method="POST")
    with urllib.request.urlopen(request, timeout=_TRY_S) as answer:
        if answer.status >= 300:
            raise Unanswered(f"it answered {answer.status}")
