"""MPS admission: decides when a worker may start on a GPU, handles GPU faults, restarts the daemon.

Without MPS everybody may start at once, without a lane, and a fault is the fault of whoever reports it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from carpool.jobs.devices import LocalDevice
from carpool.runtime.process.worker_pool import WorkerKey
from carpool.runtime.sharing.lanes import FaultIsolation
from carpool.runtime.sharing.mps_daemon import MpsDaemon, MpsUnavailable, is_mps_error

_MOST_MISSED = 3  # lanes that workers did not get, while the daemon was up


@dataclass(frozen=True, slots=True)
class PendingWorker:
    """A worker that may not start yet."""

    key: WorkerKey
    device: int
    lane: int
    threads: int


class MpsAdmission:
    """Lanes on the GPUs of one node."""

    def __init__(
        self,
        devices: Sequence[LocalDevice],
        *,
        wanted: bool,
        on_change: Callable[[], object],  # somebody who waits may be able to start
        tell: Callable[[str], object],  # words that concern every job on a GPU
        make: Callable[[], MpsDaemon] = MpsDaemon,
    ) -> None:
        self._gpus = {device.id for device in devices if device.cuda is not None}
        self._probations = {gpu: FaultIsolation[WorkerKey]() for gpu in self._gpus}
        self._on_change = on_change
        self._tell = tell
        self._make = make
        self._mps: MpsDaemon | None = None
        self._starting: asyncio.Task[None] | None = None
        self.waiting: list[PendingWorker] = []
        self._missed = 0  # workers that were not put on their lanes
        self.why_not = "" if wanted else "it is turned off"  # why there are no lanes, for people

    @property
    def has_lanes(self) -> bool:
        """Whether jobs that share a GPU compute at the same time."""
        return bool(self._gpus) and not self.why_not

    async def start(self) -> None:
        """Start the daemon, if there is a GPU and it can be had."""
        if self.has_lanes:
            await self._start()

    async def stop(self) -> None:
        """End the daemon; its clients must be gone."""
        if self._starting is not None:
            self._starting.cancel()
        if self._mps is not None:
            await self._mps.quit()

    def environment(self, device: int, lane: int) -> dict[str, str]:
        """What makes a worker a client with this lane."""
        if self._mps is None or device not in self._gpus or not self.has_lanes:
            return {}
        return self._mps.environment(lane)

    def is_calm(self, device: int) -> bool:
        """Whether processes may be on a device that nobody has asked for."""
        if not self.has_lanes or device not in self._gpus:
            return True
        return self._is_up and not self._probations[device].is_on

    def may_start(self, who: PendingWorker) -> bool:
        """Whether a worker may start now; else it waits here."""
        if not self.has_lanes or who.device not in self._gpus:
            return True
        if self._is_up and self._probations[who.device].may_start(who.key[0]):
            return True
        if who not in self.waiting:
            self.waiting.append(who)
        return False

    def admitted(self) -> list[PendingWorker]:
        """Those who waited and may start now; they wait no longer."""
        free = [who for who in self.waiting if self.may_start(who)]
        self.waiting = [who for who in self.waiting if who not in free]
        return free

    def give_up(self, key: WorkerKey) -> bool:
        """Somebody is not to start any more; whether they were waiting."""
        before = len(self.waiting)
        self.waiting = [who for who in self.waiting if who.key != key]
        return len(self.waiting) < before

    def is_waiting(self, key: WorkerKey) -> bool:
        """Whether somebody has not started yet, and so cannot be hit by anything."""
        return any(who.key == key for who in self.waiting)

    def is_leaving(self, device: int, key: WorkerKey) -> bool:
        """Whether somebody has been hit by a fault already."""
        return device in self._gpus and self._probations[device].is_leaving(key)

    def fault(self, device: int, error: str, clients: Sequence[WorkerKey], jobs: Sequence[tuple[str, int]]) -> bool:
        """A fault on a GPU; all its clients have to leave. Whether they are to blame."""
        probation = self._probations[device]
        if not self._is_up or is_mps_error(error):  # the daemon ended under them, or is just ending
            probation.drain(clients)
            return False
        return probation.fault(clients, jobs)

    def gone(self, device: int, key: WorkerKey) -> None:
        """A worker has ended."""
        if device in self._gpus:
            self._probations[device].gone(key)

    def progressed(self, device: int, job: str, steps: int) -> bool:
        """A job has done so many steps; whether that lets others in."""
        if device not in self._gpus or not self._probations[device].is_on:
            return False
        self._probations[device].passed(job, steps)
        return True

    def missed(self, words: str) -> None:
        """A worker was not put on its lane, though the daemon was there; often enough there are no lanes.

        A daemon that has just died explains it: the worker starts again when the next one is up.
        """
        self._missed += self._is_up
        if self._missed >= _MOST_MISSED and self.has_lanes:
            self.why_not = f"processes do not get their lanes ({words})"
            self._tell(f"jobs that share a GPU take turns from here on: {self.why_not}")
            self._on_change()

    def over(self, job: str) -> None:
        """A job has ended."""
        for probation in self._probations.values():
            probation.over(job)

    def tick(self) -> None:
        """See whether the daemon is still there."""
        if self._mps is not None and not self._mps.is_alive and self._starting is None:
            self._starting = asyncio.create_task(self._restart())

    @property
    def _is_up(self) -> bool:
        return self._mps is not None and self._mps.is_alive

    async def _start(self) -> None:
        mps = self._make()
        try:
            await mps.start()
        except (MpsUnavailable, OSError) as error:
            self.why_not = str(error)
        else:
            self._mps = mps

    async def _restart(self) -> None:
        if self._mps is not None:
            dead, self._mps, self._missed = self._mps, None, 0
            await dead.quit()
        self._tell("NVIDIA's MPS daemon ended and is started again")
        await self._start()
        if self.why_not:
            self._tell(f"jobs that share a GPU take turns from here on: {self.why_not}")
        self._starting = None
        self._on_change()
