"""Which jobs may join the queue: not before those they wait for, and not more of an array than it says."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from carpool.core.model import JobId, JobSpec, Phase

_Array = tuple[str, str]  # whose, and its name


class Admission:
    """Keeps those that are blocked by whom they wait for.

    Of an array with `at_most`, so many are let in; another follows when one of them is over, in order of submission.
    `ended` says how jobs ended.
    """

    def __init__(self, ended: Mapping[JobId, Phase]) -> None:
        self._ended = ended
        self._by_needed: dict[JobId, list[JobId]] = {}
        self._inside: dict[_Array, set[JobId]] = {}
        self._outside: dict[_Array, deque[JobId]] = {}

    def enter(self, spec: JobSpec) -> bool:
        """Take in a job that was submitted; whether it may join the queue at once. Else `next_after` names it later."""
        for name in spec.after:
            if self._ended.get(name) is not Phase.FINISHED:
                self._by_needed.setdefault(name, []).append(spec.id)
        return self.admits(spec)

    def restore(self, spec: JobSpec, phase: Phase) -> None:
        """Take in a job as it stood when the books were closed; those that were not blocked come first."""
        if phase is Phase.BLOCKED:
            self.enter(spec)
        elif spec.at_most:
            self._inside.setdefault(_array(spec), set()).add(spec.id)

    def admits(self, spec: JobSpec) -> bool:
        """Whether a job may join the queue now, taking a place in its array; where that is full, it stands in line."""
        if any(self._ended.get(name) is not Phase.FINISHED for name in spec.after):
            return False
        if not spec.at_most:
            return True
        inside = self._inside.setdefault(_array(spec), set())
        if len(inside) >= spec.at_most:
            self._outside.setdefault(_array(spec), deque()).append(spec.id)
            return False
        inside.add(spec.id)
        return True

    def dependents(self, job: JobId) -> list[JobId]:
        """Those that waited for a job that is over; they are named once."""
        return self._by_needed.pop(job, [])

    def next_after(self, spec: JobSpec) -> Iterator[JobId]:
        """Those that a job's end concerns: who waited for it, and who may take its place in its array."""
        yield from self.dependents(spec.id)
        if not spec.at_most:
            return
        inside, outside = self._inside.get(_array(spec), set()), self._outside.get(_array(spec), deque())
        inside.discard(spec.id)
        while outside and len(inside) < spec.at_most:
            yield outside.popleft()


def _array(spec: JobSpec) -> _Array:
    return spec.user, spec.array
