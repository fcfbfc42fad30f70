"""Workers that meet in other ways: in the middle of a pass, or by messages instead of shared memory."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from carpool.jobs.program import Program
from carpool.runtime.process.protocol import Apply, Contributed, Done, Halt, Halted, Load, Loaded, Publish, Published
from carpool.runtime.process.shared_memory import new_memory_file
from carpool.runtime.state.mirror import read_mirror
from carpool.runtime.worker.entry_loader import load_training
from carpool.testing import plain_loop

MakeProgram = Callable[..., Program]
EXACT = {"exact": True, "shards": 8}
JOINT = {"sync_batchnorm": True}


def training(program: Program) -> Any:
    return load_training(program.entry, program.args, seed=program.seed, folder=Path(program.folder))


def owners(*sizes: int) -> tuple[tuple[int, int], ...]:
    return tuple(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


async def published(worker: Any, mirror: int) -> dict[str, Tensor]:
    """A worker's weights and statistics."""
    worker.send(Publish(), mirror)
    await worker.receive(Published)
    state: dict[str, Tensor] = read_mirror(mirror)[1]["model"]
    return {name: value.clone() for name, value in state.items()}


def test_sync_batchnorm_equals_one_device_also_after_a_resize(bench: Any, run: Any, program: MakeProgram) -> None:
    wanted = program("normalised", options=JOINT)
    mirror = new_memory_file("mirror")

    async def alone() -> dict[str, Tensor]:
        worker = await bench.worker(wanted)
        bench.start_epoch([worker], time_sliced=False)
        await worker.receive(Done)
        return await published(worker, mirror)

    async def cut() -> dict[str, Tensor]:
        workers = await bench.workers(2, wanted)
        said = await bench.drive(workers, bench.start_epoch(workers, parts=(25, 11)), until=3)
        assert said == [Halted(3)] * 2
        await published(workers[1], mirror)
        workers.append(await bench.worker(wanted))
        workers[2].send(Load(), mirror)
        assert await workers[2].receive(Loaded) == Loaded(3)
        done = await bench.drive(workers, bench.start_epoch(workers, parts=(6, 20, 10)))
        assert len({each.digest for each in done}) == 1
        return await published(workers[0], mirror)

    whole, parts = run(alone()), run(cut())
    os.close(mirror)
    for name, expected in whole.items():
        assert float((parts[name] - expected).float().norm() / expected.float().norm()) < 1e-5, name


def test_a_worker_that_waits_for_statistics_handles_messages(bench: Any, run: Any, program: MakeProgram) -> None:
    wanted = program("normalised", options=JOINT)

    async def work() -> Halted:
        workers = await bench.workers(2, wanted)
        os.kill(workers[1].pid, signal.SIGSTOP)
        bench.start_epoch(workers, parts=(20, 16))
        workers[0].send(Halt())
        halted: Halted = await workers[0].receive(Halted)
        os.kill(workers[1].pid, signal.SIGKILL)
        bench.start_epoch(workers[:1])
        assert isinstance(await workers[0].receive(Done), Done)
        return halted

    assert run(work()) == Halted(0)


def test_a_process_group_gives_the_same_bits(bench: Any, run: Any, program: MakeProgram) -> None:
    wanted = program(options=EXACT)

    async def work() -> list[Any]:
        workers = await bench.workers(2, wanted)
        first = bench.start_epoch(workers, owners(3, 5), reducer="group")
        assert await bench.drive(workers, first, until=4) == [Halted(4)] * 2
        last: list[Any] = await bench.drive(workers, bench.start_epoch(workers, owners(6, 2), reducer="group"))
        return last

    assert {done.digest for done in run(work())} == {plain_loop(training(wanted), shards=8).digest}


def test_a_rank_that_dies_during_a_reduction_ends_the_epoch(bench: Any, run: Any, program: MakeProgram) -> None:
    wanted = program(options=EXACT)

    async def work() -> Done:
        workers = await bench.workers(2, wanted)
        epoch = bench.start_epoch(workers, owners(4, 4), reducer="group")
        for worker in workers:
            await worker.receive(Contributed)
        os.kill(workers[1].pid, signal.SIGKILL)
        workers[0].send(Apply(epoch, 0))
        workers[0].send(Halt())
        halted: Halted = await workers[0].receive(Halted)
        assert halted.step in (0, 1), "the reduction may have ended before the kill"
        bench.start_epoch(workers[:1])
        done: Done = await workers[0].receive(Done)
        return done

    assert run(work()).digest == plain_loop(training(wanted), shards=8).digest
