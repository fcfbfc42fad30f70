"""Job list: filters, sort order and pagination."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from carpool.core.model import Phase
from carpool.service.queries.views import JobView

PER_PAGE = 50

_PHASE_ORDER = {phase: index for index, phase in enumerate((Phase.RUNNING, Phase.WAITING, Phase.BLOCKED, Phase.PAUSED))}

# Sort key of each column; jobs without a value come last in either direction.
_KEYS: dict[str, Callable[[JobView], Any]] = {
    "name": lambda job: job.id,
    "user": lambda job: job.user,
    "phase": lambda job: _PHASE_ORDER.get(job.phase, len(_PHASE_ORDER)),
    "progress": lambda job: job.progress,
    "ends": lambda job: None if job.ends_in is None else job.ends_in.mean_s,
    "rate": lambda job: job.steps_per_s or None,
    "loss": lambda job: job.loss,
    "devices": lambda job: devices_allocated(job) or None,
    "waited": lambda job: job.waited_s,
    "submitted": lambda job: job.submitted_at,
}
SORTS = tuple(_KEYS)


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Filter, sort order and page of the job list, as in the query string."""

    phase: str = ""  # one of Phase; empty: any
    contains: str = ""
    user: str = ""
    sort: str = "phase"
    is_descending: bool = False
    page: int = 1

    @classmethod
    def read(cls, query: Mapping[str, str]) -> JobFilter:
        """Parse a query string; invalid values are ignored."""
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
        return (Phase(self.phase),) if self.phase else ()

    @property
    def is_by_phase_only(self) -> bool:
        return not (self.contains or self.user)

    def link(self, **changes: Any) -> str:
        """URL of this filter with changes; on the first page unless `page` is given."""
        other = replace(self, **{"page": 1, **changes})
        query = {
            "phase": other.phase,
            "q": other.contains,
            "user": other.user,
            "sort": "" if other.sort == "phase" else other.sort,
            "down": "1" if other.is_descending else "",
            "page": str(other.page) if other.page > 1 else "",
        }
        text = urlencode({key: value for key, value in query.items() if value})
        return f"/jobs?{text}" if text else "/jobs"

    def sorted_by(self, column: str) -> str:
        """URL sorted by a column; reverses the order if it is already sorted by it."""
        return self.link(sort=column, is_descending=column == self.sort and not self.is_descending)

    def direction(self, column: str) -> str:
        """Value of `aria-sort` for a column; empty if the list is not sorted by it."""
        return "" if column != self.sort else "descending" if self.is_descending else "ascending"


@dataclass(frozen=True, slots=True)
class JobList:
    """One page of jobs."""

    filter: JobFilter
    jobs: tuple[JobView, ...]
    total: int  # matching jobs
    phases: Mapping[Phase, int]  # of all visible jobs
    now: float

    @classmethod
    def paginate(
        cls,
        filter_: JobFilter,
        jobs: Sequence[JobView],
        total: int,
        *,
        phases: Mapping[Phase, int],
        now: float,
        is_page: bool = False,
    ) -> JobList:
        """The filter's page of the sorted `jobs`; with `is_page`, `jobs` has only that page."""
        if not is_page:
            start = (filter_.page - 1) * PER_PAGE
            jobs = jobs[start : start + PER_PAGE]
        return cls(filter_, tuple(jobs), total, phases, now)

    @property
    def first(self) -> int:
        """Number of the first job on the page, from 1."""
        return (self.filter.page - 1) * PER_PAGE + 1

    @property
    def has_params(self) -> bool:
        return any(job.params for job in self.jobs)

    @property
    def pages(self) -> int:
        return max(1, -(-self.total // PER_PAGE))

    @property
    def num_visible(self) -> int:
        return sum(self.phases.values())


def sort_jobs(jobs: Sequence[JobView], filter_: JobFilter) -> list[JobView]:
    """Sort jobs stably by the filter's column; jobs without a value come last."""
    key = _KEYS[filter_.sort]
    known = [(value, job) for job in jobs if (value := key(job)) is not None]
    known.sort(key=lambda each: each[0], reverse=filter_.is_descending)
    return [job for _, job in known] + [job for job in jobs if key(job) is None]


def devices_requested(job: JobView) -> str:
    """Number or range of devices that a job requests."""
    if job.min_devices == job.max_devices:
        return str(job.min_devices)
    return f"{job.min_devices}–{job.max_devices}"


def devices_allocated(job: JobView) -> float:
    """Allocated devices, each counted by its fraction."""
    return sum(each.fraction for each in job.holds)
