"""Job admission: per-user quotas, unique job names and idempotency keys."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import count
from typing import Any

from carpool.core.constraints.priorities import PRIORITIES, priority_name
from carpool.core.errors import CarpoolError, InputError
from carpool.core.journal import spec_to_json
from carpool.core.model import JobId, JobSpec
from carpool.jobs.job_file import ListedJob
from carpool.jobs.toml_table import Table


class QuotaExceeded(CarpoolError):
    """Somebody asked for more than they may have at once."""


@dataclass(frozen=True, slots=True)
class Quota:
    """What one person may have; 0 means as much as there is."""

    jobs: int = 0  # that are not over
    devices: int = 0  # asked for at least by all of them together
    weight: float = 1.0  # a factor on the weights of their jobs
    priority: str = "urgent"  # the highest that they may give a job

    @classmethod
    def read(cls, values: object, where: str) -> Quota:
        """The allowance that a table of a configuration file gives; InputError where it is none."""
        table = Table(values, where)
        table.only(["jobs", "devices", "weight", "priority"])
        counts = table.whole("jobs", 0, least=0), table.whole("devices", 0, least=0)
        return cls(*counts, table.number("weight", 1.0), table.choice("priority", [*PRIORITIES][::-1]))

    def check(self, name: str, active: Iterable[JobSpec], asked: Sequence[ListedJob]) -> None:
        """Exhausted where these jobs, with those that are not over, would be too many, or one of them goes too far."""
        for spec, _ in asked:
            if spec.priority > PRIORITIES[self.priority]:
                raise QuotaExceeded(
                    f"{name!r} gives job {spec.id!r} priority {priority_name(spec.priority)}; the highest allowed is "
                    f"{self.priority}. Give that, or ask whoever runs the daemon for more."
                )
        if not self.jobs and not self.devices:
            return
        jobs = devices = 0
        for spec in (*active, *(job.spec for job in asked)):
            jobs += 1
            devices += spec.narrowest
        for what, has, most in (("jobs", jobs, self.jobs), ("devices", devices, self.devices)):
            if 0 < most < has:
                raise QuotaExceeded(
                    f"{name!r} would have {has} {what} in jobs that are not over; the allowance is {most}. "
                    "Wait until some are over, cancel some, or ask whoever runs the daemon for more."
                )

    def weigh(self, job: ListedJob) -> ListedJob:
        """A job with the weight that it has among everybody's."""
        if self.weight == 1.0:
            return job
        return ListedJob(replace(job.spec, weight=job.spec.weight * self.weight), job.program)


@dataclass(frozen=True, slots=True)
class Quotas:
    """Everybody's; whoever is not named has the usual one."""

    usual: Quota = field(default_factory=Quota)
    named: Mapping[str, Quota] = field(default_factory=dict)

    @classmethod
    def read(cls, values: Mapping[str, Any], where: str) -> Quotas:
        """From tables by name; that of ``default`` is the usual one."""
        found = {name: Quota.read(table, f"{where}.{name}") for name, table in values.items()}
        return cls(found.pop("default", Quota()), found)

    def of(self, name: str) -> Quota:
        """What somebody may have."""
        return self.named.get(name, self.usual)


class JobNames:
    """Gives names that are free. It remembers how far it has counted, so that the thousandth costs no more."""

    def __init__(self, is_taken: Callable[[JobId], bool]) -> None:
        self._is_taken = is_taken
        self._counted: dict[JobId, int] = {}

    def rename(self, jobs: Sequence[ListedJob], user: str) -> list[ListedJob]:
        """Jobs under free names, of a user; those that wait for each other still do."""
        new: dict[JobId, JobId] = {}
        given: set[JobId] = set()
        arrays = {array: self._free_array(array, jobs) for array in dict.fromkeys(spec.array for spec, _ in jobs)}
        for spec, _ in jobs:
            new[spec.id] = self._free(_within(spec, arrays[spec.array]), given)
            given.add(new[spec.id])
        return [
            ListedJob(
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

    def _free_array(self, array: str, jobs: Sequence[ListedJob]) -> str:
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


class IdempotencyKeys:
    """What everybody asked under which key, and the jobs that became of it; `notes` are kept with jobs in the store."""

    def __init__(self, notes: Mapping[JobId, Mapping[str, Any]]) -> None:
        self._asked: dict[tuple[str, str], tuple[str, list[JobId]]] = {}  # (user, key): fingerprint, jobs
        for job, note in notes.items():
            if "key" in note:
                self._asked.setdefault((note["user"], note["key"]), (note["body"], []))[1].append(job)

    def granted(self, user: str, key: str, body: str) -> tuple[JobId, ...] | None:
        """The jobs of the same wish, where it was made before; InputError where the key was used for another."""
        before, names = self._asked.get((user, key), ("", []))
        if not names:
            return None
        if before != body:
            raise InputError(
                f"idempotency key {key!r} was used for other jobs before", way_out="Use a key for one wish only."
            )
        return tuple(names)

    async def keep(self, user: str, key: str, body: str, names: Sequence[JobId], granting: Awaitable[None]) -> None:
        """Wait until a wish is granted, and remember it; one that is refused can be made again under its key.

        It is known from now on, so that the same wish, made twice at a time, is one. Whoever goes away while it is
        being granted has not taken it back.
        """
        self._asked[user, key] = body, list(names)
        try:
            await granting
        except Exception:
            del self._asked[user, key]
            raise


def fingerprint(jobs: Sequence[ListedJob]) -> str:
    """What was asked, in a few bytes; a deadline counts from when it was asked, so it is no part of that."""
    asked = [[spec_to_json(replace(spec, deadline_s=0.0)), program.as_json()] for spec, program in jobs]
    return sha256(json.dumps(asked, sort_keys=True, default=list).encode()).hexdigest()
