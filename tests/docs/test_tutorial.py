"""The tutorial prints what it shows, with real trainings and a real daemon."""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytest.importorskip("httpx", reason="the extra 'serve' is not installed")
pytest.importorskip("torch", reason="torch is not installed")

from carpool.service.config import PORT
from tests.support.console_transcript import Reader

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def session(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[Reader]:
    """A shell session with an empty directory, its own home, and `carpool` on the path."""
    place = tmp_path_factory.mktemp("new")  # short: a socket's path has at most 107 bytes
    for name in ("bin", "home", "work"):
        (place / name).mkdir()
    command = place / "bin" / "carpool"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m carpool "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    environment = {
        "HOME": str(place / "home"),
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "CARPOOL_PORT": str(port),
        "COLUMNS": "120",
    }
    reader = Reader(place / "work", environment)
    yield reader
    reader.close()


def test_the_commands_print_what_is_shown(session: Reader, port: int) -> None:
    assert session.follow(PAGE.read_text(encoding="utf-8").replace(str(PORT), str(port))) > 15
