"""File offsets of forked processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from carpool.runtime.data.prefetch import BatchRequest, ReaderPool
from carpool.runtime.process.child_process import file_offsets, reopen_files


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[int]:
    """A file of a hundred numbers, open for reading, at its tenth."""
    path = tmp_path / "numbers"
    path.write_bytes(bytes(range(100)))
    file = os.open(path, os.O_RDONLY)
    os.lseek(file, 10, os.SEEK_SET)
    yield file
    os.close(file)


def offset(file: int) -> int:
    return os.lseek(file, 0, os.SEEK_CUR)


def test_a_child_keeps_its_own_offset(opened: int) -> None:
    before = file_offsets()
    assert before[opened] == 10
    os.lseek(opened, 20, os.SEEK_SET)  # after the offsets were read
    if not (child := os.fork()):
        reopen_files(before)
        os._exit(os.read(opened, 1)[0])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
    assert offset(opened) == 20


def test_only_plain_files_open_for_reading_are_listed(tmp_path: Path) -> None:
    written = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT)
    ends = os.pipe()
    try:
        assert not {written, *ends} & set(file_offsets())
    finally:
        for file in (written, *ends):
            os.close(file)


def test_readers_do_not_move_the_parents_offset(opened: int) -> None:
    def read(epoch: int, samples: NDArray[np.int64]) -> Any:
        os.lseek(opened, int(samples[0]), os.SEEK_SET)
        return os.getpid(), os.read(opened, 1)[0]

    readers = ReaderPool(read, 2)
    requests = [BatchRequest(0, np.array([sample])) for sample in (30, 40)]
    try:
        readers.prefetch(requests)
        found = [readers.take(*request) for request in requests]
    finally:
        readers.close()
    assert [number for _, number in found] == [30, 40]
    assert os.getpid() not in {pid for pid, _ in found}
    assert offset(opened) == 10


def test_files_that_cannot_be_reopened_are_ignored(opened: int) -> None:
    reopen_files({opened: 10, 1_000_000: 0})
    assert offset(opened) == 10
