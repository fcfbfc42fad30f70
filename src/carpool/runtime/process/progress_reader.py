"""Progress reader: finds a pattern in the growing log of a command, in a process of its own.

``python -m carpool.runtime.process.progress_reader FD PARENT START LOG PATTERN`` sends `ProgressFound` over socket FD.
If a pattern takes too long on a line, the line is skipped; the executor never waits for it.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from carpool.jobs.progress_pattern import MAX_LINE, Progress, ProgressPattern
from carpool.jobs.untrusted_file import first_kept_byte, open_untrusted
from carpool.runtime.compat.process_lifetime import exit_with_parent, set_process_name
from carpool.runtime.process.channel import Channel, Closed
from carpool.runtime.process.protocol import ProgressFound

_POLL_S = 0.25
_MATCH_S = 0.1  # for one line
_MAX_READ = 1 << 20  # bytes at the end of new output that are searched
_LINE_END = re.compile(rb"[\r\n]")  # a progress bar ends its lines with a carriage return
_SMOOTHING = 0.3
_MAX_FOUND = 8  # of one read: each may hold a loss that halving compares
_LOOK_S = 1.0  # for all lines of one read


class LogTail:
    """Complete lines that were appended to a log since the last read."""

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

    def update(self, found: Sequence[Progress]) -> list[ProgressFound]:
        """The updates to report for the progress found by one read, oldest first."""
        now, before, updates = self._clock(), self._done, []
        is_first = self._last is None
        for each in found:
            if self._last is not None and each.done < self._last.done:
                self._before += self._last.total or self._last.done
            self._done, self._last = self._before + each.done, each
            total = each.total if not self._before else None  # the number of further rounds is unknown
            updates.append(ProgressFound(self._done, total, self._rate, each.loss))
        if not is_first and now > self._at:
            rate = max(0.0, self._done - before) / (now - self._at)
            self._rate = self._rate + _SMOOTHING * (rate - self._rate) if self._rate else rate
        self._at = now
        return [*updates[:-1], replace(updates[-1], steps_per_s=self._rate)]


class _TooSlow(Exception):
    pass


def _stop_match(*_: object) -> None:
    raise _TooSlow


def _found(pattern: ProgressPattern, lines: list[bytes], clock: Callable[[], float] = time.monotonic) -> list[Progress]:
    """The progress of the last lines that have one, oldest first."""
    found: list[Progress] = []
    until = clock() + _LOOK_S
    for line in reversed(lines):
        signal.setitimer(signal.ITIMER_REAL, _MATCH_S)
        try:
            progress = pattern.find(line)
        except _TooSlow:
            progress = None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        if progress is not None:
            found.append(progress)
        if len(found) == _MAX_FOUND or clock() > until:
            break
    return found[::-1]


def updates(tail: LogTail, pattern: ProgressPattern, meter: ProgressMeter) -> Iterator[list[ProgressFound]]:
    """Yield the findings of each read of the log."""
    while True:
        found = _found(pattern, tail.lines())
        yield meter.update(found) if found else []


def main(arguments: list[str]) -> None:
    """Report until the executor closes the socket."""
    fd, parent, start, log, pattern = arguments
    exit_with_parent(int(parent))
    set_process_name("carpool-progress")
    signal.signal(signal.SIGALRM, _stop_match)
    channel = Channel(socket.socket(fileno=int(fd)))
    for news in updates(LogTail(Path(log), int(start)), ProgressPattern(pattern), ProgressMeter()):
        try:
            for update in news:
                channel.send(update)
            channel.receive(_POLL_S)  # no message arrives: this only waits, and ends when the other side is closed
        except Closed:
            return


if __name__ == "__main__":
    main(sys.argv[1:])
