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
from carpool.runtime.process.protocol import Done, Halt, Halted, Load, Noted, Publish, Save, Saved, WorkerFailed
from carpool.runtime.process.shared_memory import boot_clock, limit_worker, new_memory_file, new_step_counter
from carpool.runtime.process.worker_main import STATE_LOST
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
def test_errors_of_user_code_are_reported_with_their_line(bench: Any, run: Any, program: MakeProgram, how: str) -> None:
    async def work() -> WorkerFailed:
        worker = await bench.worker(program(breaks=how))
        bench.start_epoch([worker])
        return await worker.receive(WorkerFailed)  # type: ignore[no-any-return]

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


def test_a_step_out_of_memory_can_be_retried(bench: Any, run: Any, program: MakeProgram, tmp_path: Path) -> None:
    wanted = program(options=faulty("memory", 4, tmp_path / "mark"))

    async def work() -> tuple[WorkerFailed, Done]:
        worker = await bench.worker(wanted)
        bench.start_epoch([worker])
        broke = await worker.receive(WorkerFailed)
        bench.start_epoch([worker])
        return broke, await worker.receive(Done)

    broke, done = run(work())
    assert (broke.kind, broke.step, broke.samples) == ("memory", 4, 36)
    assert "MemoryError" in broke.error
    assert done.digest == plain(wanted)


def test_a_full_disk_does_not_end_the_training(bench: Any, run: Any, program: MakeProgram, tmp_path: Path) -> None:
    wanted = program(options=faulty("disk", 0, tmp_path / "mark"))

    async def work() -> tuple[WorkerFailed, Saved, Done]:
        worker = await bench.worker(wanted, checkpoints=str(tmp_path / "kept"))
        worker.send(Save())
        broke = await worker.receive(WorkerFailed)
        worker.send(Save())
        saved = await worker.receive(Saved)
        bench.start_epoch([worker])
        return broke, saved, await worker.receive(Done)

    broke, saved, done = run(work())
    assert broke.kind == "disk"
    assert "No space left on device" in broke.error
    assert Path(saved.path).exists()
    assert done.digest == plain(wanted)


def test_a_training_is_done_only_when_its_final_state_is_on_disk(
    bench: Any, run: Any, program: MakeProgram, tmp_path: Path
) -> None:
    kept, wanted = tmp_path / "kept", program()
    kept.write_text("no folder can be made here", encoding="utf-8")

    async def work() -> tuple[WorkerFailed, Done]:
        worker = await bench.worker(wanted, checkpoints=str(kept))
        bench.start_epoch([worker])
        broke = await worker.receive(WorkerFailed)
        await worker.receive(Noted)
        worker.send(Save())
        await worker.receive(WorkerFailed)
        kept.unlink()
        return broke, await worker.receive(Done)

    broke, done = run(work())
    assert broke.kind == "disk"
    assert done.digest == plain(wanted)
    assert [path.name for path in kept.iterdir()] == [f"step-{done.step:09d}.ckpt"]


def test_a_worker_saves_nothing_while_another_machine_may_run_its_job(
    bench: Any, run: Any, program: MakeProgram, tmp_path: Path
) -> None:
    kept, counter = tmp_path / "kept", new_step_counter("job")
    limit_worker(counter, 0.0, boot_clock() - 1.0)

    async def work() -> tuple[list[WorkerFailed], list[str], Done]:
        worker = await bench.worker(program(), counter, checkpoints=str(kept))
        worker.send(Save())
        broke = [await worker.receive(WorkerFailed)]
        bench.start_epoch([worker])  # to the end, whose state it may not save, either
        broke.append(await worker.receive(WorkerFailed))
        names = [path.name for path in kept.iterdir()]
        limit_worker(counter, 0.0, boot_clock() + 1000.0)
        return broke, names, await worker.receive(Done)

    broke, names, done = run(work())
    os.close(counter)
    assert [(each.kind, "lease" in each.error) for each in broke] == [("disk", True)] * 2
    assert names == []
    assert [path.name for path in kept.iterdir()] == [f"step-{done.step:09d}.ckpt"]


