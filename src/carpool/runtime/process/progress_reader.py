"""Progress reader: finds a pattern in the growing log of a command, in a process of its own.

``python -m carpool.runtime.process.progress_reader FD PARENT START LOG PATTERN`` sends `ProgressFound` over socket FD.
A pattern that takes too long on a line loses that line, and cannot hold up the executor.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from carpool.jobs.progress_pattern import MAX_LINE, Progress, ProgressPattern
from carpool.jobs.untrusted_file import first_kept_byte, open_untrusted
from carpool.runtime.compat.process_lifetime import exit_with_parent, set_process_name
from carpool.runtime.process.channel import Channel, Closed
from carpool.runtime.process.protocol import ProgressFound

_POLL_S = 0.25
_MATCH_S = 0.1  # for one line
_MAX_READ = 1 << 20  # of what was written since the last look only the end is searched
_LINE_END = re.compile(rb"[\r\n]")  # a progress bar ends its lines with a carriage return
_SMOOTHING = 0.3


class LogTail:
    """Complete lines that were appended to a log since the last look."""

    def __init__(self, path: Path, start: int) -> None:
        self._path = path
        self._offset = start
        self._rest = b""

    def lines(self) -> list[bytes]:
        try:
            with os.fdopen(open_untrusted(self._path), "rb") as file:
                size = file.seek(0, 2)
                if size < self._offset:  # it was rotated
                    self._offset, self._rest = 0, b""
                kept = max(size - _MAX_READ, first_kept_byte(file.fileno()))
                if kept > self._offset:
                    self._offset, self._rest = kept, b""
                file.seek(self._offset)
                text = file.read(_MAX_READ)
        except OSError:
            return []
        self._offset += len(text)
        *lines, rest = _LINE_END.split(self._rest + text)
        self._rest = rest[: MAX_LINE + 1]
        return lines


class ProgressMeter:
    """Rate of the progress found in a log; steps that start again, as in each epoch, are added up."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: Progress | None = None
        self._at = clock()
        self._done = 0.0
        self._before = 0.0  # steps of earlier rounds
        self._rate = 0.0

    def update(self, found: Progress) -> ProgressFound:
        now, last = self._clock(), self._last
        if last is not None and found.done < last.done:
            self._before += last.total or last.done
        before, self._done = self._done, self._before + found.done
        if last is not None and now > self._at:
            rate = max(0.0, self._done - before) / (now - self._at)
            self._rate = self._rate + _SMOOTHING * (rate - self._rate) if self._rate else rate
        self._last, self._at = found, now
        total = found.total if not self._before else None  # how many rounds follow is unknown
        return ProgressFound(self._done, total, self._rate, found.loss)


class _TooSlow(Exception):
    pass


def _stop_match(*_: object) -> None:
    raise _TooSlow


def _found(pattern: ProgressPattern, lines: list[bytes]) -> Progress | None:
    """The progress of the last line that has one."""
    for line in reversed(lines):
        signal.setitimer(signal.ITIMER_REAL, _MATCH_S)
        try:
            found = pattern.find(line)
        except _TooSlow:
            continue
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        if found is not None:
            return found
    return None


def updates(tail: LogTail, pattern: ProgressPattern, meter: ProgressMeter) -> Iterator[ProgressFound | None]:
    """What each look at the log finds."""
    while True:
        found = _found(pattern, tail.lines())
        yield None if found is None else meter.update(found)


def main(arguments: list[str]) -> None:
    """Report until the executor closes the socket."""
    fd, parent, start, log, pattern = arguments
    exit_with_parent(int(parent))
    set_process_name("carpool-progress")
    signal.signal(signal.SIGALRM, _stop_match)
    channel = Channel(socket.socket(fileno=int(fd)))
    for update in updates(LogTail(Path(log), int(start)), ProgressPattern(pattern), ProgressMeter()):
        try:
            if update is not None:
                channel.send(update)
            channel.receive(_POLL_S)  # nothing comes: it waits, and ends when the other side is closed
        except Closed:
            return


if __name__ == "__main__":
    main(sys.argv[1:])
