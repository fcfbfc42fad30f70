"""The link between two agents: measured on request, only with the tokens, and not without the other end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from carpool.core.host_resources import HostResources
from carpool.jobs.devices import parse_devices
from carpool.jobs.hosts_file import Host
from carpool.runtime.remote.link_probe import request_measurement
from carpool.runtime.remote.remote_agent import Agent, AgentOptions
from carpool.runtime.remote.remote_protocol import peer_token

TOKENS = ("0123456789abcdef", "fedcba9876543210")


def test_one_agent_measures_the_link_to_another() -> None:
    async def main() -> None:
        servers = []
        for token in TOKENS:
            agent = Agent(AgentOptions(Path("/nonexistent"), parse_devices("cpu:1"), HostResources(2), token))
            servers.append(await asyncio.start_server(agent.on_connection, "127.0.0.1", 0))
        ports = [server.sockets[0].getsockname()[1] for server in servers]
        one, other = (
            Host("box", "127.0.0.1", port, token, tls=False) for port, token in zip(ports, TOKENS, strict=True)
        )
        peer = replace(other, token=peer_token(other.token))
        found = await request_measurement(one, peer)
        assert found is not None
        assert found.bytes_per_s > 0.0
        assert 0.0 < found.latency_s < 10.0
        assert await request_measurement(one, other) is None, "the other agent accepts the token for peers only"
        assert await request_measurement(replace(one, token=peer_token(one.token)), peer) is None
        servers[1].close()
        await servers[1].wait_closed()
        assert await request_measurement(one, peer) is None, "the other agent is away"
        servers[0].close()

    asyncio.run(main())
