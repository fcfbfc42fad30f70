# ruff: noqa: ASYNC240 - a test may look at files while nothing else goes on
"""A process that was warmed up ahead of its job does what a new one does, and has nothing of its own left over."""

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
from carpool.runtime.process.shared_memory import counted, new_counter
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
        hand = await bench.hand()
        hand.say(Prewarm("cpu", (core,), environment={"LANE": "40"}))
        warmed = await hand.hear(Prewarmed)
        log = os.open(bench.folder / "warm", os.O_CREAT | os.O_WRONLY)
        begin = Begin("job", asdict(program("mlp")), "cpu", (core,), environment={"LANE": "40"})
        hand.say(begin, log)
        os.close(log)
        hand.ready = await hand.hear(Ready)
        name = Path(f"/proc/{hand.pid}/comm").read_text(encoding="utf-8").strip()
        target = str(Path(f"/proc/{hand.pid}/fd/1").readlink())
        bench.form([hand])
        return warmed, await hand.hear(Done), os.sched_getaffinity(hand.pid), name, target

    warmed, done, cores, name, log = run(work())
    assert warmed.seconds > 0.0
    assert done.digest == digest_of(program("mlp"))
    assert (cores, name, log) == ({core}, "carpool:job", str(bench.folder / "warm"))


def test_a_seat_that_is_not_needed_leaves(bench: Any, run: Any) -> None:
    async def work() -> int:
        hand = await bench.hand()
        hand.say(Prewarm("cpu"))
        await hand.hear(Prewarmed)
        hand.say(Leave())
        code: int = await bench.exits[hand.pid]
        return code

    assert run(work()) == 0


class Ears:
    """Hears what processes say, and lets a test wait for it."""

    def __init__(self) -> None:
        self.heard_of: asyncio.Queue[tuple[WorkerKey, Message]] = asyncio.Queue()
        self.ends: asyncio.Queue[WorkerKey] = asyncio.Queue()

    def heard(self, who: WorkerKey, message: Message) -> None:
        if not isinstance(message, Alive):
            self.heard_of.put_nowait((who, message))

    def ended(self, who: WorkerKey, why: str) -> None:
        self.ends.put_nowait(who)

    async def until(self, kind: type[Message]) -> tuple[WorkerKey, Any]:
        while True:
            who, message = await self.heard_of.get()
            if isinstance(message, kind):
                return who, message


def test_a_job_takes_over_the_process_that_waited_for_it(run: Any, program: MakeProgram, tmp_path: Path) -> None:
    now = 0.0

    async def work() -> tuple[str, bool, str, int, list[WorkerKey]]:
        nonlocal now
        ears = Ears()
        staff = WorkerPool(ears, lambda: now)
        await staff.start()
        device = LocalDevice(0, "cpu:0", "cpu1", (min(os.sched_getaffinity(0)),))
        pool = WarmPool(staff, {0: device}, 1, lambda device, lane: {}, lambda device: True, lambda: now)
        now += 2.0
        pool.tick()
        seat, warmed = await ears.until(Prewarmed)
        pool.heard(seat, warmed)
        pid = staff._processes[seat].pid
        log, counter = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY), new_counter("job")
        begin = Begin("job", asdict(program("mlp")), "cpu", device.cores)
        words = pool.begin(("job", 1), 0, 100, begin, log, counter)
        who, _ = await ears.until(Ready)
        is_same = staff._processes[who].pid == pid
        staff.send(who, Proceed(1))
        _, done = await ears.until(Done)
        steps = counted(counter)
        staff.kill(who)
        ended = [await ears.ends.get()]
        await staff.stop()
        for fd in (log, counter):
            os.close(fd)
        return words, is_same, done.digest, steps, ended

    words, is_same, digest, steps, ended = run(work())
    assert words.startswith("started in a process that was kept warm on cpu:0, which took ")
    assert "without" not in words
    assert is_same
    assert digest == digest_of(program("mlp"))
    assert steps > 0
    assert ended == [("job", 1)]
