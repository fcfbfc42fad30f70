"""Fleet access: claims, starts and replaces the executors of a daemon's members, and keeps their nodes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from carpool.backends.executors import ExecutorGone, ExecutorPort
from carpool.backends.fleet import MemberNode, device_names, is_of, loss_of, member_node
from carpool.core.messages import Fact, JobFailed, JobPaused, NodeLost
from carpool.core.model import Allocation, DeviceId, JobId, NodeId
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Path
from carpool.logs import log_event
from carpool.runtime.executor.client import ExecutorOptions
from carpool.runtime.executor.client_protocol import Inventory
from carpool.service.daemon.recovery import is_ahead
from carpool.service.fleet.executor_access import ClaimSource, FleetMember, Unreachable
from carpool.service.store.store import Store

_RESTARTS_WITHIN_S = 60.0
_MAX_DEATHS = 2  # of executors that one job may cause; then the job fails
_MAX_UNEXPLAINED = 3  # deaths within that time while the same jobs ran; then these are paused

_log = logging.getLogger(__name__)


class MemberStart(NamedTuple):
    """An executor at a daemon's start."""

    port: ExecutorPort
    inventory: Inventory | None = None  # of an executor that the journal knows
    is_absent: bool = False  # the member is away
    is_unfit: bool = False  # it has other devices or unknown orders, and must be replaced


