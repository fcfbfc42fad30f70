"""Remote access: claims, starts and waits for the executors of other machines (engine ``hosts``)."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from carpool.backends.executors import ExecutorPort
from carpool.backends.fleet import Member
from carpool.backends.job_transfer import CodeArchives, JobTransfer
from carpool.backends.remote_member import RemoteMember
from carpool.core.errors import CarpoolError, InputError
from carpool.core.messages import Order
from carpool.core.model import JobId
from carpool.core.topology import Path as LinkPath
from carpool.jobs.hosts_file import Host, HostsFile
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.logs import log_event
from carpool.runtime.executor.client import Claim, ClaimRefused, ExecutorClient, ExecutorSocket, RemoteProcess
from carpool.runtime.executor.lease import lost_after_s
from carpool.runtime.executor.reports import Gone, HandedOver, Report
from carpool.runtime.remote.link_probe import request_measurement
from carpool.runtime.remote.remote_link import AgentFacts, HostUnreachable, RemoteFiles, connect
from carpool.runtime.remote.remote_protocol import peer_token
from carpool.runtime.remote.remote_start import ensure_agent
from carpool.runtime.remote.remote_worker_stream import Peer
from carpool.service.fleet.executor_access import ClaimSource, FleetMember, Unreachable

_SILENCE_SHARE = 0.5  # of a lease without a heartbeat, after which the connection is renewed
_RETRY_S = 1.0
_MIRROR_S = 1.0  # between mirrors, which are fetched: steps that a lost machine made after the last one are repeated
_MIN_REQUEST_S = 5.0  # for a request for files
_log = logging.getLogger(__name__)

EnsureAgent = Callable[[Host], Awaitable[Host]]  # starts the agent of a host if possible; returns how it is reached now


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """What all members of a fleet share."""

    state: Path  # of the daemon
    lease_s: float
    codes: CodeArchives
    orphan_s: float = 86400.0  # an executor without its scheduler saves all states and exits after this
    clock: Callable[[], float] = time.monotonic  # for leases
    peers: dict[str, Peer] = field(default_factory=dict)  # members that have been claimed, for jobs across them

    @property
    def grace_s(self) -> float:
        return lost_after_s(self.lease_s)

    @property
    def owner(self) -> str:
        """The name of this scheduler for agents, which serve one scheduler at a time."""
        return f"state folder {self.state.absolute()}"


class RemoteAccess:
    """How the executor of one host is claimed, started and replaced."""

    max_restarts = sys.maxsize  # the daemon waits for a member that is away

    def __init__(
        self, host: Host, settings: RemoteSettings, facts: AgentFacts | None, ensure: EnsureAgent = ensure_agent
    ) -> None:
        self.found: Member | None = None
        self._host = host
        self._settings = settings
        self._facts = facts  # None until the agent is reached for the first time
        self._ensure = ensure
        self._trouble = ""  # why the host cannot be used
        self._has_started = False
        self._ready: RemoteMember | None = None  # started in the background
        self._in_hand: JobId | None = None  # of the executor that died last

    async def find(self, claims: ClaimSource, tell: Callable[[str], None]) -> RemoteMember | None:
        """Claim the executor that an earlier daemon left running there; one whose devices are unknown is replaced."""
        if not claims.is_known:
            return None
        # Until then its jobs may still run, under the previous daemon.
        lost_at = self._settings.clock() + self._settings.grace_s
        while True:
            try:
                facts = await agent_facts(self._host)
                is_usable = facts.is_running and self._facts is not None
                return await self._member(claims, fresh=False) if is_usable else None
            except InputError as error:
                if self._settings.clock() > lost_at:
                    tell(f"{error} Its jobs resume on other machines, or when it returns.")
                    return None
                await asyncio.sleep(_RETRY_S)

    async def start(self, claims: ClaimSource) -> ExecutorPort:
        """Start a fresh executor there, which replaces a running one.

        Once the loop runs, this does not wait: the member counts as away until its executor is ready.
        """
        if self._ready is not None:
            ready, self._ready = self._ready, None
            return ready
        if self._facts is None:
            raise Unreachable("it cannot be reached yet", AbsentMember(self._appear))
        if self._has_started:
            raise Unreachable("its executor is started again", AbsentMember(lambda: self._restart(claims)))
        try:
            return await self._member(claims, fresh=True)
        except InputError as error:
            if self.found is not None:  # it has no node yet
                self._facts = None
                raise Unreachable(str(error), AbsentMember(self._appear)) from None
            if not claims.is_known:
                raise
            raise Unreachable(str(error), AbsentMember(lambda: self._restart(claims))) from None

    async def _appear(self) -> None:
        """Wait until the host can be reached for the first time, and learn which devices it has."""
        while self._facts is None:
            try:
                await self._reach()
            except (CarpoolError, OSError) as error:
                await self._wait_for_change(error)

    async def _restart(self, claims: ClaimSource) -> None:
        """Start a fresh executor as soon as the host can be reached; one with other devices is a new member first."""
        while self._ready is None:
            try:
                if await self._reach():
                    return
                self._ready = await self._member(claims, fresh=True)
            except (CarpoolError, OSError) as error:
                await self._wait_for_change(error)

    async def _reach(self) -> bool:
        """Reach the agent, perhaps a new one. Returns whether its devices differ from the known ones."""
        self._host = await self._ensure(self._host)
        before, self._facts = self._facts, await agent_facts(self._host)
        self._trouble = ""
        if before is not None and before.devices == self._facts.devices:
            return False
        self.found = Member(self._host.name, self._facts.devices, self._facts.supplies)
        self._has_started = False
        return True

    async def _wait_for_change(self, error: Exception) -> None:
        """Wait before the next attempt; a host that answers and cannot be used is logged once."""
        if str(error) != self._trouble and isinstance(error, InputError) and not isinstance(error, HostUnreachable):
            log_event(_log, "member_unusable", level=logging.WARNING, executor=self._host.name, reason=str(error))
        self._trouble = str(error)
        await asyncio.sleep(_RETRY_S)

    async def measure_link(self, other: str) -> LinkPath | None:
        """Let this host measure the link to another member; None if it cannot."""
        peer = self._settings.peers.get(other)
        return None if peer is None else await request_measurement(self._host, peer.host)

    def job_in_hand(self) -> JobId | None:
        """The job that the last executor was handling when it died; returned once, as a loss takes two replacements."""
        job, self._in_hand = self._in_hand, None
        return job

    def close(self) -> None:
        """Disconnect; the agent and its processes keep running."""
        self._settings.peers.pop(self._host.name, None)
        if self._ready is not None:
            self._ready.close()

    async def _member(self, claims: ClaimSource, *, fresh: bool) -> RemoteMember:
        client = await self._claim(claims, fresh=fresh)
        self._has_started = True

        async def reclaim(before: ExecutorClient, stored: int) -> ExecutorClient | None:
            return await self._reclaim(claims, before, stored)

        settings = self._settings
        files = RemoteFiles(self._host, max(_MIN_REQUEST_S, settings.lease_s))
        transfer = JobTransfer(settings.state, files, settings.codes, continues=not fresh)
        for_others = replace(self._host, token=peer_token(self._host.token))
        settings.peers[self._host.name] = Peer(for_others, tuple(client.inventory.devices))
        return RemoteMember(
            self._host.name, client, reclaim, transfer, settings.grace_s, settings.clock, settings.peers
        )

    async def _claim(
        self, claims: ClaimSource, *, fresh: bool, before: ExecutorClient | None = None, stored: int | None = None
    ) -> ExecutorClient:
        lease_s = self._settings.lease_s
        while True:
            connection = await connect(self._host, "executor", owner=self._settings.owner, fresh=fresh, lease_s=lease_s)
            claim = self._claim_for(await claims.next_durable())
            if before is not None and stored is not None:
                claim = replace(claim, life=before.life, after=stored)
            try:
                return await ExecutorClient.claim_remote(
                    connection.reader, connection.writer, claim, RemoteProcess(), before
                )
            except ClaimRefused as refused:  # only this scheduler has the token, so the store has lost an epoch
                claims.outnumbered(refused.epoch)

    def _claim_for(self, claim: Claim) -> Claim:
        assert self._facts is not None, "an executor is claimed on a host that was reached"
        there = self._facts.state
        marker = str(ExecutorSocket(there / "executor").job_marker)
        options = replace(
            claim.options,
            on_orphan="wait",
            orphan_s=self._settings.orphan_s,
            job_marker=marker,
            mirror_s=min(claim.options.mirror_s, _MIRROR_S),
            copies_mirrors=True,
        )
        lease_s = self._settings.lease_s
        return replace(claim, state=there, options=options, silence_s=lease_s * _SILENCE_SHARE, lease_s=lease_s)

    async def _reclaim(self, claims: ClaimSource, before: ExecutorClient, stored: int) -> ExecutorClient | None:
        """Claim the executor of a broken connection again; None if it has exited."""
        facts = await agent_facts(self._host)
        if not facts.is_running:
            self._in_hand = JobId(facts.job_in_hand) if facts.job_in_hand else None
            return None
        client = await self._claim(claims, fresh=False, before=before, stored=stored)
        if client.life == before.life:
            return client
        await client.leave()
        return None


class AbsentMember:
    """Stands for a member that is lost, until its next executor is ready."""

    life = 0
    heard = 0

    def __init__(self, restart: Callable[[], Awaitable[None]]) -> None:
        self._restart = restart
        self._restarting: asyncio.Future[None] | None = None
        self._reports: asyncio.Queue[Report] = asyncio.Queue()

    def introduce(self, job: JobId, program: Program, *, resume: bool = False) -> None:
        """It holds no jobs."""

    def carry(self, orders: Sequence[Order]) -> None:
        """It has no devices that orders could be for."""

    def hand_over(self, job: JobId) -> None:
        """Answer at once, since it holds no jobs: an order from before the loss may be sent after it."""
        self._reports.put_nowait(HandedOver(job, 0))

    def forget(self, job: JobId) -> None:
        """It holds no jobs."""

    def acknowledge(self, number: int) -> None:
        """It sends no reports."""

    def proceed(self) -> None:
        """It holds no jobs."""

    async def receive(self) -> Report:
        """Return an answer, or `Gone` once an executor is ready (the loop then requests it) or the loop ends."""
        if self._restarting is None:
            self._restarting = asyncio.ensure_future(self._restart())
        answer = asyncio.create_task(self._reports.get())
        either: set[asyncio.Future[Any]] = {self._restarting, answer}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._restarting.cancel()
            raise
        finally:
            if not answer.done():
                answer.cancel()
        return answer.result() if answer.done() and not answer.cancelled() else Gone("the next executor is ready")

    async def stop(self, *, checkpoint: bool) -> None:
        await self.leave()

    async def leave(self) -> None:
        if self._restarting is not None:
            self._restarting.cancel()
        self._reports.put_nowait(Gone("it is away"))


async def agent_facts(host: Host) -> AgentFacts:
    """The report of a host's agent about its machine; InputError if it cannot be reached."""
    connection = await connect(host, "facts")
    connection.writer.close()
    return connection.facts


