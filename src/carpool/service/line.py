"""What a daemon asks of the line to its executor."""

from __future__ import annotations

from typing import Protocol

from carpool.backends.local import ExecutorPort
from carpool.core.model import JobId


class ExecutorLine(ExecutorPort, Protocol):
    """The near end of an executor that outlives its daemon; `runtime.link.ExecutorLink` is the real one."""

    @property
    def life(self) -> int:
        """Which executor it is: another one numbers its reports anew."""
        ...

    @property
    def heard(self) -> int:
        """The number of the report that `receive` returned last."""
        ...

    def acknowledge(self, number: int) -> None:
        """What came up to this report is kept."""
        ...

    def proceed(self) -> None:
        """Let jobs go on that stood still because nobody was there."""
        ...

    def forget(self, job: JobId) -> None:
        """A job is over and will not be asked for again."""
        ...

    async def leave(self) -> None:
        """Let the executor go on, for whoever claims it next."""
        ...
