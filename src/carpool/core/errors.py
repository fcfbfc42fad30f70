"""Exceptions. Messages state the value, the limit and the way out."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Callable, Iterable


class CarpoolError(Exception):
    """Root of every error carpool raises on purpose."""


def cause(error: Exception) -> str:
    """An OS error's own text, without the number and the path that Python adds."""
    return (error.strerror if isinstance(error, OSError) else "") or str(error)


def place_of(error: BaseException, is_own: Callable[[str], bool] = lambda file: True) -> str:
    """The innermost frame of an error in matching files, such as `` (mine.py, line 12)``; else empty."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)]
    return f" ({own[-1].filename.rpartition('/')[2]}, line {own[-1].lineno})" if own else ""


class InputError(CarpoolError):
    """Unusable input: a file, a row, a flag, a job.

    The message reads ``where: problem. way out.`` and is printed as it is (exit code 2).
    """

    def __init__(self, problem: str, *, where: str = "", way_out: str = "") -> None:
        self.problem = problem
        self.where = where
        self.way_out = way_out
        sentence = f"{where}: {problem}" if where else problem
        if way_out:
            sentence = f"{sentence.rstrip('.')}. {way_out}"
        super().__init__(sentence)


class UnknownName(InputError):
    """An unknown name; the message suggests the nearest known ones."""

    def __init__(self, what: str, name: str, known: Iterable[str], *, where: str = "") -> None:
        self.name = name
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        way_out = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(names) or 'none'}."
        super().__init__(f"unknown {what} {name!r}", where=where, way_out=way_out)


class Overbooked(CarpoolError):
    """An allocation that exceeds a device, or the range of devices a job accepts."""


class OutOfHostResources(Overbooked):
    """An allocation that exceeds the cores, RAM or disk left on a node."""

    def __init__(self, problem: str, job: str) -> None:
        self.job = job
        self.draft: object = None  # that raised it, if one did
        super().__init__(problem)


class SpansNodes(OutOfHostResources):
    """An allocation on more nodes than one job may use."""


class InvalidTransition(CarpoolError):
    """A transition that a job's phase does not allow; carries the job's history."""

    def __init__(self, job: str, phase: str, step: str, story: tuple[str, ...]) -> None:
        self.job = job
        self.phase = phase
        self.step = step
        self.story = story
        super().__init__(f"job {job!r} is {phase} and cannot {step}. History: {'; '.join(story) or 'none'}")


class JournalError(CarpoolError):
    """A journal that cannot be read, or that contradicts itself."""
