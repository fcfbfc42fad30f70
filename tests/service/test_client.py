"""The client asks what the API answers, over both kinds of line, and tells what went wrong."""

import select
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytest.importorskip("httpx", reason="the extra 'serve' is not installed")

import carpool
from carpool.core.errors import InputError
from carpool.runtime.executor.job_folder import JobFolder
from carpool.service.client import RequestDenied, Unreachable, submission_body
from carpool.service.transport import listen_tcp
from tests.support.http_rig import Served, serve_http


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serve_http(tmp_path) as served:
        yield served


@pytest.fixture
def ada(served: Served) -> Iterator[carpool.Client]:
    with carpool.Client(served.url, served.tokens["ada"]) as client:
        yield client


def write_log(served: Served, job: str, text: str) -> None:
    folder = JobFolder(served.rig.backend.read_model.state, job).path
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log").open("a", encoding="utf-8") as log:
        log.write(text)


def test_jobs_are_submitted_and_steered(served: Served, ada: carpool.Client) -> None:
    body = served.rig.body("a", "b")
    names = ada.submit({"job": body["job"]}, folder=body["folder"], key="k")
    assert names == ada.submit({"job": body["job"]}, folder=body["folder"], key="k") == ["a", "b"]
    assert ada.job("a")["phase"] == "running"
    assert [ada.pause("a")["phase"], ada.resume("a")["phase"], ada.cancel("a")["phase"]] == [
        "paused",
        "running",
        "cancelled",
    ]
    assert [job["id"] for job in ada.all_jobs(newest_first=False)] == ["a", "b"]
    assert ada.jobs(phase=["cancelled"])["total"] == 1
    assert ada.me() == {"name": "ada", "role": "user"}
    assert ada.summary()["jobs"]["running"] == 1
    assert len(ada.devices()) == 2
    assert [node["devices"] for node in ada.nodes()] == [2]
    assert ada.story("a")[-1]["words"] == "was cancelled by its user"
    assert ada.why("b")
    assert ada.measurements("b") == []
    assert ada.decisions(limit=1)[0]["number"] > 1
    assert {span["job"] for span in ada.timeline(0, 2e6)} <= {"a", "b"}


def test_a_job_file_is_sent_with_its_folder(served: Served, ada: carpool.Client) -> None:
    file = served.rig.folder / "jobs.toml"
    file.write_text('[defaults]\nweight = 2.0\n[[job]]\nname = "a"\nentry = "train.py:main"\n', encoding="utf-8")
    assert ada.submit(file) == ["a"]
    assert ada.job("a")["weight"] == 2.0
    with pytest.raises(InputError, match=r"none\.toml"):
        submission_body(file.with_name("none.toml"))
    file.write_text('[[job]]\nname = "a"\nentry = "train.py:main"\nweigth = 2.0\n', encoding="utf-8")
    with pytest.raises(RequestDenied) as denied:
        ada.submit(file)
    assert str(denied.value) == f"{file}: job 'a': unknown key 'weigth'. Did you mean weight?"


def test_the_daemons_own_socket_needs_no_token(served: Served) -> None:
    with carpool.Client(f"unix:{served.socket}") as client:
        assert client.me() == {"name": "owner", "role": "admin"}


def test_refusals_say_why_and_what_to_do(served: Served, ada: carpool.Client) -> None:
    with pytest.raises(RequestDenied, match=r"there is no job 'none'") as denied:
        ada.job("none")
    assert denied.value.status == 404
    body = served.rig.body("a", devices=9)
    with pytest.raises(RequestDenied, match="9 devices"):
        ada.submit(body, folder=body["folder"])
    with carpool.Client(served.url) as nobody, pytest.raises(RequestDenied, match="token"):
        nobody.me()
    with pytest.raises(Unreachable, match=r"no daemon answers at unix:/nowhere.*carpool serve"):
        carpool.Client("unix:/nowhere").me()
    with pytest.raises(InputError, match=r"Give http://HOST:PORT"):
        carpool.Client("localhost:80").me()


class Fickle(BaseHTTPRequestHandler):
    """Answers what it is asked first on a line, and hangs up: at once, or when it is asked again."""

    protocol_version = "HTTP/1.1"
    heard: ClassVar[list[str]] = []
    at_once: ClassVar[bool] = False

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.heard.append(self.command)
        if len(self.heard) == 2 and not self.at_once:
            self.close_connection = True
            return
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
        self.close_connection = self.at_once

    do_GET = do_POST = do_PUT = _answer  # noqa: N815 - the names are the library's

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("method", "headers", "is_said_again"),
    [("GET", {}, True), ("PUT", {}, True), ("POST", {"Idempotency-Key": "k"}, True), ("POST", {}, False)],
)
def test_a_wish_is_not_said_again_where_it_may_have_been_heard(
    method: str, headers: dict[str, str], is_said_again: bool, at_once: bool
) -> None:
    class Here(Fickle):
        heard: ClassVar[list[str]] = []

    Here.at_once = at_once
    with ThreadingHTTPServer(("127.0.0.1", 0), Here) as server:
        Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            with carpool.Client(f"http://127.0.0.1:{server.server_port}") as client:
                client.request("GET", "/")
                if at_once:
                    assert client._connection is not None
                    select.select([client._connection.sock], [], [], 30.0)  # until it has hung up
                if at_once or is_said_again:
                    client.request(method, "/", headers=headers)
                else:
                    with pytest.raises(Unreachable):
                        client.request(method, "/", headers=headers)
        finally:
            server.shutdown()
    assert Here.heard == ["GET", method, *([method] if is_said_again and not at_once else [])]


def test_a_log_is_followed_to_its_end(served: Served, ada: carpool.Client) -> None:
    body = served.rig.body("a")
    ada.submit(body, folder=body["folder"])
    write_log(served, "a", "one\n")
    following = ada.follow("a")
    assert next(following) == b"one\n"
    write_log(served, "a", "two\n")
    served.do(served.rig.backend.settle(1000.0))
    assert b"".join(following) == b"two\n"
    assert b"".join(ada.follow("a", -4)) == b"two\n"


def test_events_go_on_where_a_line_broke(served: Served, ada: carpool.Client) -> None:
    for name in "ab":  # streams of the reception end after a moment, so this takes several
        body = served.rig.body(name)
        ada.submit(body, folder=body["folder"])
    heard = list(islice(ada.events(0), 6))
    numbers = [event["number"] for event in heard]
    assert numbers == sorted(set(numbers))
    assert [event["job"] for event in heard if event["kind"] == "submitted"] == ["a", "b"]


def test_a_daemon_that_does_not_answer_in_time_is_not_called_absent() -> None:
    with listen_tcp("127.0.0.1", 0) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        with carpool.Client(url, timeout_s=0.01) as client, pytest.raises(Unreachable, match="may still do") as raised:
            client.cancel("a")
    assert "serve" not in str(raised.value)
