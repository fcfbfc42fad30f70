# ruff: noqa: ASYNC240 - a test may block on files
"""A prewarmed process does what a new one does."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from carpool.jobs.devices import LocalDevice
from carpool.jobs.program import Program
from carpool.runtime.process.protocol import Alive, Begin, Done, Leave, Message, Prewarm, Prewarmed, Proceed, Ready
from carpool.runtime.process.shared_memory import new_step_counter, read_step_counter
from carpool.runtime.process.warm_pool import WarmPool
from carpool.runtime.process.worker_pool import WorkerKey, WorkerPool
from carpool.runtime.worker.entry_loader import load_training
from carpool.testing import plain_loop

HERE = Path(__file__).parent
MakeProgram = Callable[..., Program]


def digest_of(program: Program) -> str:
    return plain_loop(load_training(program.entry, program.args, seed=program.seed, folder=HERE)).digest


def test_a_warm_process_learns_what_a_new_one_learns(bench: Any, run: Any, program: MakeProgram) -> None:
    core = min(os.sched_getaffinity(0))

    async def work() -> tuple[Prewarmed, Done, set[int], str, str]:
        worker = await bench.fork()
        worker.send(Prewarm("cpu", (core,), environment={"LANE": "40"}))
        warmed = await worker.receive(Prewarmed)
        log = os.open(bench.folder / "warm", os.O_CREAT | os.O_WRONLY)
        begin = Begin("job", asdict(program("mlp")), "cpu", (core,), environment={"LANE": "40"})
        worker.send(begin, log)
        os.close(log)
        worker.ready = await worker.receive(Ready)
        name = Path(f"/proc/{worker.pid}/comm").read_text(encoding="utf-8").strip()
        target = str(Path(f"/proc/{worker.pid}/fd/1").readlink())
        bench.start_epoch([worker])
        return warmed, await worker.receive(Done), os.sched_getaffinity(worker.pid), name, target

    warmed, done, cores, name, log = run(work())
    assert warmed.seconds > 0.0
    assert done.digest == digest_of(program("mlp"))
    assert (cores, name, log) == ({core}, "carpool:job", str(bench.folder / "warm"))


def test_a_prewarmed_process_exits_on_request(bench: Any, run: Any) -> None:
    async def work() -> int:
        worker = await bench.fork()
        worker.send(Prewarm("cpu"))
        await worker.receive(Prewarmed)
        worker.send(Leave())
        code: int = await bench.exits[worker.pid]
        return code

    assert run(work()) == 0


class Listener:
    """Queues messages and exits of processes."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[tuple[WorkerKey, Message]] = asyncio.Queue()
        self.exits: asyncio.Queue[WorkerKey] = asyncio.Queue()

    def on_message(self, key: WorkerKey, message: Message) -> None:
        if not isinstance(message, Alive):
            self.messages.put_nowait((key, message))

    def on_exit(self, key: WorkerKey, why: str) -> None:
        self.exits.put_nowait(key)

    async def until(self, kind: type[Message]) -> tuple[WorkerKey, Any]:
        while True:
            key, message = await self.messages.get()
            if isinstance(message, kind):
                return key, message


def test_a_job_runs_in_a_prewarmed_process(run: Any, program: MakeProgram, tmp_path: Path) -> None:
    now = 0.0

    async def work() -> tuple[str, bool, str, int, list[WorkerKey]]:
        nonlocal now
        listener = Listener()
        pool = WorkerPool(listener, lambda: now)
        await pool.start()
        device = LocalDevice(0, "cpu:0", "cpu1", (min(os.sched_getaffinity(0)),))
        warm = WarmPool(pool, {0: device}, 1, lambda device, lane: {}, lambda device: True, lambda: now)
        now += 2.0
        warm.tick()
        prewarmed, message = await listener.until(Prewarmed)
        warm.on_message(prewarmed, message)
        pid = pool._processes[prewarmed].pid
        log, counter = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY), new_step_counter("job")
        begin = Begin("job", asdict(program("mlp")), "cpu", device.cores)
        taken = warm.take(("job", 1), 0, 100, begin)
        assert taken is not None
        pool.assign(taken[0], ("job", 1), begin, log, counter)
        key, _ = await listener.until(Ready)
        is_same = pool._processes[key].pid == pid
        pool.send(key, Proceed(1))
        _, done = await listener.until(Done)
        steps = read_step_counter(counter)
        pool.kill(key)
        ended = [await listener.exits.get()]
        await pool.stop()
        for fd in (log, counter):
            os.close(fd)
        return taken[1], is_same, done.digest, steps, ended

    note, is_same, digest, steps, ended = run(work())
    assert "cpu:0" in note
    assert "skipped" not in note
    assert is_same
    assert digest == digest_of(program("mlp"))
    assert steps > 0
    assert ended == [("job", 1)]
