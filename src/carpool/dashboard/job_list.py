"""Job list: filters, sort order and pagination."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from carpool.core.model import Phase
from carpool.service.queries.views import JobView

PER_PAGE = 50

_ORDER = {phase: place for place, phase in enumerate((Phase.RUNNING, Phase.WAITING, Phase.BLOCKED, Phase.PAUSED))}

# What each column is sorted by; where nothing is known comes last in either direction.
_KEYS: dict[str, Callable[[JobView], Any]] = {
    "name": lambda job: job.id,
    "user": lambda job: job.user,
    "phase": lambda job: _ORDER.get(job.phase, len(_ORDER)),
    "progress": lambda job: job.progress,
    "ends": lambda job: None if job.ends_in is None else job.ends_in.mean_s,
    "rate": lambda job: job.steps_per_s or None,
    "loss": lambda job: job.loss,
    "devices": lambda job: sum(each.fraction for each in job.holds) or None,
    "waited": lambda job: job.waited_s,
    "submitted": lambda job: job.submitted_at,
}
SORTS = tuple(_KEYS)


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs somebody wants to see, as their address says it."""

    phase: str = ""  # one of Phase; empty: any
    contains: str = ""
    user: str = ""
    sort: str = "phase"
    is_down: bool = False
    page: int = 1

    @classmethod
    def read(cls, query: Mapping[str, str]) -> JobFilter:
        """What the address asks for; what makes no sense is left out."""
        phase, sort, page = query.get("phase", ""), query.get("sort", ""), query.get("page", "")
        return cls(
            phase if phase in tuple(Phase) else "",
            query.get("q", "").strip()[:100],
            query.get("user", "")[:100],
            sort if sort in SORTS else "phase",
            query.get("down") == "1",
            int(page) if page.isascii() and page.isdigit() and len(page) < 7 and int(page) > 0 else 1,
        )

    @property
    def phases(self) -> tuple[Phase, ...]:
        """For the clerk."""
        return (Phase(self.phase),) if self.phase else ()

    @property
    def is_of_all(self) -> bool:
        """Whether everybody of a phase is meant."""
        return not (self.contains or self.user)

    def link(self, **changes: Any) -> str:
        """The address of this choice with something changed; a new choice begins at its first page."""
        other = replace(self, **{"page": 1, **changes})
        query = {
            "phase": other.phase,
            "q": other.contains,
            "user": other.user,
            "sort": "" if other.sort == "phase" else other.sort,
            "down": "1" if other.is_down else "",
            "page": str(other.page) if other.page > 1 else "",
        }
        return "/jobs" + (
            "?" + said if (said := urlencode({key: value for key, value in query.items() if value})) else ""
        )

    def sorted_by(self, column: str) -> str:
        """The address of this choice sorted by a column, the other way round if it is already."""
        return self.link(sort=column, is_down=column == self.sort and not self.is_down)

    def direction(self, column: str) -> str:
        """As `aria-sort` says it; empty for the others."""
        return "" if column != self.sort else "descending" if self.is_down else "ascending"


@dataclass(frozen=True, slots=True)
class JobList:
    """One page of jobs."""

    choice: JobFilter
    jobs: tuple[JobView, ...]
    total: int  # that match
    phases: Mapping[Phase, int]  # of all that may be seen
    now: float

    @classmethod
    def cut(
        cls,
        choice: JobFilter,
        jobs: Sequence[JobView],
        total: int,
        *,
        phases: Mapping[Phase, int],
        now: float,
        is_cut: bool = False,
    ) -> JobList:
        """The page that was chosen, of all jobs in order; `is_cut`: of them, only that page's are given."""
        if not is_cut:
            start = (choice.page - 1) * PER_PAGE
            jobs = jobs[start : start + PER_PAGE]
        return cls(choice, tuple(jobs), total, phases, now)

    @property
    def first(self) -> int:
        """Number of the first job shown, from 1."""
        return (self.choice.page - 1) * PER_PAGE + 1

    @property
    def pages(self) -> int:
        """How many there are."""
        return max(1, -(-self.total // PER_PAGE))

    @property
    def num_seen(self) -> int:
        """Jobs there are at all."""
        return sum(self.phases.values())


def sort_jobs(jobs: Sequence[JobView], choice: JobFilter) -> list[JobView]:
    """Jobs sorted as chosen; those alike in that column remain as they come, those without a value are last."""
    key = _KEYS[choice.sort]
    known = [(value, job) for job in jobs if (value := key(job)) is not None]
    known.sort(key=lambda each: each[0], reverse=choice.is_down)
    return [job for _, job in known] + [job for job in jobs if key(job) is None]


def devices_asked(job: JobView) -> str:
    """What a job asked for: a number, or from the fewest to the most it accepts."""
    if job.min_devices == job.max_devices:
        return str(job.min_devices)
    return f"{job.min_devices}–{job.max_devices}"


def devices_held(job: JobView) -> float:
    """Devices held, each counted by the fraction of it."""
    return sum(each.fraction for each in job.holds)
