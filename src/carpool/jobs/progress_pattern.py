"""Progress pattern of a command: a regular expression that finds step, total, loss and epoch in its output."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from carpool.core.errors import InputError

GROUPS = ("step", "total", "loss", "epoch")  # also the meaning of groups without names, in this order
MAX_PATTERN = 1000  # characters
MAX_LINE = 1000  # bytes of a line that are searched
PRESETS = {"tqdm": r"(\d+)/(\d+) \["}  # tqdm's progress bar, which the Hugging Face trainer prints, too
_MAX_STEPS = 1 << 53


@dataclass(frozen=True, slots=True)
class Progress:
    """What one line reports; the work done is counted in steps, or in epochs where the pattern has no step."""

    done: float
    total: float | None = None
    loss: float | None = None


class ProgressPattern:
    """A checked pattern."""

    def __init__(self, text: str, where: str = "progress") -> None:
        """Compile a pattern or preset. InputError if it is invalid or has no group for the step or epoch."""
        text = PRESETS.get(text, text)
        if len(text) > MAX_PATTERN:
            raise InputError(f"has {len(text)} characters, the limit is {MAX_PATTERN}", where=where)
        try:
            self._pattern = re.compile(text.encode())
        except (re.error, RecursionError, OverflowError) as error:
            raise InputError(f"{text!r} is not a regular expression: {error}", where=where) from None
        names = list(self._pattern.groupindex)
        if unknown := [name for name in names if name not in GROUPS]:
            raise InputError(
                f"{text!r} has a group {unknown[0]!r}", where=where, way_out=f"Groups are {', '.join(GROUPS)}."
            )
        self._groups: dict[str, str | int] = {name: name for name in names}
        if not names:
            self._groups = {name: number for number, name in enumerate(GROUPS[: self._pattern.groups], start=1)}
        if "step" not in self._groups and "epoch" not in self._groups:
            raise InputError(
                f"{text!r} has no group for the step", where=where, way_out=r"Write for example step (\d+)/(\d+)."
            )

    def find(self, line: bytes) -> Progress | None:
        """The progress that a line reports, if any; of several matches the last."""
        match = None
        for match in self._pattern.finditer(line[:MAX_LINE]):  # noqa: B007 - the last one counts
            pass
        if match is None:
            return None
        values = {name: _number(match[group]) for name, group in self._groups.items()}
        done, total = values.get("step", values.get("epoch")), values.get("total")
        if done is None or not 0 <= done <= _MAX_STEPS:
            return None
        known = total if total is not None and done <= total <= _MAX_STEPS else None
        return Progress(done, known or None, values.get("loss"))


def _number(text: bytes | None) -> float | None:
    try:
        value = float((text or b"").replace(b",", b""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None
