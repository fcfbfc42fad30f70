"""Engine members: the machines of an engine as members of a fleet, each with the agent that the engine starts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from carpool.backends.engines.engine import Engine
from carpool.backends.fleet import Member
from carpool.backends.job_transfer import CodeArchives
from carpool.core.errors import InputError
from carpool.jobs.code_archive import MAX_BYTES
from carpool.jobs.hosts_file import Host, HostsFile
from carpool.runtime.remote.remote_link import AgentFacts, HostUnreachable
from carpool.service.fleet.executor_access import FleetMember
from carpool.service.fleet.remote_access import HostFinding, RemoteAccess, RemoteSettings, agent_facts, describe_host

_WAIT_S = 600.0  # for the first machine: an autoscaler may have to start it
_POLL_S = 1.0
_REPEAT_S = 30.0  # between equal requests for machines
_UNKNOWN = ("", 0, "")  # address, port and token of an agent that is still to be started


class EngineMembers:
    """The machines of an engine, which join and leave."""

    def __init__(
        self,
        engine: Engine,
        state: Path,
        *,
        lease_s: float = 30.0,
        idle_s: float = 0.0,
        max_code_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.idle_s = idle_s
        self._engine = engine
        self._max_code_bytes = max_code_bytes
        self._settings = RemoteSettings(state, lease_s, CodeArchives(state, max_code_bytes), clock=clock)
        self._seen: set[str] = set()
        self._there: frozenset[str] = frozenset()  # at the last check
        self._released: set[str] = set()
        self._requested = (0, -_REPEAT_S)  # machines, and when

    async def first(
        self, tell: Callable[[str], None] = lambda words: None
    ) -> tuple[HostsFile, tuple[FleetMember, ...]]:
        """Wait for a machine, then start the agents of all machines; InputError if one cannot be used."""
        names = await self._wait_for_one(tell)
        self._seen.update(names)
        hosts = await asyncio.gather(*[self._engine.start(name) for name in names])
        facts = await asyncio.gather(*[agent_facts(host) for host in hosts])
        for name, each in zip(names, facts, strict=True):
            if each.used_by not in ("", self._settings.owner):
                problem, way_out = (
                    f"is used by another scheduler ({each.used_by})",
                    "Stop that one, or submit jobs to it.",
                )
                raise InputError(problem, where=f"node {name!r}", way_out=way_out)
        members = tuple(self._member(host, each) for host, each in zip(hosts, facts, strict=True))
        return HostsFile(tuple(hosts), self._settings.lease_s, self._max_code_bytes), members

    async def _wait_for_one(self, tell: Callable[[str], None]) -> Sequence[str]:
        give_up_at = time.monotonic() + _WAIT_S
        while not (names := await self._engine.find()):
            if self._requested[0] == 0:
                tell("no machine with devices has joined yet; requesting one")
                await self.request(1)
            if time.monotonic() > give_up_at:
                way_out = "Add one, or let the autoscaler start one."
                raise InputError(f"no machine with devices joined within {_WAIT_S:g} s", way_out=way_out)
            await asyncio.sleep(_POLL_S)
        return names

    async def fresh(self) -> Sequence[FleetMember]:
        self._there = frozenset(await self._engine.find())
        names = sorted(self._there - self._seen)
        self._seen.update(names)
        return [self._member(Host(name, *_UNKNOWN), None) for name in names]

    def gone(self) -> Collection[str]:
        return sorted(self._seen - self._there)

    def forget(self, name: str) -> None:
        self._seen.discard(name)
        self._released.discard(name)

    def _member(self, host: Host, facts: AgentFacts | None) -> FleetMember:
        member = Member(host.name, ()) if facts is None else Member(host.name, facts.devices, facts.supplies)
        access = RemoteAccess(host, self._settings, facts, self._ensure)
        return FleetMember(member, access, access.measure_link)

    async def _ensure(self, host: Host) -> Host:
        if host.name in self._released:
            raise HostUnreachable("it was released", where=f"node {host.name!r}")
        return await self._engine.start(host.name)

    async def release(self, name: str) -> None:
        self._released.add(name)
        await self._engine.release(name)

    def take_back(self, name: str) -> None:
        self._released.discard(name)

    async def request(self, nodes: int) -> None:
        now = time.monotonic()
        if nodes != self._requested[0] or now - self._requested[1] >= _REPEAT_S:
            await self._engine.request(nodes)
            self._requested = (nodes, now)


async def examine_engine(engine: Engine) -> list[HostFinding]:
    """Ask every machine for its versions and devices; agents that this call started are ended again."""
    names, found = await engine.find(), []
    running = set(engine.left_running)

    async def examine(name: str) -> HostFinding:
        try:
            return describe_host(name, await agent_facts(await engine.start(name)))
        except InputError as error:
            return HostFinding(name, is_there=False, found=str(error))

    found = list(await asyncio.gather(*[examine(name) for name in names]))
    await asyncio.gather(*[engine.release(name) for name in names if name not in running])
    return found
