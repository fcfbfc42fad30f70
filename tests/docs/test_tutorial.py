"""The tutorial: its console sessions print what it shows, with real trainings and a real daemon."""

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
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture
def shell(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[Reader]:
    """A shell with an empty folder, a home of its own, and `carpool` on the path."""
    place = tmp_path_factory.mktemp("new")  # a short name: the address of a socket has at most 107 bytes
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
    session = Reader(place / "work", environment)
    yield session
    session.close()


def test_sessions_print_what_the_page_shows(shell: Reader, port: int) -> None:
    assert shell.follow(PAGE.read_text(encoding="utf-8").replace(str(PORT), str(port))) > 15
