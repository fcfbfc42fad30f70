"""Environment and start errors of commands."""

import asyncio
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from carpool.core.messages import Fact, JobFailed, JobFinished, ProgressReported
from carpool.core.model import JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.host import CoreAllocator
from carpool.jobs.program import Program
from carpool.runtime.commands.command_process import CommandProcess
from carpool.runtime.executor.job_folder import JobFolder
from carpool.runtime.executor.job_table import JobTable
from carpool.runtime.job_state.types import Target, WorkerSlot
from carpool.runtime.process.channel import AsyncChannel
from carpool.runtime.process.protocol import Forked, Message

CORE = LocalDevice(0, "cpu:0", "cpu1", (0,))


class Listener:
    """Passes on the facts of a command."""

    def __init__(self, on_facts: Callable[[Sequence[Fact]], None]) -> None:
        self.on_facts = on_facts

    def on_command(self, command: CommandProcess, facts: Sequence[Fact], reports: object) -> None:
        self.on_facts(facts)

    def on_session_message(self, command: CommandProcess, message: Message) -> None:
        pass


async def no_fork(*_: object) -> tuple[AsyncChannel, Forked]:
    raise OSError("there is no fork server")


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (Program(command=("echo", "x" * (1 << 22))), "Argument list too long"),
        (Program(command=("echo",), environment={"A": "\x00"}), "null byte"),
        (Program(command=("echo",), environment={"A=B": "1"}), "illegal environment variable name"),
    ],
)
def test_a_command_that_cannot_be_started_fails_and_leaves_nothing_open(
    tmp_path: Path, program: Program, error: str
) -> None:
    async def run() -> tuple[list[Fact], int]:
        facts: list[Fact] = []
        failed = asyncio.Event()

        def on_facts(new: Sequence[Fact]) -> None:
            facts.extend(new)
            if any(isinstance(fact, JobFailed) for fact in new):
                failed.set()

        folder = JobFolder(tmp_path, "a")
        folder.make(resume=False)
        command = CommandProcess(JobId("a"), program, folder, {0: CORE}, CoreAllocator([0]), 1.0, Listener(on_facts))
        before = num_open()
        command.order(0.0, Target(1, (WorkerSlot(0),)))
        await failed.wait()
        command.close()
        return facts, num_open() - before

    facts, left_open = asyncio.run(run())
    (failure,) = [fact.error for fact in facts if isinstance(fact, JobFailed)]
    assert error in failure
    assert left_open == 0


def test_a_command_that_fails_on_a_full_disk_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[str] = []

    async def run() -> None:
        ended = asyncio.Event()

        def on_facts(new: Sequence[Fact]) -> None:
            failed.extend(fact.error for fact in new if isinstance(fact, JobFailed))
            if failed:
                ended.set()

        folder = JobFolder(tmp_path, "a")
        folder.make(resume=False)
        program = Program(command=("sh", "-c", "exit 1"))
        command = CommandProcess(JobId("a"), program, folder, {0: CORE}, CoreAllocator([0]), 1.0, Listener(on_facts))
        command.order(0.0, Target(1, (WorkerSlot(0),)))
        await ended.wait()
        command.close()

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 20, 1 << 20, 0))
    asyncio.run(run())
    assert failed[0].startswith("the command ended with exit code 1")
    assert f"the disk of {tmp_path / 'jobs' / 'a'} is full" in failed[0]


def printed(folder: Path, program: Program, device: LocalDevice) -> str:
    """The output of a program that runs to its end on a device."""

    async def run() -> None:
        ended = asyncio.Event()

        def on_facts(new: Sequence[Fact]) -> None:
            if any(isinstance(fact, JobFailed | JobFinished) for fact in new):
                ended.set()

        own = JobFolder(folder, "a")
        own.make(resume=False)
        command = CommandProcess(JobId("a"), program, own, {0: device}, CoreAllocator([]), 1.0, Listener(on_facts))
        command.order(0.0, Target(1, (WorkerSlot(0),)))
        await asyncio.wait_for(ended.wait(), 60.0)
        await command.wait()
        command.close()

    asyncio.run(run())
    return (JobFolder(folder, "a").path / "log").read_text(encoding="utf-8").strip()