@dataclass(frozen=True, slots=True)
class HostFinding:
    """Whether one host can be used."""

    name: str
    is_there: bool
    found: str  # its versions and devices, or the problem


async def examine_hosts(hosts: HostsFile) -> list[HostFinding]:
    """Ask every host for its versions and devices; GPU drivers may differ, everything else must not."""

    async def examine(host: Host) -> HostFinding:
        try:
            facts = await agent_facts(host)
        except InputError as error:
            return HostFinding(host.name, is_there=False, found=str(error))
        return describe_host(host.name, facts)

    return list(await asyncio.gather(*[examine(host) for host in hosts.hosts]))


def describe_host(name: str, facts: AgentFacts) -> HostFinding:
    """A host that can be used: its versions, driver and devices."""
    versions = facts.versions
    words = [f"carpool {versions.carpool}", f"Python {versions.python}", f"torch {versions.torch}"]
    words += [f"driver {facts.drivers}"] if facts.drivers else []
    words.append(", ".join(f"{device.name} ({device.kind})" for device in facts.devices))
    return HostFinding(name, is_there=True, found="; ".join(words))


async def check_jobs(hosts: HostsFile, state: Path, jobs: Sequence[ListedJob]) -> None:
    """InputError for code that is too large to send, or a path that a job names and a host does not have."""
    codes = CodeArchives(state, hosts.max_code_bytes)
    for folder in {program.folder for _, program in jobs if program.folder}:
        await codes.of(folder)
    for host in hosts.hosts:
        transfer = JobTransfer(state, RemoteFiles(host), codes)
        try:
            for spec, program in jobs:
                await transfer.check_paths(spec.id, program)
        finally:
            transfer.close()


async def remote_members(
    hosts: HostsFile,
    state: Path,
    *,
    orphan_s: float = 86400.0,
    may_be_away: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[FleetMember, ...]:
    """The members of a hosts file, each asked for its devices; InputError if one cannot be reached.

    If hosts may be away, such a host joins once it is reached; at least one must be reachable now, and a wrong token or
    version is an error all the same.
    """
    settings = RemoteSettings(state, hosts.lease_s, CodeArchives(state, hosts.max_code_bytes), orphan_s, clock)

    async def member(host: Host) -> FleetMember:
        try:
            facts = await agent_facts(await ensure_agent(host))
        except HostUnreachable:
            if not may_be_away:
                raise
            absent = RemoteAccess(host, settings, None)
            return FleetMember(Member(host.name, ()), absent, absent.measure_link)
        access = RemoteAccess(host, settings, facts)
        return FleetMember(Member(host.name, facts.devices, facts.supplies), access, access.measure_link)

    found = await asyncio.gather(*[member(host) for host in hosts.hosts])
    if not any(each.member.devices for each in found):
        await agent_facts(hosts.hosts[0])
    return tuple(found)
