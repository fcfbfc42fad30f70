"""A command sees the GPUs it was given; one that cannot be started fails with the reason, and leaves nothing open."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from carpool.core.messages import Fact, JobFailed, JobFinished
from carpool.core.model import JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.host import CoreAllocator
from carpool.jobs.program import Program
from carpool.runtime.executor.command_process import CommandProcess
from carpool.runtime.executor.job_folder import JobFolder
from carpool.runtime.job_state.types import Target, WorkerSlot

CORE = LocalDevice(0, "cpu:0", "cpu1", (0,))


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (Program(command=("echo", "x" * (1 << 22))), "Argument list too long"),
        (Program(command=("echo",), environment={"A": "\x00"}), "null byte"),
        (Program(command=("echo",), environment={"A=B": "1"}), "illegal environment variable name"),
    ],
)
def test_what_cannot_be_started_fails_and_leaves_nothing_open(tmp_path: Path, program: Program, words: str) -> None:
    async def play() -> tuple[list[Fact], int]:
        facts: list[Fact] = []
        failed = asyncio.Event()

        def tell(command: CommandProcess, said: Sequence[Fact], reports: object) -> None:
            facts.extend(said)
            if any(isinstance(fact, JobFailed) for fact in said):
                failed.set()

        folder = JobFolder(tmp_path, "a")
        folder.make(resume=False)
        command = CommandProcess(
            JobId("a"), program, folder, {0: CORE}, CoreAllocator([0]), 1.0, tell, lambda command, message: None
        )
        before = num_open()
        command.order(0.0, Target(1, (WorkerSlot(0),)))
        await failed.wait()
        command.close()
        return facts, num_open() - before

    facts, left_open = asyncio.run(play())
    (error,) = [fact.error for fact in facts if isinstance(fact, JobFailed)]
    assert "the command could not be started" in error
    assert words in error
    assert left_open == 0


@pytest.mark.parametrize(("ours", "seen"), [(None, "1"), ("2,3", "3"), ("GPU-a, GPU-b", "GPU-b")])
def test_it_sees_its_gpu_by_the_name_that_we_see_it_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: str | None, seen: str
) -> None:
    if ours is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ours)
    second = LocalDevice(0, "cuda:1", "H200", (), 1)
    program = Program(command=("sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES" > seen'), folder=str(tmp_path))

    async def play() -> None:
        ended = asyncio.Event()

        def tell(command: CommandProcess, said: Sequence[Fact], reports: object) -> None:
            if any(isinstance(fact, JobFailed | JobFinished) for fact in said):
                ended.set()

        folder = JobFolder(tmp_path, "a")
        folder.make(resume=False)
        command = CommandProcess(
            JobId("a"), program, folder, {0: second}, CoreAllocator([]), 1.0, tell, lambda command, message: None
        )
        command.order(0.0, Target(1, (WorkerSlot(0),)))
        await asyncio.wait_for(ended.wait(), 60.0)
        await command.gone()
        command.close()

    asyncio.run(play())
    assert (tmp_path / "seen").read_text(encoding="utf-8").strip() == seen
