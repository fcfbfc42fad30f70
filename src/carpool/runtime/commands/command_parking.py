"""Parking of a command: frees its devices without ending its processes, and continues them later.

Processes on a GPU are checkpointed by the driver, which frees all memory of the device. Then, and on a CPU, all
processes of the command are stopped with SIGSTOP and keep their host memory. If the driver cannot do that (older than
570, or under MPS), a command on a GPU is only stopped, provided that enough memory of the device stays free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

from carpool.core.errors import CarpoolError
from carpool.jobs.devices import LocalDevice
from carpool.jobs.nvml import Nvml
from carpool.runtime.compat.cuda_driver import process_checkpoint_problem
from carpool.runtime.process.cuda_parking import call_driver, cuda_processes
from carpool.runtime.process.process_tree import available_memory, bind_tree, continue_tree, descendants, stop_tree

_RAM_RESERVE = 0.05  # of the host's RAM: below it no command is kept in memory
_GPU_RESERVE = 0.5  # of a GPU's memory: below it no stopped command keeps its own
_POLL_S = 0.005
CallDriver = Callable[[str, Sequence[int]], Awaitable[str]]


class ParkingError(CarpoolError):
    """The processes of a command cannot be parked, or not be continued."""


def free_gpu_memory(device: LocalDevice) -> float:
    """The free portion of a GPU's memory; 0 if unknown."""
    nvml = Nvml.open()
    if nvml is None or device.cuda is None:
        return 0.0
    try:
        return nvml.free_bytes(device.cuda) / (nvml.memory_bytes(device.cuda) or 1)
    finally:
        nvml.close()


class CommandParking:
    """Parks the processes below a command's reaper."""

    def __init__(
        self,
        call_driver: CallDriver = call_driver,
        find_cuda: Callable[[Collection[int]], list[int]] = cuda_processes,
        free_gpu_memory: Callable[[LocalDevice], float] = free_gpu_memory,
        available_memory: Callable[[], tuple[int, int]] = available_memory,
        driver_problem: Callable[[], str] = process_checkpoint_problem,
    ) -> None:
        self._driver_problem = driver_problem
        self._call_driver = call_driver
        self._find_cuda = find_cuda
        self._free_gpu_memory = free_gpu_memory
        self._available_memory = available_memory
        self._checkpointed: list[int] = []

    def keeps_work(self, devices: Collection[LocalDevice]) -> bool:
        """Whether a parked command can continue on any of these devices: on all cores, or on the one GPU it was on."""
        if all(device.cuda is None for device in devices):
            return True
        return len(devices) == 1 and not self._driver_problem()

    async def park(self, reaper: int, devices: Collection[LocalDevice]) -> str:
        """Free the devices. Returns how, in words. ParkingError if that is impossible: the command keeps running."""
        free, total = self._available_memory()
        if free < _RAM_RESERVE * total:
            raise ParkingError(f"only {free / 2**30:.1f} of {total / 2**30:.1f} GiB of RAM are available")
        on_gpu = [device for device in devices if device.cuda is not None]
        cuda = self._find_cuda(descendants(reaper)) if on_gpu else []
        problem = await self._call_driver("park", cuda) if cuda else ""
        if problem:
            self._check_gpu_memory(on_gpu, problem)
        self._checkpointed = [] if problem else cuda
        await _stop(reaper)
        if self._checkpointed:
            return "the driver moved its GPU memory to the host, and its processes are stopped"
        return "its processes are stopped and keep their memory" + (f" ({problem})" if problem else "")

    async def restore(self, reaper: int, cores: Collection[int]) -> None:
        """Continue the command on these cores; none: those it has. On a ParkingError of the driver it stays parked."""
        if cores:
            bind_tree(reaper, cores)
        continue_tree(reaper)
        if self._checkpointed and (problem := await self._call_driver("restore", self._checkpointed)):
            await _stop(reaper)
            raise ParkingError(problem)
        self._checkpointed = []

    def _check_gpu_memory(self, devices: Collection[LocalDevice], problem: str) -> None:
        for device in devices:
            free = self._free_gpu_memory(device)
            if free < _GPU_RESERVE:
                raise ParkingError(f"{problem}; and only {free:.0%} of the memory of {device.name} is free")


async def _stop(reaper: int) -> None:
    # The kernel stops a process when it is next scheduled, without a notification.
    while not stop_tree(reaper):  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
