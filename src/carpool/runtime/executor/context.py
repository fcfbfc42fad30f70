"""Executor context: injectable dependencies, and the components shared by the executor's parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from carpool.jobs.devices import LocalDevice
from carpool.runtime.executor.client_protocol import ExecutorOptions
from carpool.runtime.executor.job_table import ExecutorJobs
from carpool.runtime.executor.reports import Report
from carpool.runtime.process.worker_pool import WorkerListener, WorkerPool
from carpool.runtime.sharing.device_arbiter import DeviceArbiter
from carpool.runtime.sharing.foreign_processes import ListProcesses
from carpool.runtime.sharing.mps_admission import MpsAdmission
from carpool.runtime.sharing.mps_daemon import MpsDaemon


@dataclass(frozen=True, slots=True)
class ExecutorDependencies:
    """An executor's means, real ones unless others are given."""

    clock: Callable[[], float] = time.monotonic
    hire: Callable[[WorkerListener, Callable[[], float]], WorkerPool] = WorkerPool
    make_mps: Callable[[], MpsDaemon] = MpsDaemon
    ask: ListProcesses | None = None  # who computes on a GPU; None: the driver is asked


@dataclass(frozen=True, slots=True)
class ExecutorContext:
    """A node's devices, the jobs in hand, and who sees to processes, lanes and turns."""

    devices: Mapping[int, LocalDevice]
    options: ExecutorOptions
    jobs: ExecutorJobs
    staff: WorkerPool
    gate: MpsAdmission
    rota: DeviceArbiter
    report: Callable[[Report], None]
    clock: Callable[[], float]
