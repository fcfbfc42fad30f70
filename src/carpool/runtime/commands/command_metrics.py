"""Metrics of a command: read from its log and its TensorBoard files while it runs, bounded in size and number."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from carpool.jobs.untrusted_file import first_kept_byte, open_untrusted
from carpool.runtime.commands.metric_lines import MAX_METRICS, MetricLines, MetricRow
from carpool.runtime.commands.tensorboard import EventReader

_POLL_BYTES = 1 << 20  # of one file at a time
_LAST_BYTES = 16 << 20  # after the program's exit
_MAX_FILES = 32
_MAX_ROWS = 8  # of one poll: more would fill the journal
_MANY_ROWS = 20_000  # with more rows than this, one row per poll


class CommandMetrics:
    """Reads what a command has added to its log and event files since the last poll."""

    def __init__(self, log: Path, folder: Path, patterns: Sequence[str], since: float) -> None:
        self._folder = folder
        self._patterns = patterns
        self._since = since  # event files last written before then belong to earlier runs
        self._log = _Tail(log, MetricLines(), start=_size(log))
        self._files: dict[Path, _Tail] = {}
        self._num_rows = 0
        self._names: set[str] = set()

    def poll(self, *, is_last: bool = False) -> list[MetricRow]:
        """New metrics, thinned to a few rows that include the newest."""
        most = _LAST_BYTES if is_last else _POLL_BYTES
        self._find_files()
        rows = [row for tail in (self._log, *self._files.values()) for row in _merged(tail.read(most))]
        rows = _thin([kept for row in rows if (kept := self._with_known_names(row)).metrics], self._limit)
        self._num_rows += len(rows)
        return rows

    @property
    def _limit(self) -> int:
        return _MAX_ROWS if self._num_rows < _MANY_ROWS else 1

    def _with_known_names(self, row: MetricRow) -> MetricRow:
        """A row without metrics beyond a job's maximum number of names."""
        for name in row.metrics:
            if len(self._names) < MAX_METRICS:
                self._names.add(name)
        return MetricRow(row.step, {name: value for name, value in row.metrics.items() if name in self._names})

    def _find_files(self) -> None:
        for path in self._matches():
            if len(self._files) < _MAX_FILES and path not in self._files and _modified_at(path) >= self._since:
                self._files[path] = _Tail(path, EventReader())

    def _matches(self) -> Iterator[Path]:
        for pattern in self._patterns:
            is_absolute = pattern.startswith("/")
            found = Path("/").glob(pattern.lstrip("/")) if is_absolute else self._folder.glob(pattern)
            yield from islice(found, 10 * _MAX_FILES)


class EvaluationLimiter:
    """Passes on a session's metrics: a burst at once, then a fixed number a second, always including the newest.

    Faster reports are merged and passed on by `flush`.
    """

    def __init__(self) -> None:
        self._allowed = float(_MAX_ROWS)
        self._at = 0.0
        self._pending: MetricRow | None = None

    def add(self, at: float, row: MetricRow) -> list[MetricRow]:
        before = {} if self._pending is None else self._pending.metrics
        self._pending = MetricRow(row.step, {**before, **row.metrics})
        return self.flush(at)

    def flush(self, at: float, *, is_last: bool = False) -> list[MetricRow]:
        self._allowed = min(float(_MAX_ROWS), self._allowed + _MAX_ROWS * (at - self._at))
        self._at = at
        if self._pending is None or (self._allowed < 1.0 and not is_last):
            return []
        row, self._pending = self._pending, None
        self._allowed -= 1.0
        return [row]


class _Tail:
    """A growing regular file; each read continues where the previous one ended."""

    def __init__(self, path: Path, decoder: MetricLines | EventReader, start: int = 0) -> None:
        self._path = path
        self._decoder = decoder
        self._at = start

    def read(self, most: int) -> list[MetricRow]:
        try:
            with os.fdopen(open_untrusted(self._path), "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._at:  # it was rewritten
                    self._at = 0
                self._at = max(self._at, first_kept_byte(file.fileno()))
                data = os.pread(file.fileno(), most, self._at)
        except OSError:
            return []
        self._at += len(data)
        return self._decoder.feed(data)


def _merged(rows: list[MetricRow]) -> list[MetricRow]:
    """Rows of the same step as one: event files have a record for each metric."""
    merged: list[MetricRow] = []
    for row in rows:
        if merged and merged[-1].step == row.step:
            row = MetricRow(row.step, {**merged.pop().metrics, **row.metrics})
        merged.append(row)
    return merged


def _thin(rows: list[MetricRow], most: int) -> list[MetricRow]:
    """At most `most` rows, evenly chosen, with the last value of every metric in the last one."""
    if len(rows) <= most:
        return rows
    newest: dict[str, float] = {}
    for row in rows:
        newest |= row.metrics
    every = -(-len(rows) // most)
    chosen = rows[(len(rows) - 1) % every :: every]
    return [*chosen[:-1], MetricRow(rows[-1].step, newest)]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
