"""Stream signals: a fake driver that executes stream memory operations at once."""

from __future__ import annotations

import ctypes
import mmap
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from carpool.runtime.compat import cuda_driver
from carpool.runtime.compat.stream_signal import StreamSignal


class FakeDriver:
    """Maps host memory to the same addresses, and notes waits."""

    def __init__(self) -> None:
        self.waits: list[tuple[int, int]] = []

    def cuMemHostRegister_v2(self, address: Any, size: Any, flags: Any) -> int:  # noqa: N802
        return 0 if size.value == mmap.PAGESIZE and flags.value == 2 else 1

    def cuMemHostGetDevicePointer_v2(self, found: Any, address: Any, flags: Any) -> int:  # noqa: N802
        found._obj.value = address.value
        return 0

    def cuStreamWaitValue32_v2(self, stream: Any, word: Any, value: Any, flags: Any) -> int:  # noqa: N802
        self.waits.append((stream.value, value.value))
        return int(flags.value)

    def cuStreamWriteValue32_v2(self, stream: Any, word: Any, value: Any, flags: Any) -> int:  # noqa: N802
        ctypes.c_uint.from_address(word.value).value = value.value
        return int(flags.value)


def test_a_stream_waits_for_and_writes_the_first_word(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, page = FakeDriver(), mmap.mmap(-1, mmap.PAGESIZE)
    monkeypatch.setattr(cuda_driver, "load", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    signal = StreamSignal(page, torch.device("cuda", 0))
    signal.hold_until(3)
    assert driver.waits == [(7, 3)]
    signal.reach(5)
    assert int.from_bytes(page[:4], "little") == 5
