"""Names for jobs that are submitted: as they are where nobody has them, else with a number."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from itertools import count

from carpool.core.model import JobId
from carpool.runtime.jobfile import Listed


class Names:
    """Gives names that are free. It remembers how far it has counted, so that the thousandth costs no more."""

    def __init__(self, is_taken: Callable[[JobId], bool]) -> None:
        self._is_taken = is_taken
        self._counted: dict[JobId, int] = {}

    def rename(self, jobs: Sequence[Listed], user: str) -> list[Listed]:
        """Jobs under free names, of a user; those that wait for each other still do."""
        new: dict[JobId, JobId] = {}
        given: set[JobId] = set()
        for spec, _ in jobs:
            new[spec.id] = self._free(spec.id, given)
            given.add(new[spec.id])
        return [
            Listed(
                replace(spec, id=new[spec.id], user=user, after=tuple(new.get(other, other) for other in spec.after)),
                program,
            )
            for spec, program in jobs
        ]

    def _free(self, name: JobId, given: Container[JobId]) -> JobId:
        if not self._is_taken(name) and name not in given:
            return name
        for number in count(self._counted.get(name, 1) + 1):
            found = JobId(f"{name}-{number}")
            if not self._is_taken(found) and found not in given:
                self._counted[name] = number
                return found
        raise AssertionError("numbers do not end")
