"""Fleet growth: follows the machines of an engine while a daemon runs.

Machines that appear become members, and lost members whose machines are gone are forgotten. A member that is drained or
has been idle for long is released; while jobs wait for devices, more machines are requested.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from carpool.backends.engines.scaling import NodeUse, Scaler
from carpool.backends.executors import ExecutorGroup
from carpool.core.errors import CarpoolError
from carpool.core.scheduler import Scheduler
from carpool.logs import log_event
from carpool.service.daemon.loop import DaemonLoop
from carpool.service.fleet.executor_access import FleetMember
from carpool.service.fleet.fleet_access import FleetAccess

_TICK_S = 1.0
_log = logging.getLogger(__name__)


class MemberSource(Protocol):
    """Machines that come and go."""

    idle_s: float  # release a member that has been idle this long; 0: never

    async def fresh(self) -> Sequence[FleetMember]:
        """The machines that have appeared since the last call."""

    def gone(self) -> Collection[str]:
        """The members whose machines `fresh` did not find."""

    def forget(self, name: str) -> None:
        """Treat a machine that is gone as a new one if it returns."""

    async def release(self, name: str) -> None:
        """Release a member's machine; it is not used again before `take_back`."""

    def take_back(self, name: str) -> None:
        """Use a released machine again if it still exists."""

    async def request(self, nodes: int) -> None:
        """Request this many machines in all."""


class FleetGrowth:
    """Adds, releases and requests members of one daemon."""

    def __init__(
        self,
        source: MemberSource,
        fleet: FleetAccess,
        loop: DaemonLoop,
        executors: ExecutorGroup,
        scheduler: Scheduler,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._fleet = fleet
        self._loop = loop
        self._executors = executors
        self._scheduler = scheduler
        self._clock = clock
        self._scaler = Scaler(source.idle_s)
        self._released: dict[str, bool] = {}  # by member: whether it was drained
        self._trouble = ""

    async def run(self) -> None:
        while True:
            try:
                await self._step()
                self._trouble = ""
            except (CarpoolError, OSError) as error:
                if str(error) != self._trouble:
                    log_event(_log, "engine_failed", level=logging.WARNING, reason=str(error))
                self._trouble = str(error)
            await asyncio.sleep(_TICK_S)

    async def _step(self) -> None:
        for each in await self._source.fresh():
            log_event(_log, "member_found", executor=each.member.name)
            self._loop.use(each.member.name, await self._fleet.add(each))
        for name in self._source.gone():
            await self._remove_if_lost(name)
        nodes, jobs = self._nodes(), self._scheduler.jobs
        waiting = [jobs[job].spec.narrowest for job in self._scheduler.snapshot().waiting]
        size = max((len(node.devices) for node in self._scheduler.cluster.nodes), default=1)
        scaling = self._scaler.decide(self._clock(), nodes, waiting, size)
        for name in scaling.release:
            is_idle = any(node.name == name and node.is_idle for node in self._nodes())  # a release takes a while
            if is_idle and self._executors.evacuate(name):
                await self._release(name)
        for name, was_drained in list(self._released.items()):
            if not self._is_drained(self._fleet.nodes[name].name) and (was_drained or scaling.is_short):
                del self._released[name]
                self._source.take_back(name)
        await self._source.request(scaling.nodes)

    def _nodes(self) -> list[NodeUse]:
        """The members that are connected, with their free devices."""
        occupancy = self._scheduler.snapshot().occupancy
        by_name = {node.name: node for node in self._scheduler.cluster.nodes}
        return [
            NodeUse(
                name,
                len(node.devices),
                sum(not occupancy.residents(device) for device in node.devices),
                self._is_drained(node.name),
            )
            for name, member in self._fleet.nodes.items()
            if (node := by_name.get(member.name)) is not None and self._loop.is_connected(name)
        ]

    def _is_drained(self, node: str) -> bool:
        return any(each.id in self._scheduler.drained for each in self._scheduler.cluster.nodes if each.name == node)

    async def _remove_if_lost(self, name: str) -> None:
        """Forget a member whose machine is gone; one that is drained is kept, with its mark."""
        if self._fleet.is_lost(name) and (port := self._loop.drop(name)) is not None:
            await port.leave()
            self._released.pop(name, None)
            self._fleet.remove(name)
            self._source.forget(name)

    async def _release(self, name: str) -> None:
        """Declare a member without jobs lost, end its executor, and release its machine."""
        before, facts = self._executors[name], self._fleet.lose(name)
        self._released[name] = self._is_drained(self._fleet.nodes[name].name)
        if not self._loop.use(name, await self._fleet.absent(name), facts):
            return
        log_event(_log, "member_released", executor=name)
        await before.stop(checkpoint=False)
        await self._source.release(name)
