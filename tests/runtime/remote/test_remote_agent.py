"""The handshake: who has the token and the versions gets in, also when another server stands in between."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from carpool.core.errors import InputError
from carpool.core.host_resources import HostResources
from carpool.jobs.devices import parse_devices
from carpool.jobs.hosts_file import Host
from carpool.runtime.remote import remote_protocol as protocol
from carpool.runtime.remote.remote_agent import Agent, AgentOptions, certificate_of
from carpool.runtime.remote.remote_link import HostUnreachable, RemoteFiles, connect
from carpool.runtime.remote.remote_start import own_certificate

TOKEN = "0123456789abcdef"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None]


def context_of(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*own_certificate(folder, "box"))
    return context


@asynccontextmanager
async def listening(handler: Handler, context: ssl.SSLContext | None) -> AsyncIterator[Host]:
    server = await asyncio.start_server(handler, "127.0.0.1", 0, ssl=context)
    async with server:
        yield Host("box", "127.0.0.1", server.sockets[0].getsockname()[1], TOKEN, tls=context is not None)


def make_agent(folder: Path, *, tls: bool, kind: type[Agent] = Agent) -> Agent:
    certificate = certificate_of(own_certificate(folder, "box")[0]) if tls else b""
    return kind(AgentOptions(folder, parse_devices("cpu:1"), HostResources(2), TOKEN, "driver", certificate))


@pytest.mark.parametrize("tls", [True, False])
def test_who_has_the_token_learns_of_the_machine(tls: bool, tmp_path: Path) -> None:
    async def main() -> None:
        agent = make_agent(tmp_path, tls=tls)
        async with listening(agent.on_connection, context_of(tmp_path) if tls else None) as host:
            connection = await connect(host, "facts")
            connection.writer.close()
            facts = connection.facts
            assert [device.name for device in facts.devices] == ["cpu:0"]
            assert (facts.state, facts.drivers, facts.is_running) == (tmp_path, "driver", False)
            assert facts.versions == protocol.own_versions()
            with pytest.raises(InputError, match="wrong token"):
                await connect(replace(host, token="f" * 16), "facts")
            with pytest.raises(InputError):
                await connect(replace(host, tls=not tls), "facts")
            files = RemoteFiles(host)
            await files.require_paths("j", [str(tmp_path)])
            with pytest.raises(InputError, match="job 'j' names /no/such, which does not exist there"):
                await files.require_paths("j", [str(tmp_path), "/no/such"])
            files.close()
            await agent.close()

    asyncio.run(main())


def test_a_server_in_between_with_its_own_certificate_gets_nowhere(tmp_path: Path) -> None:
    async def main() -> None:
        agent = make_agent(tmp_path, tls=True)
        async with listening(agent.on_connection, context_of(tmp_path)) as host:
            forwarding: set[asyncio.Task[None]] = set()

            async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                while chunk := await reader.read(1 << 16):
                    writer.write(chunk)

            async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
                there = await asyncio.open_connection(host.address, host.port, ssl=trusting)
                for pair in ((reader, there[1]), (there[0], writer)):
                    forwarding.add(asyncio.create_task(forward(*pair)))

            (tmp_path / "other").mkdir()
            async with listening(relay, context_of(tmp_path / "other")) as between:
                with pytest.raises(InputError, match="wrong token"):
                    await connect(between, "facts")
            for task in forwarding:
                task.cancel()
            await agent.close()

    asyncio.run(main())


class OtherAgent(Agent):
    """An agent of another release."""

    def _describe(self) -> dict[str, Any]:
        value = super()._describe()
        return {**value, "versions": {**value["versions"], "torch": "1.0"}}


def test_other_versions_are_named(tmp_path: Path) -> None:
    async def main() -> None:
        agent = make_agent(tmp_path, tls=False, kind=OtherAgent)
        async with listening(agent.on_connection, None) as host:
            with pytest.raises(InputError, match=r"torch .* here, 1\.0 there"):
                await connect(host, "facts")
            await agent.close()

    asyncio.run(main())


def test_a_refusal_says_what_to_do_about_it(tmp_path: Path) -> None:
    async def refusal_of(host: Host, first: dict[str, Any]) -> dict[str, Any]:
        reader, writer = await asyncio.open_connection(host.address, host.port)
        await protocol.send(writer, first)
        answer = await protocol.receive(reader)
        writer.close()
        assert answer is not None
        return answer[0]

    async def main() -> None:
        agent = make_agent(tmp_path, tls=False)
        async with listening(agent.on_connection, None) as host:
            refused = await refusal_of(host, {"carpool": protocol.PROTOCOL + 1, "nonce": "n"})
            with pytest.raises(InputError, match="wrong token") as wrong_token:
                await connect(replace(host, token="f" * 16), "facts")
            assert "token_file" in wrong_token.value.way_out

            async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await protocol.receive(reader)
                await protocol.send(writer, refused)
                writer.close()

            async with listening(refuse, None) as other:
                with pytest.raises(InputError, match=f"protocol {protocol.PROTOCOL + 1}") as wrong_version:
                    await connect(other, "facts")
            assert "same carpool" in wrong_version.value.way_out
            assert "token" not in str(wrong_version.value)
            await agent.close()

    asyncio.run(main())


def test_what_is_no_agent_is_unreachable_and_garbage_ends_no_agent(tmp_path: Path) -> None:
    async def main() -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        async with listening(silent, None) as host:
            with pytest.raises(HostUnreachable):
                await connect(host, "facts")
        agent = make_agent(tmp_path, tls=False)
        async with listening(agent.on_connection, None) as host:
            for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2[]", b"\0\0\0\1x", b"\xff" * 64):
                reader, writer = await asyncio.open_connection(host.address, host.port)
                writer.write(garbage)
                writer.write_eof()
                await reader.read()
                writer.close()
            (await connect(host, "facts")).writer.close()
            lost = await connect(host, "executor", owner="me", fresh=False)
            answer = await protocol.receive(lost.reader)
            lost.writer.close()
            assert answer is not None
            assert "not running" in answer[0]["refused"]
            await agent.close()

    asyncio.run(main())


def test_a_request_over_a_silent_link_ends(tmp_path: Path) -> None:
    class Silent(Agent):
        async def _serve_files(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

    async def main() -> None:
        agent = make_agent(tmp_path, tls=False, kind=Silent)
        async with listening(agent.on_connection, None) as host:
            with pytest.raises(TimeoutError):
                await RemoteFiles(host, timeout_s=0.05).require_paths("j", ["/"])
            await agent.close()

    asyncio.run(main())


def test_versions_are_compared_one_by_one() -> None:
    ours = protocol.own_versions()
    assert ours.differences(ours) == []
    assert len(ours.differences(replace(ours, carpool="0", python="2.7"))) == 2