class FleetAccess:
    """The executors of a daemon, by the names of their members."""

    def __init__(
        self,
        members: Sequence[FleetMember],
        store: Store,
        scheduler: Scheduler,
        options: ExecutorOptions,
        commit: Callable[[], Awaitable[None]],
        tell: Callable[[str], None],
    ) -> None:
        self._members = {each.member.name: each for each in members}
        self._store = store
        self._scheduler = scheduler
        self._options = options
        self._commit = commit
        self._tell = tell
        self._restarts: dict[str, list[float]] = {}
        self._deaths: Counter[JobId] = Counter()  # of executors, by the job they were handling
        self._present: dict[str, list[tuple[float, set[JobId]]]] = {}  # jobs that ran at other deaths, by member
        self._owners: dict[str, str] = {}  # cache: members by the names of their nodes
        self.nodes: dict[str, MemberNode] = {}
        cluster, free = scheduler.cluster, self._free_nodes
        for name, each in self._members.items():
            if not each.member.devices:  # it is away, and its devices are not known yet
                continue
            self.nodes[name] = node = member_node(cluster, each.member, free)
            cluster = cluster.with_join(node.name, node.banks, node.supplies, node.replaces)

    @property
    def names(self) -> dict[int, str]:
        return device_names(self.nodes)

    def owner(self, device: DeviceId) -> str:
        """The member that has a device; empty if it is no longer a member."""
        node = self._scheduler.cluster.node_of(device).name
        if self._owners.get(node) not in self._members:
            self._owners[node] = next((name for name in self._members if is_of(node, name)), "")
        return self._owners[node]

    @property
    def measures_links(self) -> bool:
        """Whether there are links between members that can be measured."""
        return sum(each.measure is not None for each in self._members.values()) > 1

    async def measure_link(self, one: str, other: str) -> Path | None:
        """Measure the link between two nodes; None if their members cannot."""
        nodes = {node.name: self.owner(DeviceId(node.devices.start)) for node in self._scheduler.cluster.nodes}
        member = self._members.get(nodes[one])
        return None if member is None or member.measure is None else await member.measure(nodes[other])

    async def start(self) -> Mapping[str, MemberStart]:
        """Claim the executors that an earlier daemon left running, and start the others."""
        if len(self._members) == 1:  # awaited directly: a task could be cancelled before it starts
            return {name: await self._claim_or_start(name) for name in self._members}
        starting = [asyncio.create_task(self._claim_or_start(name)) for name in self._members]
        try:
            return dict(zip(self._members, await asyncio.gather(*starting), strict=True))
        except BaseException:
            await self._undo(starting)
            raise

    async def _undo(self, starting: Sequence[asyncio.Task[MemberStart]]) -> None:
        """End the executors that were started before another one failed to start; leave the others as they were."""
        for task in starting:
            task.cancel()
        for started in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(started, MemberStart) and started.inventory is None:
                await started.port.stop(checkpoint=False)
            elif isinstance(started, MemberStart):
                await started.port.leave()

    async def _claim_or_start(self, name: str) -> MemberStart:
        found = await self._members[name].access.find(self._claims(name), self._tell)
        if found is None:
            try:
                return MemberStart(await self.start_executor(name))
            except Unreachable as absent:
                if name not in self.nodes:
                    self._tell(f"Host {name} is away; it joins when it can be reached.")
                return MemberStart(absent.port, is_absent=True)
        if not self._fits(name, found.inventory):
            return MemberStart(found, is_unfit=True)
        is_known = found.life == self._store.mark.of(name).life
        jobs = len(found.inventory.jobs)
        log_event(_log, "executor_claimed", executor=name, life=found.life, jobs=jobs, is_known=is_known)
        return MemberStart(found, found.inventory if is_known else None)

    def _fits(self, name: str, inventory: Inventory) -> bool:
        """Whether an executor has the wanted devices and holds only orders from the journal.

        An executor missing from the journal belonged to a daemon that died right after starting it, so it has no jobs.
        """
        is_known = inventory.life == self._store.mark.of(name).life or not inventory.jobs
        is_behind = is_known and not is_ahead(self._scheduler.jobs, inventory.jobs)
        return not self._store.findings.lost and is_behind and inventory.devices == self.nodes[name].devices

    async def start_executor(self, name: str) -> ExecutorPort:
        port = await self._members[name].access.start(self._claims(name))
        devices = [device.name for device in self.nodes[name].devices]
        log_event(_log, "executor_started", executor=name, life=port.life, devices=devices)
        return port

    async def add(self, each: FleetMember) -> ExecutorPort:
        """Add a member found while the daemon runs. Returns the port that stands for it until it is reached."""
        self._members[each.member.name] = each
        return await self.absent(each.member.name)

    async def absent(self, name: str) -> ExecutorPort:
        """The port that stands for a member until its next executor is ready."""
        try:
            return await self.start_executor(name)
        except Unreachable as absent:
            return absent.port

    def is_lost(self, name: str) -> bool:
        """Whether a member has no nodes that may be used."""
        nodes = self._scheduler.cluster.nodes
        return all(node.id in self._lost for node in nodes if is_of(node.name, name))

    def remove(self, name: str) -> None:
        """Forget a member that does not return; a new member with equal devices takes the place of its node."""
        self._members.pop(name).access.close()
        self.nodes.pop(name, None)
        log_event(_log, "member_removed", executor=name)

    @property
    def _free_nodes(self) -> set[str]:
        """Lost nodes whose machines are no longer members."""
        lost = [self._scheduler.cluster.nodes[number].name for number in self._lost]
        return {node for node in lost if not any(is_of(node, name) for name in self._members)}

    async def renew(self, name: str, reason: str) -> tuple[ExecutorPort, Sequence[Fact]]:
        """Replace an executor that is gone: by a new one, or by a port that waits for the member's return."""
        access = self._members[name].access
        self._count_restart(name, reason, access.max_restarts)
        blamed = self._blame(name, reason)
        try:
            member = access.found or self._members[name].member
            if member.devices:
                self.nodes[name] = member_node(self._scheduler.cluster, member, self._free_nodes)
            return await self.start_executor(name), [*self.rejoin(name), *blamed]
        except Unreachable as absent:
            log_event(_log, "member_lost", level=logging.WARNING, executor=name, reason=f"{reason}; {absent}")
            return absent.port, [*self.lose(name), *blamed]

    def _count_restart(self, name: str, reason: str, allowed: int) -> None:
        now = time.monotonic()
        recent = [each for each in self._restarts.get(name, ()) if now - each < _RESTARTS_WITHIN_S]
        self._restarts[name] = [*recent, now]
        if len(self._restarts[name]) > allowed:
            times = f" for the {len(self._restarts[name])}th time within {_RESTARTS_WITHIN_S:.0f} s" if allowed else ""
            raise ExecutorGone(f"the executor ended{times}: {reason}")

    def _blame(self, name: str, reason: str) -> list[Fact]:
        """Fail the job that a member's executor was handling when it died, if that has happened before."""
        suspected = self._suspect(name, reason)
        job = self._members[name].access.job_in_hand()
        if job is None or job not in self._scheduler.jobs:
            return suspected
        self._deaths[job] += 1
        log_event(_log, "executor_died_of_job", level=logging.ERROR, job=job, times=self._deaths[job], reason=reason)
        if self._deaths[job] < _MAX_DEATHS:
            return suspected
        self._present.pop(name, None)
        error = f"quarantined: the executor died {self._deaths[job]} times while it handled this job ({reason})"
        return [JobFailed(job, self._scheduler.jobs[job].generation, error)]

    def _suspect(self, name: str, reason: str) -> list[Fact]:
        """Find the jobs that ran at each of an executor's last deaths: a single one fails, several are paused.

        A command can kill the executor by its process id while the executor handles another job or none.
        """
        now, jobs = time.monotonic(), self._scheduler.jobs
        recent = [each for each in self._present.get(name, ()) if now - each[0] < _RESTARTS_WITHIN_S]
        running = {job for job, each in jobs.items() if each.desired is not None and self._holds(name, each.desired)}
        self._present[name] = deaths = [*recent, (now, running)]
        suspects = sorted(set.intersection(*[present for _, present in deaths]), key=lambda job: jobs[job].seq)
        if not suspects or len(deaths) < (_MAX_DEATHS if len(suspects) == 1 else _MAX_UNEXPLAINED):
            return []
        log_event(_log, "executor_died_beside_jobs", level=logging.ERROR, jobs=suspects, times=len(deaths))
        del self._present[name]
        times = f"the executor died {len(deaths)} times within {_RESTARTS_WITHIN_S:.0f} s"
        if len(suspects) == 1:
            error = f"quarantined: {times} while only this job ran each time ({reason})"
            return [JobFailed(suspects[0], jobs[suspects[0]].generation, error)]
        words = (
            f"was paused, like all {len(suspects)} jobs that ran each time: {times} ({reason}). Resume one at a time"
        )
        return [JobPaused(job, words) for job in suspects]

    def _holds(self, name: str, allocation: Allocation) -> bool:
        return any(self.owner(device) == name for device in allocation.devices())

    def lose(self, name: str) -> list[Fact]:
        """Declare a member lost, with all that ran on it."""
        return loss_of(self._scheduler.cluster, self._lost, name)

    def lose_departed(self) -> list[Fact]:
        """Declare the nodes of the journal lost whose machine is no longer a member."""
        there = [node for node in self._scheduler.cluster.nodes if node.id not in self._lost]
        return [NodeLost(node.id) for node in there if not any(is_of(node.name, name) for name in self._members)]

    def rejoin(self, name: str) -> list[Fact]:
        """Report a member's node as lost, with all that ran on it, and then as joined again."""
        node = self.nodes[name]
        log_event(_log, "node_rejoined", node=node.name, devices=len(node.devices))
        return node.rejoin(self._scheduler.cluster, self._lost, name)

    @property
    def _lost(self) -> set[NodeId]:
        """Lost nodes that are not drained; a drained node is reported as lost again when its member is lost."""
        return {*self._scheduler.snapshot().occupancy.lost} - {*self._scheduler.drained}

    def close(self) -> None:
        for each in self._members.values():
            each.access.close()

    def _claims(self, name: str) -> ClaimSource:
        devices = self.nodes[name].devices if name in self.nodes else ()
        return ClaimSource(self._store, devices, self._options, self._commit, name)
