"""Who gets a device's token when workers stop: fakes for the processes, all messages by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from carpool.core.messages import Assign
from carpool.core.model import Allocation, JobId
from carpool.runtime import hands
from carpool.runtime.devices import LocalDevice
from carpool.runtime.program import Program
from carpool.runtime.protocol import Asked, Begin, Contributed, Grant, Halted, Message, Proceed, Ready
from carpool.runtime.staff import Key
from carpool.runtime.wire import ExecutorOptions

READY = Ready("digest", segment_bytes=64, batch_size=8, total_steps=9, num_samples=80)
DEVICES = [LocalDevice(i, f"cpu:{i}", "cpu1", cores=(i,)) for i in range(2)]


class FakeStaff:
    """Notes who was started and what was said to whom."""

    def __init__(self, *_: Any) -> None:
        self.begun: list[Key] = []
        self.sent: list[tuple[Key, Message]] = []

    def begin(self, key: Key, begin: Begin, log: int, counter: int) -> None:
        self.begun.append(key)

    def send(self, key: Key, message: Message, fds: tuple[int, ...] = ()) -> None:
        self.sent.append((key, message))

    def granted(self) -> list[Key]:
        return [key for key, message in self.sent if isinstance(message, Grant)]


def test_a_worker_that_halts_while_it_waits_for_the_token_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the token lies with one that stands still, and if it stands still for a neighbour, for ever."""
    staff = FakeStaff()
    monkeypatch.setattr(hands, "Staff", lambda *_: staff)
    executor = hands.Executor(DEVICES, tmp_path, ExecutorOptions(), lambda report: None, clock=lambda: 0.0)
    for job in ("a", "b"):
        executor.introduce(JobId(job), Program(entry="jobs.py:tiny"), resume=False)
    executor.carry([Assign(JobId(job), Allocation.of(0, 1), 1) for job in ("a", "b")])
    a0, a1, b0, b1 = staff.begun
    for key in (a0, a1, b0, b1):
        executor.heard(key, READY)
    formation = next(message.formation for key, message in staff.sent if key == b0 and isinstance(message, Proceed))
    executor.heard(b0, Asked(0))
    executor.heard(a0, Asked(0))
    executor.ended(a1, "killed by SIGKILL")
    executor.heard(a0, Halted(0))
    executor.heard(b0, Contributed(formation, 0, 0.01, 4))
    executor.heard(b0, Asked(1))
    assert staff.granted() == [b0, b0]
