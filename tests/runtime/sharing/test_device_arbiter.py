"""Grants that workers on a device receive."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from carpool.jobs.devices import LocalDevice
from carpool.runtime.executor.client_protocol import ExecutorOptions
from carpool.runtime.job_state.types import WorkerSlot
from carpool.runtime.process.protocol import Grant, MemoryMeasured, Message, TurnEnded, TurnEnding
from carpool.runtime.process.worker_pool import WorkerKey
from carpool.runtime.sharing.device_arbiter import DeviceArbiter

A, B, C = ("a", 0), ("b", 0), ("c", 0)
SLOT = WorkerSlot(device=0, fraction=1 / 3)


class Rig:
    """An arbiter for one device, and the messages it sent."""

    def __init__(self, *, cuda: int | None, memory_cap: int = 0) -> None:
        self.sent: list[tuple[WorkerKey, Message]] = []
        device = LocalDevice(0, "device", "kind", cores=(0,), cuda=cuda)
        options = ExecutorOptions(quantum_s=0.0, max_wait_s=0.0, memory_cap=memory_cap)
        self.arbiter = DeviceArbiter([device], options, lambda key, message: self.sent.append((key, message)))

    def take_sent(self) -> list[tuple[WorkerKey, Message]]:
        sent, self.sent = self.sent, []
        return sent


@pytest.fixture
def gpu() -> Iterator[Rig]:
    rig = Rig(cuda=0)
    yield rig
    rig.arbiter.close()


def request(rig: Rig, *keys: WorkerKey) -> None:
    for key in keys:
        rig.arbiter.request_turn(0.0, key, SLOT, multi_step=True, can_queue=True)


def test_on_a_gpu_two_grants_are_queued(gpu: Rig) -> None:
    request(gpu, A, B, C)
    assert gpu.take_sent() == [(A, Grant(1, 1, 0))]
    gpu.arbiter.on_message(1.0, 0, A, TurnEnding(1))
    assert gpu.take_sent() == [(B, Grant(1, 2, 1)), (C, Grant(1, 3, 2))]


@pytest.mark.parametrize("cuda", [None, 0])
def test_on_a_cpu_and_under_a_cap_one_grant_is_queued(cuda: int | None) -> None:
    rig = Rig(cuda=cuda, memory_cap=0 if cuda is None else 1 << 40)
    request(rig, A, B, C)
    rig.arbiter.on_message(1.0, 0, A, TurnEnding(1))
    assert rig.take_sent() == [(A, Grant(1, 1, 0)), (B, Grant(1, 2, 1))]
    rig.arbiter.close()


def test_a_queued_grant_is_dropped_after_the_last_step(gpu: Rig) -> None:
    request(gpu, A, B)
    gpu.arbiter.on_message(1.0, 0, A, TurnEnding(1))
    assert gpu.take_sent() == [(A, Grant(1, 1, 0)), (B, Grant(1, 2, 1)), (A, Grant(1, 3, 2))]
    gpu.arbiter.on_message(2.0, 0, A, TurnEnded(1, is_last=True))
    gpu.arbiter.on_message(3.0, 0, B, TurnEnding(2))
    assert gpu.take_sent() == [(B, Grant(1, 4, 2))], "not A, which was queued before"


def test_under_a_cap_the_jobs_whose_processes_keep_memory_are_named(gpu: Rig) -> None:
    rig = Rig(cuda=0, memory_cap=3 << 30)
    for key in (A, B, C):
        rig.arbiter.on_message(0.0, 0, key, MemoryMeasured(1 << 20, 1 << 20, 1 << 30))
    words = rig.arbiter.memory_limit(0, A)
    assert "3 GiB" in words
    assert "b, c keep 2 GiB" in words
    assert gpu.arbiter.memory_limit(0, A) == "", "without a cap the device is the limit"
    rig.arbiter.close()
