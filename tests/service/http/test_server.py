"""WebServer on real sockets: peer credentials, slow clients, and sockets left by a dead daemon."""

import os
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytest.importorskip("httpx", reason="the extra 'serve' is not installed")

import httpx

from carpool.core.errors import InputError
from carpool.service.auth import AccessTokens
from carpool.service.transport import is_loopback, listen_tcp, listen_unix, peer_uid
from tests.support.http_rig import LAX_LIMITS, Served, serve_http


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    limits = replace(LAX_LIMITS, headers_s=0.3, stalled_s=0.3)
    with serve_http(tmp_path_factory.mktemp("served"), limits=limits) as served:
        yield served


def test_the_owner_is_authenticated_on_the_socket(served: Served) -> None:
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(served.socket)), base_url="http://carpool") as client:
        assert client.get("/v1/me").json() == {"name": "owner", "role": "admin"}
        as_ada = client.get("/v1/me", headers={"Authorization": f"Bearer {served.tokens['ada']}"})
        assert as_ada.json() == {"name": "ada", "role": "user"}
    assert served.socket.stat().st_mode & 0o777 == 0o600


def test_the_port_needs_a_token(served: Served) -> None:
    assert httpx.get(f"{served.url}/v1/me").status_code == 401
    assert httpx.get(f"{served.url}/v1/health/ready").status_code == 200


def connected(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), timeout=20)


def test_a_client_that_never_finishes_a_request_is_disconnected(served: Served) -> None:
    for said in (b"", b"GET /v1/me HTTP/1.1\r\nHost: local"):
        with connected(served) as slow:
            slow.sendall(said)
            assert slow.recv(1) == b""
    with connected(served) as slow:
        slow.sendall(b"GET /v1/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b'{"status":"ok"}'):
            answer += slow.recv(1 << 16)
        slow.sendall(b"GET /v1/me HT")
        assert slow.recv(1) == b""


def send_until_reset(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"x")
        select.select([], [], [], 0.01)


def test_a_client_that_reads_nothing_is_disconnected(served: Served) -> None:
    feed = served.rig.backend.read_model.events.feed

    async def publish() -> None:
        for _ in range(2000):
            feed.add(0.0, "told", words="x" * 8000)

    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.settimeout(20)
        deaf.connect(("127.0.0.1", int(served.url.rpartition(":")[2])))
        token = served.tokens["root"]
        served.do(publish())
        deaf.sendall(
            f"GET /v1/events?after=0 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
        )
        with pytest.raises(OSError, match=r"reset|Broken pipe"):  # reset, not a normal end
            send_until_reset(deaf)
    assert httpx.get(f"{served.url}/v1/health/live").status_code == 200


def test_a_stream_ends_when_its_token_is_removed(tmp_path: Path) -> None:
    with serve_http(tmp_path, limits=replace(LAX_LIMITS, stream_s=1.0)) as served:
        feed = served.rig.backend.read_model.events.feed

        async def publish() -> None:
            feed.add(0.0, "policy", policy="secret")

        received = {}
        for name in ("ada", "ben"):
            headers = {"Authorization": f"Bearer {served.tokens[name]}"}
            with httpx.stream("GET", f"{served.url}/v1/events", headers=headers) as answer:
                pieces = answer.iter_bytes()
                assert next(pieces) == b": carpool\n\n"
                if name == "ada":
                    AccessTokens(tmp_path / "tokens.json").remove("ada-1")
                served.do(publish())
                received[name] = b"".join(pieces)
        assert received["ada"] == b""
        assert b"secret" in received["ben"]


def test_a_full_port_does_not_lock_out_the_owner(tmp_path: Path) -> None:
    with serve_http(tmp_path, limits=replace(LAX_LIMITS, connections=3)) as served, ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(connected(served))
        assert httpx.get(f"{served.url}/v1/health/live").status_code == 503
        transport = httpx.HTTPTransport(uds=str(served.socket))
        with httpx.Client(transport=transport, base_url="http://carpool") as owner:
            assert owner.get("/v1/me").json()["name"] == "owner"


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(served: Served, tmp_path: Path) -> None:
    with listen_unix(tmp_path / "s"):
        pass  # closed without unlinking
    assert (tmp_path / "s").is_socket()
    with listen_unix(tmp_path / "s"):
        pass
    with pytest.raises(InputError, match=str(served.socket)):
        listen_unix(served.socket)
    with pytest.raises(InputError, match="107"):
        listen_unix(tmp_path / ("x" * 120))


def test_peer_uid_is_that_of_the_peer() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert peer_uid(ours) == os.getuid()
    with listen_tcp("127.0.0.1", 0) as tcp:
        assert peer_uid(tcp) is None
        with pytest.raises(InputError, match=r"127\.0\.0\.1"):
            listen_tcp("127.0.0.1", tcp.getsockname()[1])


def test_loopback_is_this_machine_only() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("localhost")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("::")
    assert not is_loopback("192.0.2.1")
