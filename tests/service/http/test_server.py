"""Real sockets: who is at the other end, who is too slow, and what a dead daemon left."""

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
from tests.support.http_rig import GENEROUS, Served, serve_http


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    limits = replace(GENEROUS, headers_s=0.3, stalled_s=0.3)
    with serve_http(tmp_path_factory.mktemp("served"), limits=limits) as served:
        yield served


def test_whoever_runs_the_daemon_is_known_at_its_socket(served: Served) -> None:
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(served.socket)), base_url="http://carpool") as client:
        assert client.get("/v1/me").json() == {"name": "owner", "role": "admin"}
        as_ada = client.get("/v1/me", headers={"Authorization": f"Bearer {served.tokens['ada']}"})
        assert as_ada.json() == {"name": "ada", "role": "user"}
    assert served.socket.stat().st_mode & 0o777 == 0o600


def test_nobody_is_known_at_the_port(served: Served) -> None:
    assert httpx.get(f"{served.url}/v1/me").status_code == 401
    assert httpx.get(f"{served.url}/v1/health/ready").status_code == 200


def connected(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), timeout=20)


def test_who_never_finishes_a_request_is_let_go(served: Served) -> None:
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


def until_cut(line: socket.socket) -> None:
    while True:
        line.sendall(b"x")
        select.select([], [], [], 0.01)


def test_who_takes_nothing_is_let_go(served: Served) -> None:
    feed = served.reception.office.read_model.events.feed

    async def talk() -> None:
        for _ in range(2000):
            feed.add(0.0, "told", words="x" * 8000)

    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.settimeout(20)
        deaf.connect(("127.0.0.1", int(served.url.rpartition(":")[2])))
        token = served.tokens["root"]
        served.do(talk())
        deaf.sendall(
            f"GET /v1/events?after=0 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
        )
        with pytest.raises(OSError, match=r"reset|Broken pipe"):  # not the end of a stream: it was cut
            until_cut(deaf)
    assert httpx.get(f"{served.url}/v1/health/live").status_code == 200


def test_nothing_more_is_told_to_one_whose_token_was_removed(tmp_path: Path) -> None:
    with serve_http(tmp_path, limits=replace(GENEROUS, stream_s=1.0)) as served:
        feed = served.reception.office.read_model.events.feed

        async def talk() -> None:
            feed.add(0.0, "policy", policy="secret")

        told = {}
        for name in ("ada", "ben"):
            headers = {"Authorization": f"Bearer {served.tokens[name]}"}
            with httpx.stream("GET", f"{served.url}/v1/events", headers=headers) as answer:
                pieces = answer.iter_bytes()
                assert next(pieces) == b": carpool\n\n"
                if name == "ada":
                    AccessTokens(tmp_path / "tokens.json").remove("ada-1")
                served.do(talk())
                told[name] = b"".join(pieces)
        assert told["ada"] == b""
        assert b"secret" in told["ben"]


def test_strangers_who_fill_the_port_do_not_lock_the_owner_out(tmp_path: Path) -> None:
    with serve_http(tmp_path, limits=replace(GENEROUS, connections=3)) as served, ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(connected(served))
        assert httpx.get(f"{served.url}/v1/health/live").status_code == 503
        transport = httpx.HTTPTransport(uds=str(served.socket))
        with httpx.Client(transport=transport, base_url="http://carpool") as owner:
            assert owner.get("/v1/me").json()["name"] == "owner"


def test_what_a_dead_daemon_left_is_replaced_and_a_living_one_is_not(served: Served, tmp_path: Path) -> None:
    with listen_unix(tmp_path / "s"):
        pass  # it dies; the file stays
    assert (tmp_path / "s").is_socket()
    with listen_unix(tmp_path / "s"):
        pass
    with pytest.raises(InputError, match="a daemon answers at"):
        listen_unix(served.socket)
    with pytest.raises(InputError, match="the limit is 107"):
        listen_unix(tmp_path / ("x" * 120))


def test_the_kernel_says_who_is_there() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert peer_uid(ours) == os.getuid()
    with listen_tcp("127.0.0.1", 0) as tcp:
        assert peer_uid(tcp) is None
        with pytest.raises(InputError, match="cannot listen"):
            listen_tcp("127.0.0.1", tcp.getsockname()[1])


def test_loopback_is_this_machine_only() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("localhost")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("::")
    assert not is_loopback("192.0.2.1")