def test_a_training_without_room_for_its_final_state_can_be_halted_and_continued(
    bench: Any, run: Any, program: MakeProgram, tmp_path: Path
) -> None:
    kept, wanted = tmp_path / "kept", program()
    kept.write_text("no folder can be made here", encoding="utf-8")

    async def work() -> tuple[Halted, Done]:
        worker = await bench.worker(wanted, checkpoints=str(kept))
        bench.start_epoch([worker])
        await worker.receive(WorkerFailed)
        worker.send(Halt())
        halted = await worker.receive(Halted)
        kept.unlink()
        bench.start_epoch([worker])
        return halted, await worker.receive(Done)

    halted, done = run(work())
    assert halted.step == done.step
    assert done.digest == plain(wanted)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("refuses", "jobs.py:refuses: raised LookupError: no data today (jobs.py, line "),
        ("mpl", "unknown function 'mpl'"),
        ("has_no_state", "LookupError: no state today (jobs.py, line "),
    ],
)
def test_an_entry_that_cannot_be_loaded_is_bad_input(
    bench: Any, run: Any, program: MakeProgram, name: str, error: str
) -> None:
    async def work() -> WorkerFailed:
        worker = await bench.begun(program(name))
        return await worker.receive(WorkerFailed)  # type: ignore[no-any-return]

    broke = run(work())
    assert broke.kind == "input"
    assert error in broke.error


def test_a_split_with_too_few_samples_is_bad_input(bench: Any, run: Any, program: MakeProgram) -> None:
    async def work() -> tuple[WorkerFailed, WorkerFailed]:
        worker = await bench.begun(program(options={"exact": True, "batch_size": 10}))
        other = await bench.worker(program())
        bench.start_epoch([other], batch_size=101)
        return await worker.receive(WorkerFailed), await other.receive(WorkerFailed)

    first, second = run(work())
    assert (first.kind, second.kind) == ("input", "input")
    assert "BatchNorm" in first.error
    assert "batch size 101" in second.error


def test_an_unreadable_state_is_reported_and_another_can_be_loaded(
    bench: Any, run: Any, program: MakeProgram, tmp_path: Path
) -> None:
    wanted = program()

    async def work() -> tuple[WorkerFailed, Done]:
        worker = await bench.worker(wanted, checkpoints=str(tmp_path))
        worker.send(Load(str(tmp_path / "none.ckpt")))
        broke = await worker.receive(WorkerFailed)
        worker.send(Save())
        saved = await worker.receive(Saved)
        worker.send(Load(saved.path))
        bench.start_epoch([worker])
        return broke, await worker.receive(Done)

    broke, done = run(work())
    assert broke.kind == "input"
    assert "none.ckpt" in broke.error
    assert done.digest == plain(wanted)


def test_a_mirror_that_cannot_be_written_is_reported(bench: Any, run: Any, program: MakeProgram) -> None:
    async def work() -> WorkerFailed:
        worker = await bench.worker(program())
        with (HERE / "jobs.py").open("rb") as read_only:
            worker.send(Publish(), read_only.fileno())
            return await worker.receive(WorkerFailed)  # type: ignore[no-any-return]

    broke = run(work())
    assert (broke.kind, broke.step) == ("disk", 0)
    assert "Bad file descriptor" in broke.error


@pytest.mark.parametrize("where", ["entry", "load", "save", "evaluate"])
def test_a_gpu_fault_is_not_a_user_error(bench: Any, run: Any, program: MakeProgram, where: str) -> None:
    async def work() -> tuple[WorkerFailed, int]:
        worker = await bench.begun(program("loses_its_gpu", where=where))
        if where == "evaluate":
            bench.start_epoch([worker])
        mirror = new_memory_file("test")
        if where in {"load", "save"}:
            worker.send(Publish(), mirror)
        if where == "load":
            worker.send(Load(), mirror)
        os.close(mirror)
        return await worker.receive(WorkerFailed), await bench.exits[worker.pid]

    broke, code = run(work())
    assert (broke.kind, broke.error, code) == ("device", "CUDA error: unspecified launch failure", STATE_LOST)


def test_out_of_memory_in_an_update_ends_the_worker(bench: Any, run: Any, program: MakeProgram) -> None:
    async def work() -> tuple[WorkerFailed, int]:
        worker = await bench.worker(program("greedy"))
        bench.start_epoch([worker])
        return await worker.receive(WorkerFailed), await bench.exits[worker.pid]

    broke, code = run(work())
    assert (broke.kind, code) == ("memory", STATE_LOST)


def test_a_crash_is_reported_and_does_not_affect_other_workers(bench: Any, run: Any, program: MakeProgram) -> None:
    async def work() -> tuple[int, Done]:
        other = await bench.worker(program())
        worker = await bench.begun(program("crashes"))
        code = await bench.exits[worker.pid]
        bench.start_epoch([other])
        return code, await other.receive(Done)

    code, done = run(work())
    assert code == -signal.SIGSEGV
    assert done.digest == plain(program())
