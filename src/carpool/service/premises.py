"""What a daemon has to look things up in, for those who answer people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from carpool.backends.ledger import Ledger
from carpool.core.estimates import Estimator
from carpool.core.model import JobId
from carpool.core.scheduler import Scheduler
from carpool.runtime.program import Program
from carpool.service.chronicle import Chronicle
from carpool.service.daemon import Daemon
from carpool.service.showing import Calendar
from carpool.service.spans import Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Premises:
    """What the clerk looks things up in."""

    daemon: Daemon
    scheduler: Scheduler
    ledger: Ledger
    estimates: Estimator
    spans: Spans
    chronicle: Chronicle
    programs: Mapping[JobId, Program]  # of every job that the ledger has
    total: Callable[[JobId], float | None]  # a training's steps, where they are known
    state: Path
    names: Mapping[int, str]  # of devices
    calendar: Calendar
    now: Callable[[], float]
    version: str
    policy: Callable[[], str]  # as the user wrote it
