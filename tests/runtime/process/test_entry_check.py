"""The entry check: errors, output and timeouts of entries."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from carpool.jobs.program import Program
from carpool.runtime.process.entry_check import CheckQueue, EntryChecks
from carpool.runtime.process.protocol import Message
from carpool.runtime.process.worker_pool import WorkerKey, WorkerPool

ENTRIES = """
import os, sys
import torch
from carpool import Stop, Training
from carpool.runtime.data.datasets import synthetic


def net(batch=16, norm=False):
    print("printed by an entry")
    data = synthetic((8,), classes=4, size=64)
    layers = [torch.nn.Linear(8, 4), *([torch.nn.BatchNorm1d(4)] if norm else [])]
    model = torch.nn.Sequential(*layers)
    return Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        dataset=data.train,
        loss=lambda model, batch: model(batch[0]).sum(),
        batch_size=batch,
        stop=Stop(steps=1),
    )


def raises():
    raise ValueError("no such thing")


def leaves():
    sys.exit("not today")


def wants():
    assert os.environ["WANTED"] == "here" and os.getcwd() == os.environ["THERE"]
    return net()


def leaves_process():
    import subprocess
    started = subprocess.Popen(["sleep", "321"])
    open("child", "w").write(str(started.pid))
    return net()


def dies():
    os._exit(1)


def waits():
    import signal
    signal.pause()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with entries."""
    (tmp_path / "train.py").write_text(ENTRIES, encoding="utf-8")
    return tmp_path


class Checker:
    """A pool of real processes that calls entries."""

    def __init__(self) -> None:
        self.pool = WorkerPool(self, time.monotonic)
        self.checks = EntryChecks(self.pool)

    def on_message(self, key: WorkerKey, message: Message) -> None:
        self.checks.on_message(key, message)

    def on_exit(self, key: WorkerKey, why: str) -> None:
        self.checks.on_exit(key)


def check(timeout_s: float = 60.0, **programs: Program) -> dict[str, str]:
    """Check the entries of some jobs."""

    async def go() -> dict[str, str]:
        checker = Checker()
        checker.pool.begin()
        try:
            return await checker.checks.run(programs, timeout_s)
        finally:
            await checker.pool.stop()

    return asyncio.run(go())


def program(folder: Path, name: str = "net", **more: object) -> Program:
    return Program(entry=f"train.py:{name}", folder=str(folder), **more)  # type: ignore[arg-type]


def is_asleep(pid: str) -> bool:
    try:
        return b"sleep" in (Path("/proc") / pid / "cmdline").read_bytes()
    except OSError:
        return False


def test_errors_are_reported_by_job_and_nothing_is_printed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = check(
        fine=program(folder),
        raises=program(folder, "raises"),
        leaves=program(folder, "leaves"),
        large=program(folder, args={"batch": 100}),
        larger=program(folder, batch_size=200),
        parted=program(folder, args={"norm": True}, exact=True, shards=16),
        wants=program(folder, "wants", environment={"WANTED": "here", "THERE": str(folder)}),
        child=program(folder, "leaves_process"),
    )
    assert found.keys() == {"fine", "raises", "leaves", "large", "larger", "parted", "wants", "child"}
    errors = {job: problem for job, problem in found.items() if problem}
    assert errors.keys() == {"raises", "leaves", "large", "larger", "parted"}
    assert errors["raises"] == "train.py:raises: raised ValueError: no such thing (train.py, line 24)"
    assert "not today" in errors["leaves"]
    assert "batch_size is 100" in errors["large"]
    assert "batch size 200" in errors["larger"]
    assert "shards" in errors["parted"]
    assert capfd.readouterr() == ("", "")
    child, until = (folder / "child").read_text(encoding="ascii"), time.monotonic() + 30.0
    while is_asleep(child):
        assert time.monotonic() < until, "processes started by an entry are killed"
        os.sched_yield()


def test_every_entry_is_called_once_before_further_jobs(folder: Path) -> None:
    first, second, other = program(folder), program(folder, args={"batch": 8}), program(folder, "raises")
    checks = CheckQueue({"a": first, "b": second, "c": other, "d": second})
    assert [checks.next(is_early=False) for _ in range(3)] == [("a", first), ("c", other), None]
    assert [checks.next(is_early=True) for _ in range(3)] == [("b", second), ("d", second), None]


def test_entries_that_die_or_take_too_long_are_unchecked(folder: Path) -> None:
    assert check(3.0, dies=program(folder, "dies"), waits=program(folder, "waits")) == {}
