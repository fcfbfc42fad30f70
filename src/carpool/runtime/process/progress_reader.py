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
from dataclasses import dataclass, replace
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
_ALIKE = 0.1  # difference between the lengths of bars that are added up
_MOST_BARS = 7  # other bars that are remembered
_LEAST_S = 1e-6
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


@dataclass(slots=True)
class _Bar:
    """A progress bar, and others of nearly the same length, such as one in each epoch: their steps are added up."""

    last: Progress
    before: float = 0.0  # steps of earlier ones
    seconds: float = 0.0  # in which it advanced last
    at: float = 0.0  # of the last update
    rate: float = 0.0

    @property
    def done(self) -> float:
        return self.before + self.last.done

    def is_like(self, other: Progress) -> bool:
        mine, theirs = self.last.total, other.total
        if mine is None or theirs is None:
            return mine is theirs
        return abs(mine - theirs) <= _ALIKE * max(mine, theirs)

    def advance(self, to: Progress) -> None:
        if to.done < self.last.done:
            self.before += self.last.total or self.last.done
        self.last = to

    def measure(self, done_before: float, now: float) -> None:
        rate = max(0.0, self.done - done_before) / max(now - self.at, _LEAST_S)
        self.rate = self.rate + _SMOOTHING * (rate - self.rate) if self.rate else rate


class ProgressMeter:
    """Progress and rate of a command with one or several progress bars.

    Bars of other lengths, for evaluating, saving or preparing data, are not added: the one that has been advancing for
    most of the time counts.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bars: list[_Bar] = []
        self._at = clock()

    def update(self, found: Sequence[Progress]) -> list[ProgressFound]:
        """The updates to report for the progress found by one read, oldest first."""
        now, done_before = self._clock(), {id(bar): bar.done for bar in self._bars}
        updates: list[tuple[_Bar, ProgressFound]] = []
        for each in found:
            bar = self._bar_of(each)
            bar.advance(each)
            total = each.total if not bar.before else None  # the number of further rounds is unknown
            updates.append((bar, ProgressFound(bar.done, total, bar.rate, each.loss)))
        updates[-1][0].seconds += now - self._at
        self._at = now
        for each_bar in {id(bar): bar for bar, _ in updates}.values():
            if id(each_bar) in done_before:
                each_bar.measure(done_before[id(each_bar)], now)
            each_bar.at = now
        counts = max(reversed(self._bars), key=lambda each: each.seconds)
        reported = [update for bar, update in updates if bar is counts]
        return [*reported[:-1], replace(reported[-1], steps_per_s=counts.rate)] if reported else []

    def _bar_of(self, progress: Progress) -> _Bar:
        bar = next((bar for bar in self._bars if bar.is_like(progress)), None)
        if bar is None:
            bar = _Bar(progress)
            self._bars = [*self._bars[-_MOST_BARS:], bar]
        return bar


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
