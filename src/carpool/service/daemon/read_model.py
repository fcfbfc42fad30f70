"""Read model: the daemon state that queries read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from carpool.backends.job_accounting import JobAccounting
from carpool.core.estimates import Estimator
from carpool.core.model import JobId
from carpool.core.scheduler import Scheduler
from carpool.jobs.program import Program
from carpool.service.daemon.loop import DaemonLoop
from carpool.service.queries.allocation_history import AllocationHistory
from carpool.service.queries.event_log import EventLog
from carpool.service.queries.present import TimeBase


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadModel:
    """The parts of a daemon that `SchedulerService` reads, and the loop it sends commands to."""

    loop: DaemonLoop
    scheduler: Scheduler
    accounting: JobAccounting
    estimates: Estimator
    allocations: AllocationHistory
    events: EventLog
    programs: Mapping[JobId, Program]  # of every job in `accounting`
    total_steps: Callable[[JobId], float | None]  # None: unknown
    state: Path
    names: Mapping[int, str]  # of devices
    calendar: TimeBase
    now: Callable[[], float]
    version: str
    policy: Callable[[], str]  # as the user wrote it
