"""What the job table finds out about the memory of its jobs."""

import os
from pathlib import Path

from carpool.core.model import JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.program import Program
from carpool.runtime.executor.job_table import JobTable
from carpool.runtime.job_state.types import JobOptions, Target, WorkerSlot

GPU = LocalDevice(0, "cuda:0", "H200", (), 0)
MIB = 1 << 20


def warning(tmp_path: Path, ram_bytes: int, *, pid: int) -> str:
    """The warning about a training on a GPU that declared so much RAM; its memory on the GPU is 1 TiB."""
    table = JobTable(tmp_path, {0: GPU}, 1.0)
    training = table.add_training(JobId("a"), Program(entry="t:f", ram_bytes=ram_bytes), JobOptions(), resume=False)
    training.machine.order(0.0, Target(1, (WorkerSlot(0),)))
    training.add_worker(0, 0)
    training.state.memory_bytes = 1 << 40
    [(job, words)] = table.memory_warnings(9.0, {("a", 0): pid}.__getitem__)
    assert job == "a"
    return words


def test_declared_ram_of_a_training_on_a_gpu_is_compared_with_the_ram_of_its_worker(tmp_path: Path) -> None:
    assert warning(tmp_path / "much", 1 << 39, pid=os.getpid()) == ""
    assert "ram = 2 MiB" in warning(tmp_path / "little", 2 * MIB, pid=os.getpid())


def test_a_worker_that_is_not_forked_yet_uses_no_ram(tmp_path: Path) -> None:
    assert warning(tmp_path, 2 * MIB, pid=0) == ""
