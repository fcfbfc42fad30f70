"""Names for jobs that are submitted: as they are where nobody has them, else with a number."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from itertools import count

from carpool.core.model import JobId, JobSpec
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
        arrays = {array: self._free_array(array, jobs) for array in dict.fromkeys(spec.array for spec, _ in jobs)}
        for spec, _ in jobs:
            new[spec.id] = self._free(_within(spec, arrays[spec.array]), given)
            given.add(new[spec.id])
        return [
            Listed(
                replace(
                    spec,
                    id=new[spec.id],
                    array=arrays[spec.array],
                    user=user,
                    after=tuple(new.get(other, other) for other in spec.after),
                ),
                program,
            )
            for spec, program in jobs
        ]

    def _free_array(self, array: str, jobs: Sequence[Listed]) -> str:
        """A name for an array under which all its jobs are free: as it is, or with a number."""
        members = [spec for spec, _ in jobs if array and spec.array == array]
        for number in count(1):
            name = array if number == 1 else f"{array}.{number}"  # with a hyphen it might be one of its own jobs
            if not any(map(self._is_taken, (JobId(name), *(_within(spec, name) for spec in members)))):
                return name
        raise AssertionError("numbers do not end")

    def _free(self, name: JobId, given: Container[JobId]) -> JobId:
        if not self._is_taken(name) and name not in given:
            return name
        for number in count(self._counted.get(name, 1) + 1):
            found = JobId(f"{name}-{number}")
            if not self._is_taken(found) and found not in given:
                self._counted[name] = number
                return found
        raise AssertionError("numbers do not end")


def _within(spec: JobSpec, array: str) -> JobId:
    """A job's name in its array if that were called so."""
    return JobId(array + spec.id[len(spec.array) :])
