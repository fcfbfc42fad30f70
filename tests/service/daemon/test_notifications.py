"""The end of a job is told at least once: by a real command, by a real post, after failures, after a restart."""

import asyncio
import json
import os
import select
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from carpool.core.model import JobId
from carpool.runtime.executor.job_folder import JobFolder
from carpool.service.daemon.notifications import DeliveryFailed, JobEnd, Notification, Notifier, deliver

ENDING = JobEnd(JobId("a"), "ada", "failed", "loss is NaN")


class Postbox:
    """Takes what is sent, after so many refusals."""

    def __init__(self, refusals: int = 0, error: Exception | None = None) -> None:
        self.sent: list[str] = []
        self._refusals = refusals
        self._error = error or DeliveryFailed("closed")

    async def send(self, notice: Notification) -> None:
        if self._refusals:
            self._refusals -= 1
            raise self._error
        self.sent.append(notice.text)


def announced(state: Path, postbox: Postbox, *, times: int = 1) -> tuple[list[str], list[float]]:
    """What a story was told, and the pauses, while the ending was announced."""
    told: list[str] = []
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def play() -> None:
        for _ in range(times):
            notices = Notifier(state, lambda job, words: told.append(words), postbox.send, sleep)
            notices.announce(ENDING, ["mail"])
            await asyncio.gather(*notices._tasks)

    asyncio.run(play())
    return told, pauses


def test_it_is_told_once_however_often_the_daemon_comes_back(tmp_path: Path) -> None:
    postbox = Postbox()
    announced(tmp_path, postbox, times=3)
    assert [json.loads(text)["error"] for text in postbox.sent] == ["loss is NaN"]


def test_it_is_tried_again_and_then_said_in_the_story(tmp_path: Path) -> None:
    assert announced(tmp_path, Postbox(refusals=2)) == ([], [5.0, 10.0])
    other = tmp_path / "other"
    told, _ = announced(other, Postbox(refusals=3))
    assert [("'mail'" in words, "closed" in words) for words in told] == [(True, True)]
    assert not (JobFolder(other, "a").path / "notified").exists()


def test_a_folder_that_cannot_be_looked_at_ends_nothing(tmp_path: Path) -> None:
    postbox = Postbox()
    told, _ = announced(tmp_path / ("x" * 300), postbox)
    assert len(postbox.sent) == 1
    assert ["will be again" in words for words in told] == [True]


def test_what_no_program_can_be_given_is_said_in_the_story(tmp_path: Path) -> None:
    told, _ = announced(tmp_path, Postbox(refusals=3, error=ValueError("embedded null byte")))
    assert ["embedded null byte" in words for words in told] == [True]


def test_a_command_gets_the_ending_on_stdin_and_in_its_environment(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = f'cat > {out}; echo "$CARPOOL_JOB $CARPOOL_PHASE" >> {out}'
    environment = {"CARPOOL_JOB": "a", "CARPOOL_PHASE": "failed"}
    asyncio.run(deliver(Notification(["sh", "-c", script], "", environment, '{"job": "a"}\n')))
    assert out.read_text(encoding="utf-8") == '{"job": "a"}\na failed\n'


def test_a_command_gets_no_secret_of_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"AWS_SECRET_ACCESS_KEY": "k3y", "CARPOOL_TOKEN": "t0ken", "SMTP_USER": "ada"}.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "out"
    asyncio.run(deliver(Notification(["sh", "-c", f"env > {out}"], "", {}, "{}", ("SMTP_*",))))
    seen = out.read_text(encoding="utf-8")
    assert "SMTP_USER=ada" in seen
    assert "k3y" not in seen
    assert "t0ken" not in seen


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(DeliveryFailed, match="3: no mail here"):
        asyncio.run(deliver(Notification(["sh", "-c", "echo no mail here >&2; exit 3"], "", {}, "{}")))


def test_a_command_is_the_one_in_the_jobs_folder(tmp_path: Path) -> None:
    tell = tmp_path / "tell.sh"
    tell.write_text("#!/bin/sh\ncat > told\n", encoding="utf-8")
    tell.chmod(0o755)
    asyncio.run(deliver(Notification(["./tell.sh"], str(tmp_path), {}, "{}")))
    assert (tmp_path / "told").read_text(encoding="utf-8") == "{}"


def test_a_command_that_is_given_up_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pid")
    script = f"sleep 600 & echo $! > {tmp_path}/pid; wait"

    async def play() -> int:
        going = asyncio.create_task(deliver(Notification(["sh", "-c", script], "", {}, "{}")))
        child = os.pidfd_open(int(await asyncio.to_thread((tmp_path / "pid").read_text, encoding="utf-8")))
        going.cancel()
        with pytest.raises(asyncio.CancelledError):
            await going
        return child

    child = asyncio.run(play())
    try:
        assert select.select([child], [], [], 30.0)[0], "it is still there"
    finally:
        os.close(child)


def test_a_dead_address_of_one_person_holds_nobody_else_up(tmp_path: Path) -> None:
    """Two at a time of one person, however many wait; somebody else's goes out meanwhile."""
    never, told = asyncio.Event(), asyncio.Event()
    begun: list[str] = []

    async def send(notice: Notification) -> None:
        begun.append(notice.environment["CARPOOL_JOB"])
        if notice.environment["CARPOOL_USER"] == "ada":
            await never.wait()
        told.set()

    async def play() -> None:
        notices = Notifier(tmp_path, lambda job, words: None, send)
        for number in range(50):
            notices.announce(JobEnd(JobId(f"a{number}"), "ada", "finished"), ["http://dead.example"])
        notices.announce(JobEnd(JobId("b"), "ben", "finished"), ["mail"])
        await told.wait()
        await notices.close()

    asyncio.run(play())
    assert begun == ["a0", "a1", "b"]


def test_an_address_is_not_told_whole() -> None:
    assert str(Notification(["https://hooks.example/T0/secret"], "", {}, "")) == "'hooks.example'"
    assert str(Notification(["mail", "ada"], "", {}, "")) == "'mail'"


def test_what_an_address_answers_is_said() -> None:
    with pytest.raises(DeliveryFailed, match="refused"):
        asyncio.run(deliver(Notification(["http://127.0.0.1:9/hook"], "", {}, "{}")))


def test_an_address_is_posted_to() -> None:
    taken: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        asyncio.run(deliver(Notification([f"http://127.0.0.1:{server.server_port}/hook"], "", {}, '{"job": "a"}')))
        thread.join()
    assert taken == [b'{"job": "a"}']
