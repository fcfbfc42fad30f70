"""Job admission: per-user quotas, unique job names and idempotency keys."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import chain, count
from typing import Any

from carpool.core.constraints.priorities import PRIORITIES, priority_name
from carpool.core.errors import CarpoolError, InputError
from carpool.core.journal import spec_to_json
from carpool.core.model import JobId, JobSpec
from carpool.jobs.job_file import ListedJob
from carpool.jobs.toml_table import Table


class QuotaExceeded(CarpoolError):
    """A submission or change exceeds the user's quota."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one user; 0 means unlimited."""

    jobs: int = 0  # active jobs
    devices: int = 0  # sum of min_devices over the active jobs
    weight: float = 1.0  # a factor on the weights of the user's jobs
    priority: str = "urgent"  # the highest allowed

    @classmethod
    def read(cls, values: object, where: str) -> Quota:
        table = Table(values, where)
        table.only(["jobs", "devices", "weight", "priority"])
        counts = table.whole("jobs", 0, least=0), table.whole("devices", 0, least=0)
        return cls(*counts, table.number("weight", 1.0), table.choice("priority", [*PRIORITIES][::-1]))

    def check(self, user: str, active: Iterable[JobSpec], new: Sequence[ListedJob]) -> None:
        for spec, _ in new:
            if spec.priority > PRIORITIES[self.priority]:
                raise QuotaExceeded(
                    f"job {spec.id!r} has priority {priority_name(spec.priority)}; {user!r} may use at most "
                    f"{self.priority}. Lower the priority, or ask an admin for a higher limit."
                )
        if not self.jobs and not self.devices:
            return
        specs = [*active, *(job.spec for job in new)]
        devices = sum(spec.narrowest for spec in specs)
        for what, requested, limit in (("jobs", len(specs), self.jobs), ("devices", devices, self.devices)):
            if 0 < limit < requested:
                raise QuotaExceeded(
                    f"{user!r} would have {requested} {what} in active jobs; the quota is {limit}. "
                    "Cancel jobs or wait until some end, or ask an admin for a larger quota."
                )

    def scale_weight(self, job: ListedJob) -> ListedJob:
        return ListedJob(replace(job.spec, weight=job.spec.weight * self.weight), job.program)


@dataclass(frozen=True, slots=True)
class Quotas:
    """The quota of every user; users without their own have the default."""

    default: Quota = field(default_factory=Quota)
    by_user: Mapping[str, Quota] = field(default_factory=dict)

    @classmethod
    def read(cls, values: Mapping[str, Any], where: str) -> Quotas:
        """Parse tables by user name; the one named ``default`` applies to all other users."""
        found = {name: Quota.read(table, f"{where}.{name}") for name, table in values.items()}
        return cls(found.pop("default", Quota()), found)

    def of(self, user: str) -> Quota:
        return self.by_user.get(user, self.default)


class JobNames:
    """Makes job names unique by appending numbers; remembers the last number, so that many equal names stay cheap."""

    def __init__(self, is_taken: Callable[[JobId], bool]) -> None:
        self._is_taken = is_taken
        self._last_number: dict[JobId, int] = {}

    def assign(self, jobs: Sequence[ListedJob], user: str) -> list[ListedJob]:
        """Return the jobs under free names and owned by `user`; dependencies between them are kept."""
        new: dict[JobId, JobId] = {}
        used: set[JobId] = set()
        arrays = {array: self._free_array(array, jobs) for array in dict.fromkeys(spec.array for spec, _ in jobs)}
        for spec, _ in jobs:
            new[spec.id] = self._free_name(_name_in_array(spec, arrays[spec.array]), used)
            used.add(new[spec.id])
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
        """Return the array's name, numbered if needed, under which the names of all its jobs are free."""
        members = [spec for spec, _ in jobs if array and spec.array == array]

        def is_free(name: str) -> bool:
            return not any(map(self._is_taken, (JobId(name), *(_name_in_array(spec, name) for spec in members))))

        # With a hyphen a numbered name could equal one of its own jobs.
        return next(filter(is_free, chain([array], (f"{array}.{number}" for number in count(2)))))

    def _free_name(self, name: JobId, used: Container[JobId]) -> JobId:
        def is_free(name: JobId) -> bool:
            return not self._is_taken(name) and name not in used

        if is_free(name):
            return name
        numbers = count(self._last_number.get(name, 1) + 1)
        self._last_number[name] = number = next(n for n in numbers if is_free(JobId(f"{name}-{n}")))
        return JobId(f"{name}-{number}")


def _name_in_array(spec: JobSpec, array: str) -> JobId:
    return JobId(array + spec.id[len(spec.array) :])


class IdempotencyKeys:
    """Maps (user, key) to the jobs submitted under it; rebuilt from the `notes` that the store keeps with jobs."""

    def __init__(self, notes: Mapping[JobId, Mapping[str, Any]]) -> None:
        self._submitted: dict[tuple[str, str], tuple[str, list[JobId]]] = {}  # (user, key): fingerprint, jobs
        for job, note in notes.items():
            if "key" in note:
                self._submitted.setdefault((note["user"], note["key"]), (note["body"], []))[1].append(job)

    def find(self, user: str, key: str, body: str) -> tuple[JobId, ...] | None:
        """Return the jobs of an earlier submission with this key; InputError when its jobs were different."""
        before, names = self._submitted.get((user, key), ("", []))
        if not names:
            return None
        if before != body:
            raise InputError(
                f"idempotency key {key!r} was already used for different jobs", way_out="Use a new key for new jobs."
            )
        return tuple(names)

    async def submit(self, user: str, key: str, body: str, names: Sequence[JobId], work: Awaitable[None]) -> None:
        """Await the submission `work` under a key; a rejected submission frees its key.

        The key is registered before `work` starts, so that two concurrent requests submit once. It stays registered if
        the client disconnects meanwhile, because the submission continues.
        """
        self._submitted[user, key] = body, list(names)
        try:
            await work
        except Exception:
            del self._submitted[user, key]
            raise


def fingerprint(jobs: Sequence[ListedJob]) -> str:
    """Hash a submission without deadlines, which depend on the request's time, and params, which programs repeat."""
    rows = [[spec_to_json(replace(spec, deadline_s=0.0, params=())), program.as_json()] for spec, program in jobs]
    return sha256(json.dumps(rows, sort_keys=True, default=list).encode()).hexdigest()
