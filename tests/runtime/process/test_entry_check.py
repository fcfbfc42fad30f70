"""The entry check: errors, output and timeouts of entries."""

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from carpool.jobs.program import Program
from carpool.runtime.process.entry_check import CheckQueue, EntryChecks
from carpool.runtime.process.protocol import Begin, CheckEntry, EntryChecked, Message, Ready, WorkerFailed
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


def interrupts():
    raise KeyboardInterrupt


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
        self.checks = EntryChecks(self.pool, lambda program: 1, 2)
        self.heard: asyncio.Queue[Message] = asyncio.Queue()
        self.exited: asyncio.Queue[WorkerKey] = asyncio.Queue()

    def on_message(self, key: WorkerKey, message: Message) -> None:
        self.checks.on_message(key, message)
        self.heard.put_nowait(message)

    def on_exit(self, key: WorkerKey, why: str) -> None:
        self.checks.on_exit(key)
        self.exited.put_nowait(key)

    async def first_of(self, kind: type[Ready]) -> Ready:
        while not isinstance(message := await self.heard.get(), kind):
            assert not isinstance(message, WorkerFailed), message
        return message

    async def end(self, key: WorkerKey) -> None:
        """End a worker, so that the next one can have its key."""
        self.pool.kill(key)
        while await self.exited.get() != key:
            pass


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def pooled(runner: asyncio.Runner) -> Iterator[Checker]:
    """One fork server for all tests."""

    async def opened() -> Checker:
        checker = Checker()
        checker.pool.begin()
        return checker

    checker = runner.run(opened())
    yield checker
    runner.run(checker.pool.stop())


@pytest.fixture
def checker(pooled: Checker) -> Iterator[Checker]:
    yield pooled
    pooled.checks.release_others(())


Check = Callable[..., dict[str, str]]


@pytest.fixture
def check(runner: asyncio.Runner, checker: Checker) -> Check:
    """Check the entries of some jobs."""

    def check(timeout_s: float = 60.0, **programs: Program) -> dict[str, str]:
        return runner.run(checker.checks.run(programs, timeout_s))

    return check


def test_the_lengths_of_trainings_are_known_before_they_start(folder: Path, checker: Checker, check: Check) -> None:
    check(net=program(folder), bad=program(folder, "raises"))
    found = checker.checks.fine
    assert "bad" not in found
    assert (found["net"].total_steps, found["net"].batch_size, found["net"].num_samples) == (1, 16, 64)


def program(folder: Path, name: str = "net", **more: object) -> Program:
    return Program(entry=f"train.py:{name}", folder=str(folder), **more)  # type: ignore[arg-type]


def is_asleep(pid: str) -> bool:
    try:
        return b"sleep" in (Path("/proc") / pid / "cmdline").read_bytes()
    except OSError:
        return False


def test_errors_are_reported_by_job_and_nothing_is_printed(
    folder: Path, check: Check, capfd: pytest.CaptureFixture[str]
) -> None:
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


def test_an_entry_that_ends_its_process_is_an_error(folder: Path, check: Check) -> None:
    found = check(30.0, dies=program(folder, "dies"), interrupts=program(folder, "interrupts"))
    assert "ended" in found["dies"]
    assert "KeyboardInterrupt" in found["interrupts"]


def test_entries_that_take_too_long_are_unchecked(folder: Path, check: Check) -> None:
    assert check(2.0, waits=program(folder, "waits")) == {}


COUNTED = """
import os
import train

def counted():
    with open("calls", "a") as calls:
        calls.write("called\\n")
    os.chdir("..")
    print("printed in", os.getcwd())
    return train.net()
"""


async def begun(
    checker: Checker, program: Program, log: Path, *, is_checked: bool, threads: int = 1
) -> tuple[Ready, bool]:
    """The first message of a worker, and whether it runs in the process that has checked its entry."""
    if is_checked:
        assert await checker.checks.run({"job": program}) == {"job": ""}
    begin = Begin("job", asdict(program), "cpu", cores=tuple(os.sched_getaffinity(0)), threads=threads)
    key, own = checker.checks.take(begin), ("job", 1)
    with log.open("ab") as file:
        if key is None:
            checker.pool.launch(own, begin, file.fileno())
        else:
            checker.pool.assign(key, own, begin, file.fileno())
        ready = await checker.first_of(Ready)
    await checker.end(own)
    return ready, key is not None


def test_a_checked_process_becomes_the_worker_and_calls_the_entry_once(
    folder: Path, runner: asyncio.Runner, checker: Checker
) -> None:
    (folder / "counts.py").write_text(COUNTED, encoding="utf-8")
    counted = Program(entry="counts.py:counted", folder=str(folder))
    fresh = runner.run(begun(checker, counted, folder / "fresh", is_checked=False))
    checked = runner.run(begun(checker, counted, folder / "checked", is_checked=True))
    assert checked == (fresh[0], True)
    assert (folder / "calls").read_text(encoding="ascii") == "called\n" * 2
    assert (folder / "checked").read_text(encoding="utf-8") == f"printed in {folder.parent}\nprinted by an entry\n"
    assert (folder / "checked").read_text(encoding="utf-8") == (folder / "fresh").read_text(encoding="utf-8")


def test_a_worker_with_other_threads_gets_its_own_process(
    folder: Path, runner: asyncio.Runner, checker: Checker
) -> None:
    """The bits of what an entry computes may depend on the number of threads."""
    assert not runner.run(begun(checker, program(folder), folder / "log", is_checked=True, threads=2))[1]


class NoProcesses:
    """Starts nothing; answers as a test says."""

    def __init__(self) -> None:
        self.started: dict[str, WorkerKey] = {}
        self.events: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.killed: list[WorkerKey] = []

    async def ready(self) -> None:
        pass

    def check(self, key: WorkerKey, request: CheckEntry) -> None:
        self.started[request.job] = key
        self.events[request.job].set()

    def kill(self, key: WorkerKey) -> None:
        self.killed.append(key)


async def kept(answers: dict[str, EntryChecked], max_kept: int) -> tuple[EntryChecks, NoProcesses]:
    """Checks of some jobs, answered in order."""
    starter = NoProcesses()
    checks = EntryChecks(starter, lambda program: 1, max_kept)
    running = asyncio.create_task(checks.run({job: Program(entry=f"{job}.py:main") for job in answers}))
    for job, answer in answers.items():
        await starter.events[job].wait()
        checks.on_message(starter.started[job], answer)
    await running
    return checks, starter


def begin(job: str) -> Begin:
    return Begin(job, asdict(Program(entry=f"{job}.py:main")), "cpu")


def test_only_processes_that_can_become_workers_are_kept_and_no_more_than_allowed() -> None:
    fine, touched = EntryChecked(can_begin=True), EntryChecked(can_begin=False)
    answers = {"a": EntryChecked("wrong"), "b": touched, "c": fine, "d": fine, "e": fine}
    checks, starter = asyncio.run(kept(answers, 2))
    assert starter.killed == [starter.started[job] for job in ("a", "b", "e")]
    assert [checks.take(begin(job)) for job in "abcde"] == [None, None, *map(starter.started.get, "cd"), None]
    assert checks.take(begin("c")) is None


def test_processes_of_jobs_that_do_not_start_now_are_killed() -> None:
    fine = EntryChecked(can_begin=True)
    checks, starter = asyncio.run(kept({"a": fine, "b": fine, "c": fine}, 3))
    checks.release_others({"b"})
    assert starter.killed == [starter.started["a"], starter.started["c"]]
    checks.on_exit(starter.started["b"])
    assert checks.take(begin("b")) is None
