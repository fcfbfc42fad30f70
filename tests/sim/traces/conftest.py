"""What the tests of traces share: files that exist for one test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

WriteFile = Callable[..., Path]


@pytest.fixture
def write_file(tmp_path: Path) -> WriteFile:
    """Write lines (or raw bytes) to a file of this test and return its path."""

    def write(*content: str | bytes, name: str = "trace.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(b"".join([part if isinstance(part, bytes) else f"{part}\n".encode() for part in content]))
        return path

    return write
