"""Who is told what about the turns on a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from carpool.jobs.devices import LocalDevice
from carpool.runtime.executor.client_protocol import ExecutorOptions
from carpool.runtime.job_state.types import WorkerSlot
from carpool.runtime.process.protocol import Grant, Message, TurnEnded, TurnEnding
from carpool.runtime.process.worker_pool import WorkerKey
from carpool.runtime.sharing.device_arbiter import DeviceArbiter

A, B, C = ("a", 0), ("b", 0), ("c", 0)
SEAT = WorkerSlot(device=0, fraction=1 / 3)


class Desk:
    """A rota for one device, and what it said."""

    def __init__(self, *, cuda: int | None, memory_cap: int = 0) -> None:
        self.told: list[tuple[WorkerKey, Message]] = []
        device = LocalDevice(0, "device", "kind", cores=(0,), cuda=cuda)
        options = ExecutorOptions(quantum_s=0.0, max_wait_s=0.0, memory_cap=memory_cap)
        self.rota = DeviceArbiter([device], options, lambda who, message: self.told.append((who, message)))

    def news(self) -> list[tuple[WorkerKey, Message]]:
        told, self.told = self.told, []
        return told


@pytest.fixture
def gpu() -> Iterator[Desk]:
    desk = Desk(cuda=0)
    yield desk
    desk.rota.close()


def ask(desk: Desk, *keys: WorkerKey) -> None:
    for who in keys:
        desk.rota.ask(0.0, who, SEAT, may_take_several=True, may_inherit=True)


def test_on_a_gpu_two_know_that_they_are_next(gpu: Desk) -> None:
    ask(gpu, A, B, C)
    assert gpu.news() == [(A, Grant(1, 1, 0))]
    gpu.rota.heard(1.0, 0, A, TurnEnding(1))
    assert gpu.news() == [(B, Grant(1, 2, 1)), (C, Grant(1, 3, 2))]


@pytest.mark.parametrize("cuda", [None, 0])
def test_on_a_cpu_and_under_a_cap_one_does(cuda: int | None) -> None:
    desk = Desk(cuda=cuda, memory_cap=0 if cuda is None else 1 << 40)
    ask(desk, A, B, C)
    desk.rota.heard(1.0, 0, A, TurnEnding(1))
    assert desk.news() == [(A, Grant(1, 1, 0)), (B, Grant(1, 2, 1))]
    desk.rota.close()


def test_who_has_made_its_last_step_is_not_next_any_more(gpu: Desk) -> None:
    ask(gpu, A, B)
    gpu.rota.heard(1.0, 0, A, TurnEnding(1))
    assert gpu.news() == [(A, Grant(1, 1, 0)), (B, Grant(1, 2, 1)), (A, Grant(1, 3, 2))]
    gpu.rota.heard(2.0, 0, A, TurnEnded(1, is_last=True))
    gpu.rota.heard(3.0, 0, B, TurnEnding(2))
    assert gpu.news() == [(B, Grant(1, 4, 2))], "A, which had been named already, does not come between"
