"""Metrics in a program's output: lines that are JSON objects, such as ``{"step": 10, "val_acc": 0.8}``.

A Python dictionary, as the Hugging Face trainer prints it, counts too, with numbers as text (``'0.69'``) and behind a
progress bar on the same line. A line needs a number and a step: the first found of `step`, `global_step`, `steps`,
`iteration`, `iter` and `epoch`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

MAX_STEP = 1 << 53
MAX_METRICS = 64  # of one row, and names of one job
_MAX_NAME = 100
_MAX_LINE = 1 << 13  # bytes; longer lines are not metrics
_STEPS = ("step", "global_step", "steps", "iteration", "iter", "epoch")
_IGNORED = frozenset({"time", "timestamp", "ts"})
_NUMBER = re.compile(r"[+-]?\d{1,30}(\.\d{0,30})?([eE][+-]?\d{1,3})?", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class MetricRow(NamedTuple):
    """Metrics of a program after a step."""

    step: int
    metrics: Mapping[str, float]


def as_metric_name(text: str) -> str:
    """A name without control characters, of bounded length."""
    return _CONTROL.sub("", text)[:_MAX_NAME]


class MetricLines:
    """Finds metrics in output that is fed in pieces."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_long = False  # the current line is too long
        self._num_rows = 0

    def feed(self, data: bytes) -> list[MetricRow]:
        """The metrics of all lines that are complete now."""
        *lines, rest = (self._rest + data).split(b"\n")
        rows = []
        for line in lines:
            if not self._is_long and (row := self._row(line)) is not None:
                rows.append(row)
            self._is_long = False
        self._is_long |= len(rest) > _MAX_LINE
        self._rest = b"" if self._is_long else rest
        return rows

    def _row(self, line: bytes) -> MetricRow | None:
        line = line.rpartition(b"\r")[2].strip() or line.strip()
        start = line.find(b"{")
        if start < 0 or not line.endswith(b"}") or len(line) > _MAX_LINE:
            return None
        if start and b"%|" not in line[:start]:  # only a progress bar may stand before it
            return None
        found = _parsed(line[start:].decode("utf-8", "replace"))
        key = next((key for key in _STEPS if key in found), None)
        if key is None:
            return None
        step = found[key]
        is_step = _is_number(step) and step == int(step) and 0 <= step <= MAX_STEP
        skipped = {*_IGNORED, key} if is_step else _IGNORED
        metrics = {as_metric_name(name): float(value) for name, value in found.items() if name not in skipped}
        if not metrics:
            return None
        self._num_rows += 1
        return MetricRow(int(step) if is_step else self._num_rows, dict(list(metrics.items())[:MAX_METRICS]))


def _parsed(text: str) -> dict[str, Any]:
    """The numbers of an object by name; empty if the line is not an object."""
    try:
        value = ast.literal_eval(text) if text.startswith("{'") else json.loads(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    numbers = {name: _as_number(each) for name, each in value.items() if isinstance(name, str) and name}
    return {name: each for name, each in numbers.items() if _is_number(each)}


def _as_number(value: object) -> object:
    """The number that a short text holds; other values as they are."""
    if not isinstance(value, str) or not _NUMBER.fullmatch(value):
        return value
    return float(value)


def _is_number(value: object) -> bool:
    """Whether a value is a number of moderate size; NaN and infinities are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300
