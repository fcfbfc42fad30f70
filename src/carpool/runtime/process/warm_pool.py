"""Warm pool: keeps prewarmed processes on each GPU and assigns them to new workers.

A process's share of a GPU is fixed when it starts, so a prewarmed process fits jobs of one lane only. The pool keeps
processes for the lanes requested most recently, and begins with whole GPUs. A prewarmed process holds a CUDA context
and nothing more, and is killed whenever a job needs its memory, its MPS client or an undisturbed device.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from carpool.core.model import WHOLE
from carpool.jobs.devices import LocalDevice
from carpool.runtime.process.protocol import Begin, Message, Prewarm, Prewarmed, WorkerFailed
from carpool.runtime.process.worker_pool import WorkerKey
from carpool.runtime.sharing.lanes import max_mps_clients

_NO_JOB = ""  # in the key of a prewarmed process: no job has an empty name
_REFILL_S = 1.0  # after a start on the device, so that prewarming does not slow that start
_QUIET_S = 5.0  # typical duration of a measurement
# without a start, before a process is replaced by one of another lane: a search over shares tries many lanes
_CHANGE_S = 10.0
_REST_S = 30.0  # after processes were killed for their memory
_WARM_WITHIN_S = 60.0
_MAX_FAILURES = 3  # on one device in a row
# Read when torch, CUDA or its libraries start: a job that sets one of these needs a new process.
_READ_AT_START = ("CUDA", "CUBLAS", "CUDNN", "NCCL", "NVIDIA", "PYTORCH", "TORCH", "OMP_", "MKL_", "LD_")


class ProcessStarter(Protocol):
    """Starts and kills processes; implemented by `WorkerPool`."""

    def prewarm(self, key: WorkerKey, prewarm: Prewarm) -> None: ...

    def kill(self, key: WorkerKey) -> None: ...


@dataclass(slots=True, eq=False)
class _WarmProcess:
    key: WorkerKey
    lane: int
    environment: Mapping[str, str]
    since: float
    is_warm: bool = False
    is_exiting: bool = False
    cost: str = ""  # memory and time


@dataclass(slots=True, eq=False)
class _Gpu:
    device: LocalDevice
    lanes: deque[int]  # requested lanes, the newest last
    busy_until: float
    max_clients: int
    workers: set[WorkerKey] = field(default_factory=set)
    processes: list[_WarmProcess] = field(default_factory=list)
    failures: int = 0

    def usable(self) -> list[_WarmProcess]:
        return [process for process in self.processes if not process.is_exiting]


class WarmPool:
    """The prewarmed processes of one executor."""

    def __init__(
        self,
        starter: ProcessStarter,
        devices: Mapping[int, LocalDevice],
        size: int,  # on each device
        environment: Callable[[int, int], Mapping[str, str]],  # of a device and a lane
        is_allowed: Callable[[int], bool],  # whether a prewarmed process may be on a device
        clock: Callable[[], float],
        heartbeat_s: float = 0.5,
    ) -> None:
        self._starter = starter
        self._size = size
        self._environment = environment
        self._is_allowed = is_allowed
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._last_number = 0
        busy_until = clock() + _REFILL_S
        self._gpus = {
            number: _Gpu(
                device,
                deque([device.lane_percent or WHOLE] * size, maxlen=size),
                busy_until,
                max_mps_clients(devices.values(), device),
            )
            for number, device in devices.items()
        }

    def take(self, worker: WorkerKey, device: int, lane: int, begin: Begin) -> tuple[WorkerKey, str] | None:
        """Take a prewarmed process for a worker, with a note for its job's story; None if none fits."""
        gpu = self._gpus.get(device)
        if gpu is None:
            return None
        gpu.lanes.append(lane)
        gpu.busy_until = self._clock() + _REFILL_S
        gpu.workers.add(worker)
        process = self._fitting(gpu, begin)
        if process is None:
            if len(gpu.processes) + len(gpu.workers) > gpu.max_clients:
                self._kill(gpu.usable()[:1])
            return None
        gpu.processes.remove(process)
        return process.key, f"started in a prewarmed process on {gpu.device.name} ({process.cost})"

    def tick(self) -> None:
        for number, gpu in self._gpus.items():
            if not self._size or gpu.failures >= _MAX_FAILURES:
                continue
            if not self._is_allowed(number):
                self._kill(gpu.usable())
                continue
            self._kill([p for p in gpu.usable() if p.environment != self._environment(number, p.lane)])
            self._kill_late(gpu)
            self._refill(number, gpu)

    def clear(self, device: int) -> list[WorkerKey]:
        """Kill all prewarmed processes on a device and start none for a while; returns the keys of those exiting."""
        gpu = self._gpus.get(device)
        if gpu is None:
            return []
        gpu.busy_until = self._clock() + _REST_S
        self._kill(gpu.usable())
        return [process.key for process in gpu.processes]

    def keep_quiet(self, device: int) -> None:
        """Start no process on a device for a while and kill one that is starting: it would disturb a measurement."""
        if (gpu := self._gpus.get(device)) is not None:
            gpu.busy_until = max(gpu.busy_until, self._clock() + _QUIET_S)
            self._kill([process for process in gpu.usable() if not process.is_warm])

    def owns(self, key: WorkerKey) -> bool:
        return key[0] == _NO_JOB

    def on_message(self, key: WorkerKey, message: Message) -> tuple[int, str]:
        """Handle a message. Returns a device and a note for the jobs there, if there is one."""
        for number, gpu in self._gpus.items():
            for process in gpu.processes:
                if process.key == key and isinstance(message, Prewarmed):
                    process.is_warm, process.cost, gpu.failures = True, _cost(message), 0
                elif process.key == key and isinstance(message, WorkerFailed) and not process.is_exiting:
                    process.is_exiting = True
                    return number, self._on_failure(gpu, message.error)
        return -1, ""

    def on_hang(self, key: WorkerKey) -> None:
        self._kill([process for gpu in self._gpus.values() for process in gpu.processes if process.key == key])

    def on_exit(self, key: WorkerKey, why: str) -> tuple[int, str] | None:
        """Handle a process's exit. Returns for a prewarmed one its device and a note for the jobs there."""
        for number, gpu in self._gpus.items():
            gpu.workers.discard(key)
            for process in gpu.processes:
                if process.key == key:
                    gpu.processes.remove(process)
                    return number, "" if process.is_exiting else self._on_failure(gpu, why)
        return None

    def _fitting(self, gpu: _Gpu, begin: Begin) -> _WarmProcess | None:
        if any(name.startswith(_READ_AT_START) for name in begin.program.get("environment") or {}):
            return None
        fitting = [p for p in gpu.usable() if p.is_warm and p.environment == begin.environment]
        return fitting[0] if fitting else None

    def _refill(self, number: int, gpu: _Gpu) -> None:
        now, usable = self._clock(), gpu.usable()
        if now < gpu.busy_until or any(not p.is_warm for p in usable) or len(gpu.processes) > len(usable):
            return
        missing = Counter(gpu.lanes) - Counter(process.lane for process in usable)
        if not missing:
            return
        if len(usable) < self._size and len(usable) + len(gpu.workers) < gpu.max_clients:
            self._start(number, gpu, next(lane for lane in reversed(gpu.lanes) if lane in missing))
        elif now >= gpu.busy_until - _REFILL_S + _CHANGE_S:
            surplus = Counter(process.lane for process in usable) - Counter(gpu.lanes)
            self._kill([process for process in usable if process.lane in surplus][:1])

    def _kill_late(self, gpu: _Gpu) -> None:
        limit = self._clock() - _WARM_WITHIN_S
        late = [process for process in gpu.usable() if not process.is_warm and process.since < limit]
        for _ in late:
            self._on_failure(gpu, f"not ready within {_WARM_WITHIN_S:.0f} s")
        self._kill(late)

    def _start(self, number: int, gpu: _Gpu, lane: int) -> None:
        self._last_number += 1
        process = _WarmProcess((_NO_JOB, self._last_number), lane, self._environment(number, lane), self._clock())
        gpu.processes.append(process)
        device = gpu.device
        name = "cpu" if device.cuda is None else f"cuda:{device.cuda}"
        self._starter.prewarm(process.key, Prewarm(name, device.cores, self._heartbeat_s, process.environment))

    def _on_failure(self, gpu: _Gpu, why: str) -> str:
        gpu.failures += 1
        gpu.busy_until = self._clock() + _CHANGE_S
        is_last = gpu.failures == _MAX_FAILURES
        return f"no prewarmed processes on {gpu.device.name} from now on: {why}" if is_last else ""

    def _kill(self, processes: list[_WarmProcess]) -> None:
        for process in processes:
            process.is_exiting = True
            self._starter.kill(process.key)


def _cost(message: Prewarmed) -> str:
    memory = f"{message.memory_bytes / 2**20:.0f} MiB, " if message.memory_bytes else ""
    return f"{memory}warm-up {message.seconds:.1f} s" + "".join(f"; skipped {each}" for each in message.skipped)
