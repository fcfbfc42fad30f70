"""Fixtures for verbs that talk to a daemon."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.http_rig import Served


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["Served"]:
    """A daemon with two CPU devices and a fake executor, set as the server of every verb."""
    pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
    pytest.importorskip("httpx", reason="the extra 'serve' is not installed")
    from tests.support.http_rig import serve_http

    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("CARPOOL_CONFIG", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with serve_http(tmp_path) as served:
        monkeypatch.setenv("CARPOOL_SERVER", f"unix:{served.socket}")
        yield served
