"""Every way a worker can break is told as what it is, and what can be tried again can be tried again."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from carpool.jobs.program import Program
from carpool.runtime.process.protocol import Done, Load, Publish, Save, Saved, WorkerFailed
from carpool.runtime.process.shared_memory import new_memory_file
from carpool.runtime.process.worker_main import TORN
from carpool.runtime.worker.entry_loader import load_training
from carpool.testing import plain_loop

HERE = Path(__file__).parent
MakeProgram = Callable[..., Program]


def faulty(kind: str, step: int, once: Path | None = None) -> dict[str, Any]:
    fault = {"job": "job", "step": step, "kind": kind, "once": str(once) if once else ""}
    return {"environment": {"CARPOOL_FAULTS": json.dumps([fault])}}


def plain(program: Program) -> str:
    return plain_loop(load_training(program.entry, program.args, folder=Path(program.folder))).digest


@pytest.mark.parametrize("how", ["nan", "error", "exit"])
def test_what_the_users_code_does_wrong_is_told_with_its_line(
    bench: Any, run: Any, program: MakeProgram, how: str
) -> None:
    async def work() -> WorkerFailed:
        hand = await bench.worker(program(breaks=how))
        bench.form([hand])
        return await hand.hear(WorkerFailed)  # type: ignore[no-any-return]

    broke = run(work())
    assert (broke.kind, broke.step) == ("diverged" if how == "nan" else "user", 3)
    lines = (HERE / "jobs.py").read_text(encoding="utf-8").splitlines()
    if how == "nan":
        assert broke.error.startswith("step 4, epoch 2: the loss is nan")
    elif how == "error":
        line = next(number for number, text in enumerate(lines, 1) if "found by its line" in text)
        assert broke.error == f"ValueError: the moon is full (jobs.py, line {line})"
    else:
        assert broke.error.startswith("SystemExit: enough (jobs.py, line ")


def test_a_step_that_ran_out_of_memory_can_be_tried_again(
    bench: Any, run: Any, program: MakeProgram, tmp_path: Path
) -> None:
    wanted = program(options=faulty("memory", 4, tmp_path / "mark"))

    async def work() -> tuple[WorkerFailed, Done]:
        hand = await bench.worker(wanted)
        bench.form([hand])
        broke = await hand.hear(WorkerFailed)
        bench.form([hand])
        return broke, await hand.hear(Done)

    broke, done = run(work())
    assert (broke.kind, broke.step, broke.samples) == ("memory", 4, 36)
    assert "MemoryError" in broke.error
    assert done.digest == plain(wanted)


def test_a_full_disk_does_not_end_the_training(bench: Any, run: Any, program: MakeProgram, tmp_path: Path) -> None:
    wanted = program(options=faulty("disk", 0, tmp_path / "mark"))

    async def work() -> tuple[WorkerFailed, Saved, Done]:
        hand = await bench.worker(wanted, checkpoints=str(tmp_path / "kept"))
        hand.say(Save())
        broke = await hand.hear(WorkerFailed)
        hand.say(Save())
        saved = await hand.hear(Saved)
        bench.form([hand])
        return broke, saved, await hand.hear(Done)

    broke, saved, done = run(work())
    assert broke.kind == "disk"
    assert "No space left on device" in broke.error
    assert Path(saved.path).exists()
    assert done.digest == plain(wanted)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("refuses", "jobs.py:refuses: raised LookupError: no data today (jobs.py, line "),
        ("mpl", "unknown function 'mpl'"),
    ],
)
def test_an_entry_that_cannot_be_loaded_is_bad_input(
    bench: Any, run: Any, program: MakeProgram, name: str, words: str
) -> None:
    async def work() -> WorkerFailed:
        hand = await bench.begun(program(name))
        return await hand.hear(WorkerFailed)  # type: ignore[no-any-return]

    broke = run(work())
    assert broke.kind == "input"
    assert words in broke.error


def test_a_cut_that_leaves_too_few_samples_is_bad_input(bench: Any, run: Any, program: MakeProgram) -> None:
    async def work() -> tuple[WorkerFailed, WorkerFailed]:
        hand = await bench.begun(program(options={"exact": True, "batch_size": 10}))
        other = await bench.worker(program())
        bench.form([other], batch_size=101)
        return await hand.hear(WorkerFailed), await other.hear(WorkerFailed)

    first, second = run(work())
    assert (first.kind, second.kind) == ("input", "input")
    assert "BatchNorm" in first.error
    assert "batch size 101" in second.error


def test_a_state_that_cannot_be_read_is_told_and_another_can_be_loaded(
    bench: Any, run: Any, program: MakeProgram, tmp_path: Path
) -> None:
    wanted = program()

    async def work() -> tuple[WorkerFailed, Done]:
        hand = await bench.worker(wanted, checkpoints=str(tmp_path))
        hand.say(Load(str(tmp_path / "none.ckpt")))
        broke = await hand.hear(WorkerFailed)
        hand.say(Save())
        saved = await hand.hear(Saved)
        hand.say(Load(saved.path))
        bench.form([hand])
        return broke, await hand.hear(Done)

    broke, done = run(work())
    assert broke.kind == "input"
    assert "none.ckpt" in broke.error
    assert done.digest == plain(wanted)


def test_a_mirror_that_cannot_be_written_is_told(bench: Any, run: Any, program: MakeProgram) -> None:
    async def work() -> WorkerFailed:
        hand = await bench.worker(program())
        with (HERE / "jobs.py").open("rb") as read_only:
            hand.say(Publish(), read_only.fileno())
            return await hand.hear(WorkerFailed)  # type: ignore[no-any-return]

    broke = run(work())
    assert (broke.kind, broke.step) == ("disk", 0)
    assert "Bad file descriptor" in broke.error


@pytest.mark.parametrize("where", ["entry", "load", "save", "evaluate"])
def test_a_gpu_that_fails_is_not_taken_for_a_fault_of_the_users(
    bench: Any, run: Any, program: MakeProgram, where: str
) -> None:
    async def work() -> tuple[WorkerFailed, int]:
        hand = await bench.begun(program("loses_its_gpu", where=where))
        if where == "evaluate":
            bench.form([hand])
        mirror = new_memory_file("test")
        if where in {"load", "save"}:
            hand.say(Publish(), mirror)
        if where == "load":
            hand.say(Load(), mirror)
        os.close(mirror)
        return await hand.hear(WorkerFailed), await bench.exits[hand.pid]

    broke, code = run(work())
    assert (broke.kind, broke.error, code) == ("device", "CUDA error: unspecified launch failure", TORN)


def test_memory_running_out_in_an_update_ends_the_worker(bench: Any, run: Any, program: MakeProgram) -> None:
    async def work() -> tuple[WorkerFailed, int]:
        hand = await bench.worker(program("greedy"))
        bench.form([hand])
        return await hand.hear(WorkerFailed), await bench.exits[hand.pid]

    broke, code = run(work())
    assert (broke.kind, code) == ("memory", TORN)


def test_a_crash_of_the_process_is_reported_and_harms_nobody_else(bench: Any, run: Any, program: MakeProgram) -> None:
    async def work() -> tuple[int, Done]:
        other = await bench.worker(program())
        hand = await bench.begun(program("crashes"))
        code = await bench.exits[hand.pid]
        bench.form([other])
        return code, await other.hear(Done)

    code, done = run(work())
    assert code == -signal.SIGSEGV
    assert done.digest == plain(program())
