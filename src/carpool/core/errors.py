"""Exceptions that state the value, the limit and the way out."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Callable, Iterable


class CarpoolError(Exception):
    """Root of every error carpool raises on purpose."""


def cause(error: Exception) -> str:
    """An error of the system in its words, less the number and the path that Python adds."""
    return (error.strerror if isinstance(error, OSError) else "") or str(error)


def place_of(error: BaseException, is_own: Callable[[str], bool] = lambda file: True) -> str:
    """The last line of somebody's own file that an error came through, `` (mine.py, line 12)``; else empty."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)]
    return f" ({own[-1].filename.rpartition('/')[2]}, line {own[-1].lineno})" if own else ""


class InputError(CarpoolError):
    """Something the user gave cannot be used: a file, a row, a flag, a job.

    The message reads ``where: problem. way out.`` so that it can be printed as it is (exit code 2).
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
    """A name that no table holds; the message names the nearest ones."""

    def __init__(self, what: str, name: str, known: Iterable[str], *, where: str = "") -> None:
        self.name = name
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        way_out = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(names) or 'none'}."
        super().__init__(f"unknown {what} {name!r}", where=where, way_out=way_out)


class Overbooked(CarpoolError):
    """A plan that asks for more of a device, or of a job's range, than there is."""


class OutOfHostResources(Overbooked):
    """A plan that lets a job have cores, RAM or disk that its node no longer has to give."""

    def __init__(self, problem: str, job: str) -> None:
        self.job = job
        self.draft: object = None  # the one that it was tried in, if it was
        super().__init__(problem)


class InvalidTransition(CarpoolError):
    """A job was asked to take a step its phase does not allow; carries the job's story so far."""

    def __init__(self, job: str, phase: str, step: str, story: tuple[str, ...]) -> None:
        self.job = job
        self.phase = phase
        self.step = step
        self.story = story
        told = "; ".join(story) or "nothing yet"
        super().__init__(f"job {job!r} is {phase} and cannot {step}. Its story: {told}")


class JournalError(CarpoolError):
    """A journal that cannot be read, or that contradicts itself."""
