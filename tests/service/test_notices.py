"""The end of a job is told at least once: by a real command, by a real post, after failures, after a restart."""

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from carpool.core.model import JobId
from carpool.runtime.jobfolder import JobFolder
from carpool.service.notices import Ending, Notices, Unanswered, deliver

ENDING = Ending(JobId("a"), "ada", "failed", "loss is NaN")


class Postbox:
    """Takes what is sent, after so many refusals."""

    def __init__(self, refusals: int = 0, error: Exception | None = None) -> None:
        self.sent: list[str] = []
        self._refusals = refusals
        self._error = error or Unanswered("closed")

    async def send(self, how: Sequence[str], environment: Mapping[str, str], text: str) -> None:
        if self._refusals:
            self._refusals -= 1
            raise self._error
        self.sent.append(text)


def announced(state: Path, postbox: Postbox, *, times: int = 1) -> tuple[list[str], list[float]]:
    """What a story was told, and the pauses, while the ending was announced."""
    told: list[str] = []
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def play() -> None:
        for _ in range(times):
            notices = Notices(state, lambda job, words: told.append(words), postbox.send, sleep)
            notices.announce(ENDING, ["mail"])
            await asyncio.gather(*notices._going)

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
    assert told == ["its end could not be told with 'mail': closed"]
    assert not (JobFolder(other, "a").path / "notified").exists()


def test_a_folder_that_cannot_be_looked_at_ends_nothing(tmp_path: Path) -> None:
    postbox = Postbox()
    told, _ = announced(tmp_path / ("x" * 300), postbox)
    assert len(postbox.sent) == 1
    assert [words.partition(": that")[0] for words in told] == ["its end was told, and will be again"]


def test_what_no_program_can_be_given_is_said_in_the_story(tmp_path: Path) -> None:
    told, _ = announced(tmp_path, Postbox(refusals=3, error=ValueError("embedded null byte")))
    assert told == ["its end could not be told with 'mail': embedded null byte"]


def test_a_command_gets_the_ending_on_stdin_and_in_its_environment(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = f'cat > {out}; echo "$CARPOOL_JOB $CARPOOL_PHASE" >> {out}'
    asyncio.run(deliver(["sh", "-c", script], {"CARPOOL_JOB": "a", "CARPOOL_PHASE": "failed"}, '{"job": "a"}\n'))
    assert out.read_text(encoding="utf-8") == '{"job": "a"}\na failed\n'


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(Unanswered, match="it ended with 3: no mail here"):
        asyncio.run(deliver(["sh", "-c", "echo no mail here >&2; exit 3"], {}, "{}"))


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
        asyncio.run(deliver([f"http://127.0.0.1:{server.server_port}/hook"], {}, '{"job": "a"}'))
        thread.join()
    assert taken == [b'{"job": "a"}']
