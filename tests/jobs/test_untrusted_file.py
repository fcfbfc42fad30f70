"""Files that a job can replace, read as untrusted."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from carpool.jobs.untrusted_file import last_line, next_data, open_untrusted


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", ""),
        (b"\n \n", ""),
        (b"one\ntwo\n\n", "two"),
        (b"a bar 50%\ra bar 100%\r", "a bar 100%"),
        (b"exitcode: 1\n=====\n\n-----\n", "exitcode: 1"),
        (b"=====\n-----\n\n", "-----"),
        (b"\x1b[31mred\x07\n", "[31mred"),
        (b"\xff\xfe\n", "\ufffd\ufffd"),
        (b"x" * 100_000, "x" * 199 + "\u2026"),
    ],
)
def test_the_last_line_of_a_log(tmp_path: Path, content: bytes, line: str) -> None:
    (tmp_path / "log").write_bytes(content)
    assert last_line(tmp_path / "log") == line


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(__file__)],
    ids=["pipe", "folder", "device", "link"],
)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_CREAT])
def test_only_regular_files_are_opened(tmp_path: Path, make: Callable[[Path], object], flags: int) -> None:
    make(tmp_path / "file")
    with pytest.raises(OSError, match=r"regular file|Too many levels|Is a directory"):
        open_untrusted(tmp_path / "file", flags)


def test_no_last_line_of_what_is_not_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    assert [last_line(tmp_path / name) for name in ("pipe", "link", "missing", ".")] == ["", "", "", ""]


def test_holes_of_a_file_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.write(b"a" * 4096)
        file.truncate(50 << 30)
    handle = os.open(path, os.O_RDONLY)
    try:
        first, stop = next_data(handle, 10)
        assert (first, stop) == (10, 4096)
        assert next_data(handle, stop) == (50 << 30, 50 << 30)
    finally:
        os.close(handle)
