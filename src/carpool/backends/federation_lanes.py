"""Lanes of a federation: which devices run their tasks side by side on a GPU, and the MPS daemon for it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence

import carpool.jobs.devices
from carpool.core.model import WHOLE
from carpool.federated.federation_file import FederatedDevice, FederationFile
from carpool.jobs.devices import Gpu, LocalDevice
from carpool.runtime.memory.eviction_policy import CUDA_CONTEXT_BYTES
from carpool.runtime.sharing.lanes import max_mps_clients
from carpool.runtime.sharing.mps_admission import MpsAdmission
from carpool.runtime.sharing.mps_daemon import MpsDaemon

_log = logging.getLogger(__name__)


class FederationLanes:
    """Gives the tasks of GPU devices lanes; where that is not possible says why, once, and they take turns."""

    def __init__(
        self,
        file: FederationFile,
        devices: Sequence[FederatedDevice],
        *,
        make_daemon: Callable[[], MpsDaemon] = MpsDaemon,
        list_gpus: Callable[[], Sequence[Gpu]] | None = None,
    ) -> None:
        self._memory = [program.program.memory_bytes for program in file.programs.values()]
        on_gpu = [] if file.is_emulated or len(self._memory) < 2 else devices
        self._gpus = {device.name: index for device in on_gpu if (index := _cuda_index(device)) is not None}
        lanes = [LocalDevice(index, f"cuda:{index}", "GPU", cuda=index) for index in sorted({*self._gpus.values()})]
        self._locals = {lane.id: lane for lane in lanes}
        self._list_gpus = list_gpus or carpool.jobs.devices.list_gpus
        self._mps = MpsAdmission(
            lanes, enabled=True, on_change=lambda: None, note=_log.warning, make_daemon=make_daemon
        )
        self._loading = {index: asyncio.Lock() for index in self._locals}
        self._reasons: set[str] = set()

    async def start(self) -> None:
        """Start MPS, if any device can use it."""
        bytes_of = {gpu.index: gpu.free_bytes for gpu in self._list_gpus()} if self._gpus else {}
        for index, count in Counter(self._gpus.values()).items():
            if problem := self._problem(index, count, bytes_of.get(index, 0)):
                self._refuse_gpu(index, problem)
        if self._gpus:
            await self._mps.start()
        if self._gpus and not self._mps.has_lanes:
            self._refuse_all(self._mps.unavailable)

    async def stop(self) -> None:
        """Stop MPS; the processes of the devices must have exited, or be about to."""
        await self._mps.stop()

    def loading(self, device: FederatedDevice) -> asyncio.Lock:
        """To be held while a device loads its tasks: on a GPU they are timed alone."""
        return self._loading.get(self._gpus.get(device.name, -1)) or asyncio.Lock()

    def environment(self, device: FederatedDevice) -> dict[str, str]:
        """Variables that make a task of the device a client with the whole GPU; empty if its tasks take turns."""
        index = self._gpus.get(device.name)
        return {} if index is None else self._mps.environment(index, WHOLE)

    def refuse(self, device: FederatedDevice, reason: str) -> None:
        """Let the tasks of a device take turns from now on."""
        self._gpus.pop(device.name, None)
        self._say(f"the tasks of {device.name} take turns on its GPU: {reason}", reason)

    def _refuse_gpu(self, index: int, reason: str) -> None:
        self._gpus = {name: each for name, each in self._gpus.items() if each != index}
        self._say(f"the tasks of devices on cuda:{index} take turns: {reason}", reason)

    def _refuse_all(self, reason: str) -> None:
        self._gpus = {}
        self._say(f"the tasks of GPU devices take turns: {reason}", reason)

    def _say(self, text: str, reason: str) -> None:
        if reason not in self._reasons:
            self._reasons.add(reason)
            _log.warning("%s", text)

    def _problem(self, index: int, count: int, num_bytes: int) -> str:
        """Why so many devices cannot run all their tasks side by side on a GPU."""
        clients, most = count * len(self._memory), max_mps_clients(self._locals.values(), self._locals[index])
        if clients > most:
            return f"they are {clients} processes, and MPS serves {most} on a GPU"
        needed = count * sum([each + CUDA_CONTEXT_BYTES for each in self._memory if each])
        if num_bytes and needed > num_bytes:
            return f"they declare {needed >> 20} MiB with CUDA itself, and it has {num_bytes >> 20} MiB free"
        return ""


def _cuda_index(device: FederatedDevice) -> int | None:
    """The GPU of a device; None if it is none."""
    kind, _, index = device.device.partition(":")
    return int(index) if kind == "cuda" else None