@pytest.mark.parametrize(("ours", "seen"), [(None, "1"), ("2,3", "3"), ("GPU-a, GPU-b", "GPU-b")])
def test_a_command_sees_its_gpu_under_our_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: str | None, seen: str
) -> None:
    if ours is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ours)
    second = LocalDevice(0, "cuda:1", "H200", (), 1)
    assert printed(tmp_path, Program(command=("sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES"')), second) == seen


@pytest.mark.parametrize(
    ("environment", "seen"),
    [
        ({}, ["2", "2", "2"]),
        ({"OMP_NUM_THREADS": "1"}, ["1", "1", "2"]),
        ({"MKL_NUM_THREADS": "1"}, ["2", "1", "2"]),
        ({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "4"}, ["1", "4", "2"]),
    ],
)
def test_thread_variables_follow_the_one_that_the_job_sets(
    tmp_path: Path, environment: dict[str, str], seen: list[str]
) -> None:
    names = "$OMP_NUM_THREADS $MKL_NUM_THREADS $CARPOOL_THREADS"
    program = Program(command=("sh", "-c", f"echo {names}"), environment=environment)
    assert printed(tmp_path, program, LocalDevice(0, "cpu:0", "cpu2", (0, 1))).split() == seen


def test_progress_is_found_in_the_output_of_the_present_start(tmp_path: Path) -> None:
    script = "i=0; while [ ! -e go ]; do i=$((i+1)); echo step $i/9000 loss 0.5; sleep 0.05; done"
    program = Program(command=("sh", "-c", script), folder=str(tmp_path), progress=r"step (\d+)/(\d+) loss (\S+)")

    async def run() -> list[Fact]:
        facts: list[Fact] = []
        ended = asyncio.Event()

        def on_facts(new: Sequence[Fact]) -> None:
            facts.extend(new)
            if any(isinstance(fact, ProgressReported) for fact in new):
                (tmp_path / "go").touch()
            if any(isinstance(fact, JobFailed | JobFinished) for fact in new):
                ended.set()

        folder = JobFolder(tmp_path, "a")
        folder.make(resume=False)
        os.write(folder.log(), b"step 9000/9000 loss 0.1\n")
        command = CommandProcess(JobId("a"), program, folder, {0: CORE}, CoreAllocator([0]), 1.0, Listener(on_facts))
        command.order(0.0, Target(1, (WorkerSlot(0),)))
        await asyncio.wait_for(ended.wait(), 60.0)
        await command.wait()
        return facts

    facts = asyncio.run(run())
    first, *_ = [fact for fact in facts if isinstance(fact, ProgressReported)]
    assert (first.rate > 0.0, first.loss, first.done < 9000) == (True, 0.5, True)
    assert isinstance(facts[-1], JobFinished)


def test_a_command_without_memory_for_it_beside_another_runs_when_that_has_ended(tmp_path: Path) -> None:
    gpu = LocalDevice(0, "cuda:0", "H200", (), 0)
    greedy = "if [ -e full ]; then echo 'RuntimeError: CUDA out of memory.'; exit 1; fi"
    programs = {"first": "touch full; while [ ! -e go ]; do sleep 0.02; done; rm full", "second": greedy}

    async def run() -> dict[str, Fact]:
        ends: dict[str, Fact] = {}
        news = asyncio.Event()

        def on_facts(new: Sequence[Fact]) -> None:
            ends.update({fact.job: fact for fact in new if isinstance(fact, JobFailed | JobFinished)})
            news.set()

        table = JobTable(tmp_path / "state", {0: gpu}, 1.0)
        listener = Listener(on_facts)
        for name, script in programs.items():
            program = Program(command=("sh", "-c", script), folder=str(tmp_path))
            table.add_command(JobId(name), program, listener, no_fork, lambda slots: {}, resume=False)
        first, second = table.commands.values()
        first.order(0.0, Target(1, (WorkerSlot(0),)))
        async with asyncio.timeout(60.0):
            while not (tmp_path / "full").exists():  # noqa: ASYNC110 - a file tells no one
                await asyncio.sleep(0.01)
            second.order(0.0, Target(1, (WorkerSlot(0),)))
            while not second.state.runs_alone:
                news.clear()
                await news.wait()
            second.tick(1.0)
            assert not second.state.has_processes
            (tmp_path / "go").touch()
            while "first" not in ends:
                news.clear()
                await news.wait()
            second.tick(2.0)
            while "second" not in ends:
                news.clear()
                await news.wait()
        for command in table.commands.values():
            await command.wait()
        return ends

    assert {name: type(fact) for name, fact in asyncio.run(run()).items()} == dict.fromkeys(programs, JobFinished)


def test_a_command_does_not_start_beside_one_that_has_its_gpu_to_itself(tmp_path: Path) -> None:
    gpu = LocalDevice(0, "cuda:0", "H200", (), 0)

    async def run() -> None:
        table = JobTable(tmp_path / "state", {0: gpu}, 1.0)
        listener = Listener(lambda facts: None)
        for name in ("alone", "next"):
            program = Program(command=("sleep", "60"), folder=str(tmp_path))
            table.add_command(JobId(name), program, listener, no_fork, lambda slots: {}, resume=False)
        alone, following = table.commands.values()
        alone.state.runs_alone = True
        alone.order(0.0, Target(1, (WorkerSlot(0),)))
        following.order(0.0, Target(1, (WorkerSlot(0),)))
        assert (alone.state.uses_devices, following.state.uses_devices) == (True, False)
        alone.stop(1.0)
        await alone.wait()
        following.tick(2.0)
        assert following.state.uses_devices
        following.stop(3.0)
        await following.wait()

    asyncio.run(run())
