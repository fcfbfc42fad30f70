"""Copies of mirrors on disk are whole checkpoints, of which the newest is kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from carpool.runtime.process.shared_memory import new_memory_file
from carpool.runtime.state.checkpoint import load
from carpool.runtime.state.mirror import write_mirror
from carpool.runtime.state.mirror_file import MirrorFiles, copy_mirror
from carpool.runtime.state.tensor_file import StateParts


@pytest.fixture
def mirror() -> Iterator[int]:
    made = new_memory_file("test")
    yield made
    os.close(made)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path, os.O_RDONLY)
    yield opened
    os.close(opened)


def test_a_copy_is_a_checkpoint_and_replaces_the_one_before(mirror: int, folder: int, tmp_path: Path) -> None:
    for step in (5, 12):
        write_mirror(mirror, step, StateParts.of({"step": step, "text": "x" * 100_000}))
        files = MirrorFiles()
        files.copy(mirror, folder)
        files.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["mirror-000000012.ckpt"]
    assert load(tmp_path / "mirror-000000012.ckpt")["step"] == 12


def test_an_incomplete_or_foreign_mirror_is_not_copied(mirror: int, folder: int, tmp_path: Path) -> None:
    assert copy_mirror(mirror, folder) == ""
    os.ftruncate(mirror, 1000)
    assert copy_mirror(mirror, folder) == ""
    os.pwrite(mirror, b"CPMIRROR" + (3).to_bytes(8, "little") + (1 << 40).to_bytes(8, "little"), 0)
    assert copy_mirror(mirror, folder) == "", "its length is that of another file"
    assert not list(tmp_path.iterdir())


def test_a_mirror_that_is_overwritten_meanwhile_leaves_nothing(
    mirror: int, folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mirror(mirror, 1, StateParts.of({"text": "x" * 10_000_000}))
    read, reads = os.pread, 0

    def read_while_written(fd: int, size: int, start: int) -> bytes:
        nonlocal reads
        reads += 1
        if reads == 3:
            write_mirror(mirror, 2, StateParts.of({"text": "y" * 10_000_000}))
        return read(fd, size, start)

    monkeypatch.setattr(os, "pread", read_while_written)
    assert copy_mirror(mirror, folder) == ""
    assert not list(tmp_path.iterdir())


def test_a_job_that_returns_has_a_folder_into_which_no_earlier_copy_is_written(mirror: int, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    held = os.open(checkpoints, os.O_RDONLY)
    try:
        checkpoints.rename(tmp_path / "stale")
        checkpoints.mkdir()
        write_mirror(mirror, 1, StateParts.of({"step": 1}))
        assert copy_mirror(mirror, held)
    finally:
        os.close(held)
    assert not list(checkpoints.iterdir())


def test_slow_copies_are_rare(mirror: int, folder: int, tmp_path: Path) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0  # each copy takes a second
        return now[0]

    files = MirrorFiles(clock)
    copied = []
    for step in range(1, 40):
        write_mirror(mirror, step, StateParts.of({"step": step}))
        files.copy(mirror, folder)
        files.wait()
        copied += [path.name for path in tmp_path.iterdir() if path.name == f"mirror-{step:09d}.ckpt"]
    assert 2 <= len(copied) <= 5


@pytest.mark.parametrize("lasts", [0, 1], ids=["before the copy", "during the copy"])
def test_nothing_is_copied_once_another_machine_may_run_the_job(
    lasts: int, mirror: int, folder: int, tmp_path: Path
) -> None:
    write_mirror(mirror, 5, StateParts.of({"step": 5}))
    answers = iter([True] * lasts + [False])
    assert copy_mirror(mirror, folder, answers.__next__) == ""
    assert not list(tmp_path.iterdir())
