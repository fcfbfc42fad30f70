"""How much of a daemon each person may take: jobs at once, devices of a job, and how much their jobs count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from carpool.core.errors import CarpoolError
from carpool.core.model import JobSpec
from carpool.core.ranking import PRIORITIES, priority_word
from carpool.runtime.jobfile import Listed
from carpool.runtime.reading import Table


class Exhausted(CarpoolError):
    """Somebody asked for more than they may have at once."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one person may have; 0 means as much as there is."""

    jobs: int = 0  # that are not over
    devices: int = 0  # asked for at least by all of them together
    weight: float = 1.0  # a factor on the weights of their jobs
    priority: str = "urgent"  # the highest that they may give a job

    @classmethod
    def read(cls, values: object, where: str) -> Allowance:
        """The allowance that a table of a configuration file gives; InputError where it is none."""
        table = Table(values, where)
        table.only(["jobs", "devices", "weight", "priority"])
        counts = table.whole("jobs", 0, least=0), table.whole("devices", 0, least=0)
        return cls(*counts, table.number("weight", 1.0), table.choice("priority", [*PRIORITIES][::-1]))

    def check(self, name: str, active: Iterable[JobSpec], asked: Sequence[Listed]) -> None:
        """Exhausted where these jobs, with those that are not over, would be too many, or one of them goes too far."""
        for spec, _ in asked:
            if spec.priority > PRIORITIES[self.priority]:
                raise Exhausted(
                    f"{name!r} gives job {spec.id!r} priority {priority_word(spec.priority)}; the highest allowed is "
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
                raise Exhausted(
                    f"{name!r} would have {has} {what} in jobs that are not over; the allowance is {most}. "
                    "Wait until some are over, cancel some, or ask whoever runs the daemon for more."
                )

    def weigh(self, job: Listed) -> Listed:
        """A job with the weight that it has among everybody's."""
        if self.weight == 1.0:
            return job
        return Listed(replace(job.spec, weight=job.spec.weight * self.weight), job.program)


@dataclass(frozen=True, slots=True)
class Allowances:
    """Everybody's; whoever is not named has the usual one."""

    usual: Allowance = field(default_factory=Allowance)
    named: Mapping[str, Allowance] = field(default_factory=dict)

    @classmethod
    def read(cls, values: Mapping[str, Any], where: str) -> Allowances:
        """From tables by name; that of ``default`` is the usual one."""
        found = {name: Allowance.read(table, f"{where}.{name}") for name, table in values.items()}
        return cls(found.pop("default", Allowance()), found)

    def of(self, name: str) -> Allowance:
        """What somebody may have."""
        return self.named.get(name, self.usual)
