"""Regions of virtual memory: a fake driver sees the calls; host regions are real."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from carpool.runtime.compat import cuda_driver
from carpool.runtime.compat.vmm import CudaRegion, HostRegion

CHUNK = 2 << 20
BASE = 0x10_0000_0000


class FakeDriver:
    """The memory functions of libcuda, for a GPU with so many chunks."""

    def __init__(self, num_chunks: int) -> None:
        self.free = num_chunks
        self.sizes: dict[int, int] = {}  # chunks by handle
        self.mapped: dict[int, int] = {}  # handle by address

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.call(name, *args)

    def call(self, name: str, *args: Any) -> int:
        match name:
            case "cuMemAddressReserve":
                args[0]._obj.value = BASE
            case "cuMemCreate":
                chunks = args[1].value // CHUNK
                if chunks > self.free:
                    return 2
                self.free -= chunks
                args[0]._obj.value = len(self.sizes) + 1
                self.sizes[args[0]._obj.value] = chunks
            case "cuMemMap":
                self.mapped[args[0].value] = args[3].value
            case "cuMemUnmap":
                self.mapped.clear()
            case "cuMemRelease":
                self.free += self.sizes[args[0].value]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver(4)
    monkeypatch.setattr(cuda_driver, "load", lambda: made)
    return made


def test_a_region_grows_in_chunks_and_gives_its_memory_back(driver: FakeDriver) -> None:
    region = CudaRegion(torch.device("cuda", 0), 10 * CHUNK)
    assert (region.grow(1), region.grow(CHUNK + 1), region.size) == (0, CHUNK, 3 * CHUNK)
    assert (driver.free, list(driver.mapped)) == (1, [BASE, BASE + CHUNK])
    region.unmap()
    assert (driver.free, driver.mapped, region.size) == (4, {}, 3 * CHUNK)
    region.map()
    assert (driver.free, list(driver.mapped)) == (1, [BASE])
    region.clear()
    assert (driver.free, region.size) == (4, 0)


def test_a_full_gpu_and_a_full_region_are_out_of_memory(driver: FakeDriver) -> None:
    region = CudaRegion(torch.device("cuda", 0), 6 * CHUNK)
    with pytest.raises(torch.OutOfMemoryError, match="cuMemCreate"):
        region.grow(5 * CHUNK)
    with pytest.raises(torch.OutOfMemoryError, match="cannot grow"):
        region.grow(7 * CHUNK)
    assert region.size == 0


def test_a_host_region_reads_zeros_after_it_was_unmapped() -> None:
    region = HostRegion(2 * CHUNK)
    region.grow(5)
    region.bytes().fill_(3)
    region.unmap()
    region.map()
    assert not region.bytes().any()
    with pytest.raises(MemoryError):
        region.grow(2 * CHUNK)
