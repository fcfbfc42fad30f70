"""Engine interface: finds machines, starts an agent on each, and ends it when the machine is released.

All that follows, from claiming the machine's executor to its jobs' files, goes over TCP between scheduler and agent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from carpool.jobs.hosts_file import Host


class Engine(Protocol):
    """Machines that come and go; each has a name of its own."""

    async def find(self) -> Sequence[str]:
        """The names of the machines that exist now."""

    async def start(self, name: str) -> Host:
        """Start the agent of a machine unless it runs, and say how it is reached.

        HostUnreachable for a machine that is gone, InputError for one that cannot be used.
        """

    async def release(self, name: str) -> None:
        """End the agent of a machine, so that the machine can be used for other work or end."""

    @property
    def left_running(self) -> Collection[str]:
        """Machines whose agents were there at the first `find`: left by an earlier scheduler, or used by another."""

    async def request(self, nodes: int) -> None:
        """Request this many machines in all, including those that exist."""

    def close(self, *, keep: Callable[[str], bool] = lambda name: False) -> None:
        """End the agents of all machines but those to keep."""
