"""Real workers train every usual kind of code, and a killed one is replaced without a changed bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from carpool.jobs.program import Program
from carpool.runtime.process.protocol import (
    Done,
    Grant,
    Leave,
    Load,
    Loaded,
    Proceed,
    Publish,
    Published,
    Save,
    Saved,
    Stepped,
    TurnRequested,
    WorkerFailed,
)
from carpool.runtime.process.shared_memory import new_memory_file
from carpool.runtime.worker.entry_loader import load_training
from carpool.testing import plain_loop
from tests.support import outsider_trainings

FOLDER = Path(outsider_trainings.__file__).parent
KINDS = ["gpt", "convnet", "hugging_face", "two_optimizers", "gan", "actor_critic", "accumulating", "streaming"]


def program(name: str, **options: Any) -> Program:
    return Program(entry=f"outsider_trainings.py:{name}", folder=str(FOLDER), **options)


def reference(name: str) -> str:
    return plain_loop(load_training(f"outsider_trainings.py:{name}", folder=FOLDER)).digest


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("by", ["mirror", "checkpoint"])
def test_a_killed_worker_is_replaced_without_a_changed_bit(
    bench: Any, run: Any, tmp_path: Path, name: str, by: str
) -> None:
    wanted = program(name)

    async def work() -> Done:
        worker = await bench.worker(wanted, checkpoints=str(tmp_path))
        bench.start_epoch([worker], time_sliced=True)
        assert await worker.receive(TurnRequested) == TurnRequested(0)
        worker.send(Grant(5))
        assert await worker.receive(TurnRequested) == TurnRequested(5)
        mirror, path = new_memory_file("mirror"), ""
        if by == "mirror":
            worker.send(Publish(), mirror)
            assert (await worker.receive(Published)).step == 5
        else:
            worker.send(Save())
            path = (await worker.receive(Saved)).path
        worker.send(Grant(2))
        await worker.receive(TurnRequested)
        bench.forkserver.kill(worker.pid)
        assert await bench.exits[worker.pid] == -signal.SIGKILL
        other = await bench.worker(wanted)
        other.send(Load(path=path), *([] if path else [mirror]))
        assert await other.receive(Loaded) == Loaded(5)
        os.close(mirror)
        bench.start_epoch([other])
        done: Done = await other.receive(Done)
        other.send(Leave())
        return done

    assert run(work()).digest == reference(name)


def test_the_metrics_of_a_step_are_reported(bench: Any, run: Any) -> None:
    async def work() -> tuple[Stepped, Done]:
        worker = await bench.worker(program("gan"))
        bench.start_epoch([worker])
        return await worker.receive(Stepped), await worker.receive(Done)

    first, done = run(work())
    assert set(first.metrics) == set(done.metrics) == {"d_loss"}


def test_a_custom_step_on_two_devices_is_refused(bench: Any, run: Any) -> None:
    async def work() -> WorkerFailed:
        worker = await bench.worker(program("gan"))
        worker.send(Proceed(1, 0, 2))
        failed: WorkerFailed = (await worker.channel.receive()).message
        return failed

    failed = run(work())
    assert failed.kind == "input"
    assert "max_devices = 1" in failed.error


def test_the_length_of_a_stream_is_unknown(bench: Any, run: Any) -> None:
    async def work() -> Any:
        return (await bench.worker(program("streaming"))).ready

    ready = run(work())
    assert (ready.total_steps, ready.num_samples) == (None, 0)
