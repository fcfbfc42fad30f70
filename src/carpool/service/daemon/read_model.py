"""Read model: the daemon state that the service facade queries."""

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
    """What the clerk looks things up in."""

    daemon: DaemonLoop
    scheduler: Scheduler
    ledger: JobAccounting
    estimates: Estimator
    spans: AllocationHistory
    chronicle: EventLog
    programs: Mapping[JobId, Program]  # of every job that the ledger has
    total: Callable[[JobId], float | None]  # a training's steps, where they are known
    state: Path
    names: Mapping[int, str]  # of devices
    calendar: TimeBase
    now: Callable[[], float]
    version: str
    policy: Callable[[], str]  # as the user wrote it
