"""Devices that are lanes of one GPU, in an executor with fake processes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from carpool.core.messages import Assign, JobFailed, OutsidersSeen
from carpool.core.model import Allocation, JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.nvml import GpuProcess
from carpool.jobs.program import Program
from carpool.runtime.executor.reports import Facts
from carpool.runtime.job_state.types import WorkerSlot
from carpool.runtime.process.protocol import Proceed, WorkerFailed
from carpool.runtime.sharing.foreign_processes import INTERVAL_S
from tests.runtime.executor.test_executor import READY, Gpu

FAULT = "CUDA error: an illegal memory access was encountered"
LANES = [
    LocalDevice(number, f"cuda:0@{percent}", f"H200@{percent}", (), 0, percent << 30, percent)
    for number, percent in enumerate((50, 25, 12))
]
OTHER = LocalDevice(3, "cuda:1@50", "H200@50", (), 1, 50 << 30, 50)


@pytest.fixture
def gpu(tmp_path: Path) -> Gpu:
    return Gpu(tmp_path, devices=[*LANES, OTHER])


def failures(gpu: Gpu) -> list[JobFailed]:
    return [
        fact for each in gpu.reports if isinstance(each, Facts) for fact in each.facts if isinstance(fact, JobFailed)
    ]


def test_a_job_gets_its_share_of_the_lane_and_the_lanes_memory(gpu: Gpu) -> None:
    a, b = gpu.run("a", 1.0, device=1), gpu.run("b", 0.5, device=0)
    exact = gpu.run("exact", 0.5, exact=True, device=2)
    assert gpu.pool.environments == {a: {"percent": "25"}, b: {"percent": "25"}, exact: {"percent": "12"}}
    assert gpu.pool.lane_bytes == {a: 25 << 30, b: 50 << 30, exact: 12 << 30}


def test_a_job_with_a_later_turn_has_the_whole_lane(gpu: Gpu) -> None:
    leader, filler = gpu.run("leader", 1.0), gpu.run("filler", 0.3, turn=1)
    assert gpu.pool.environments == {leader: {"percent": "50"}, filler: {"percent": "50"}}
    gpu.receives(leader, READY)
    gpu.receives(filler, READY)
    assert [message.time_sliced for _, message in gpu.pool.sent if isinstance(message, Proceed)] == [True, True]


def test_jobs_on_different_lanes_are_not_time_sliced(gpu: Gpu) -> None:
    for job, device in (("a", 0), ("b", 1)):
        gpu.receives(gpu.run(job, 1.0, device=device), READY)
    assert [message.time_sliced for _, message in gpu.pool.sent if isinstance(message, Proceed)] == [False, False]


def test_prewarmed_processes_have_the_size_of_their_lanes(gpu: Gpu) -> None:
    gpu.now = 5.0
    gpu.executor.tick()
    assert [env["percent"] for env in gpu.pool.prewarmed.values()] == ["50", "25", "12", "50"]


def test_a_fault_ends_the_jobs_on_all_lanes_of_the_gpu_and_on_no_other(gpu: Gpu) -> None:
    keys = [gpu.run(job, 1.0, device=device) for device, job in enumerate(("a", "b", "c", "elsewhere"))]
    for key in keys:
        gpu.receives(key, READY)
    gpu.receives(keys[1], WorkerFailed("device", FAULT, 0))
    assert sorted(gpu.pool.killed) == keys[:3]
    for key in keys[:3]:
        gpu.executor.workers.on_exit(key, "killed by SIGKILL")
    assert len(gpu.pool.launched) == 5  # one of them, alone
    assert not failures(gpu)


def test_a_job_out_of_memory_is_retried_while_all_lanes_of_its_gpu_are_free(gpu: Gpu) -> None:
    keys = {job: gpu.run(job, 1.0, device=device) for device, job in ((0, "a"), (1, "b"), (3, "elsewhere"))}
    for key in keys.values():
        gpu.receives(key, READY)
    gpu.receives(keys["a"], WorkerFailed("memory", "CUDA out of memory", 0))
    assert "Halt" in gpu.sent_to(keys["b"])
    assert "Halt" not in gpu.sent_to(keys["elsewhere"])


def test_without_mps_a_job_on_a_lane_fails_and_one_on_a_whole_gpu_runs(tmp_path: Path) -> None:
    whole = LocalDevice(1, "cuda:1", "H200", (), 1)
    gpu = Gpu(tmp_path, mps=False, devices=[LANES[0], whole])
    gpu.run("a", 1.0)
    gpu.run("b", 1.0, device=1)
    (failed,) = failures(gpu)
    assert failed.job == "a"
    assert all(word in failed.error for word in ("cuda:0@50", "MPS"))
    assert [job for job, _ in gpu.pool.launched] == ["b"]


def test_a_command_is_kept_on_its_lanes_and_sees_each_gpu_once(gpu: Gpu, tmp_path: Path) -> None:
    mps = gpu.executor.workers.mps
    assert mps.command_environment([WorkerSlot(0), WorkerSlot(1, 0.4)]) == {"percent": "60"}
    assert mps.command_environment([WorkerSlot(0), WorkerSlot(3, 0.5)]) == {"percent": "25"}
    seen = tmp_path / "seen"
    command = ("sh", "-c", f"echo $percent $CUDA_VISIBLE_DEVICES $CARPOOL_DEVICES > {seen}")

    async def go() -> None:
        gpu.executor.add_job(JobId("c"), Program(command=command), resume=False)
        gpu.executor.apply_orders([Assign(JobId("c"), Allocation.of(0, 2), 1)])
        await gpu.executor.jobs.commands[JobId("c")].wait()

    asyncio.run(go())
    assert seen.read_text().split() == ["62", "0", "cuda:0@50,cuda:0@12"]


def test_own_workers_on_one_lane_show_how_the_driver_numbers_processes_on_all(tmp_path: Path) -> None:
    """A worker on one lane that the driver does not list: the listed processes may be ours under other numbers."""
    rows = [GpuProcess(os.getppid(), 3 << 30)]
    gpu = Gpu(tmp_path, devices=LANES, list_processes=lambda index: rows)
    gpu.run("a", 1.0, device=0)
    for _ in range(3):
        gpu.now += INTERVAL_S
        gpu.executor.tick()
    seen = [fact for each in gpu.reports if isinstance(each, Facts) for fact in each.facts]
    assert not [fact for fact in seen if isinstance(fact, OutsidersSeen)]


def test_a_command_beside_others_on_a_whole_gpu_is_an_unlimited_client_of_mps(tmp_path: Path) -> None:
    gpu = Gpu(tmp_path, devices=[LocalDevice(0, "cuda:0", "H200", (), 0)])
    mps = gpu.executor.workers.mps
    assert mps.command_environment([WorkerSlot(0, 0.4)]) == {"percent": "100"}, "it keeps that when it is alone"
    assert mps.command_environment([WorkerSlot(0)]) == {}, "the driver can park it"
