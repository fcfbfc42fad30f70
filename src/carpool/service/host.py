"""What a daemon asks of whoever runs it, and what it tells them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from carpool.core.messages import Fact
from carpool.core.model import JobId
from carpool.runtime.jobfile import Listed
from carpool.runtime.reports import Report, Sized
from carpool.service.line import ExecutorLine

Renew = Callable[[str], Awaitable[tuple[ExecutorLine, Sequence[Fact]]]]


@dataclass(frozen=True, slots=True)
class Host:
    """Functions that a daemon calls; where one is left out, nobody wants to know."""

    expect: Callable[[Sequence[Listed]], None] = lambda jobs: None  # before anything is decided about these jobs
    accept: Callable[[Sequence[Listed]], None] = lambda jobs: None  # they are submitted
    take: Callable[[float, Report], None] = lambda at, report: None  # after the scheduler has had the facts in it
    sized: Callable[[JobId], Sized | None] = lambda job: None  # what a training has told of itself
    cut: Callable[[], Callable[[], None]] = lambda: lambda: None  # before a commit: what is to be done behind it
    renew: Renew | None = None  # another executor for one that is gone, and why; without it the daemon ends
