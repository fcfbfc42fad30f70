"""What the job table finds out about the memory of its jobs."""

import os
from pathlib import Path

from carpool.core.model import JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.program import Program
from carpool.runtime.executor.job_table import JobTable
from carpool.runtime.executor.lease import LeaseEnds
from carpool.runtime.job_state.actions import BatchSplit, Mirror, Send
from carpool.runtime.job_state.types import JobOptions, Target, WorkerSlot
from carpool.runtime.process.protocol import Publish
from carpool.runtime.process.shared_memory import StepCounter, boot_clock
from carpool.runtime.state.mirror import write_mirror
from carpool.runtime.state.tensor_file import StateParts

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


def test_a_job_whose_lease_ended_long_ago_has_nothing_written_until_the_lease_is_renewed(tmp_path: Path) -> None:
    table = JobTable(tmp_path, {0: GPU}, 1.0)
    table.limit(LeaseEnds(writes=boot_clock() - 1.0))
    training = table.add_training(JobId("a"), Program(entry="t:f"), JobOptions(), resume=False)
    training.add_worker(0, 0)
    counter = StepCounter(training.counter(0))
    folder, mirror = training.folder, Mirror(1)
    (fd,) = training.descriptors_for(Send(0, Publish(), mirror))
    write_mirror(fd, 5, StateParts.of({"step": 5}))

    def write() -> None:
        training.write(BatchSplit(5, (0,), (8,)))
        training.copy_mirror(mirror)
        training._mirror_files.wait()

    def found() -> tuple[int, int, bool]:
        return len(folder.batch_splits()), len(folder.state_copies()), counter.may_save()

    write()
    seen = [found()]
    table.limit(LeaseEnds(writes=boot_clock() + 1000.0))
    seen.append(found())
    write()
    seen.append(found())
    assert seen == [(0, 0, False), (1, 0, True), (1, 1, True)]
    training.close()
