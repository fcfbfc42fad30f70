"""Workers learn what an ordinary loop learns, whoever works with whom and whatever happens to them."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from carpool.jobs.program import Program
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.job_state.update_sharding import proportional_ranges
from carpool.runtime.process.protocol import (
    Apply,
    Contributed,
    Done,
    Evaluated,
    Grant,
    Halt,
    Halted,
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
    Updated,
)
from carpool.runtime.process.shared_memory import new_memory_file
from carpool.runtime.process.worker_main import STATE_LOST
from carpool.runtime.state.checkpoint import Checkpoints
from carpool.runtime.state.digest import digest
from carpool.runtime.worker.entry_loader import load_training
from carpool.testing import plain_loop

EXACT = {"exact": True, "shards": 8}
MakeProgram = Callable[..., Program]


def training(program: Program) -> Any:
    return load_training(program.entry, program.args, seed=program.seed, folder=Path(program.folder))


def owners(*sizes: int) -> tuple[tuple[int, int], ...]:
    return tuple(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


def plain(program: Program) -> str:
    return plain_loop(training(program), shards=program.shards if program.exact else None).digest


def digests(said: list[Any]) -> set[str]:
    assert all(isinstance(each, Done) for each in said), said
    return {each.digest for each in said}


def test_a_single_worker_learns_what_a_plain_loop_learns(
    bench: Any, run: Any, program: MakeProgram, tmp_path: Path
) -> None:
    wanted = program(evaluated=True, options={"keep": 1})

    async def work() -> tuple[Done, Stepped, list[Any]]:
        worker = await bench.worker(wanted, checkpoints=str(tmp_path))
        assert worker.ready.total_steps == 12
        assert worker.ready.sizes == (96, 16, 16, 16, 48, 3)
        bench.start_epoch([worker])
        first = await worker.receive(Stepped)
        return await worker.receive(Done), first, worker.others

    done, first, others = run(work())
    reference = plain_loop(training(wanted))
    assert (done.digest, done.step, done.reason) == (reference.digest, 12, "reached 12 steps")
    assert (done.loss, done.metrics) == (reference.losses[-1], reference.metrics)
    assert (first.step, first.loss) == (1, reference.losses[0])
    assert [each.step for each in others if isinstance(each, Evaluated)] == [3, 6, 9, 12]
    kept = Checkpoints(tmp_path)
    found = kept.latest()
    assert found is not None
    again = Trainer(training(wanted))
    again.load_state_dict(found.state)
    assert digest(again.training.model) == done.digest
    assert again.progress.best is not None
    assert kept.best is not None


@pytest.mark.parametrize("owned", [owners(8), owners(3, 5), owners(5, 0, 3)], ids=str)
def test_exact_ranks_give_the_bits_of_the_plain_loop(bench: Any, run: Any, program: MakeProgram, owned: Any) -> None:
    wanted = program(evaluated=True, options=EXACT)

    async def work() -> list[Any]:
        workers = await bench.workers(len(owned), wanted)
        said: list[Any] = await bench.drive(workers, bench.start_epoch(workers, owned))
        return said

    assert digests(run(work())) == {plain(wanted)}


def test_default_mode_parts_equal_those_of_one_process(bench: Any, run: Any, program: MakeProgram) -> None:
    wanted = program()

    async def work() -> list[Any]:
        workers = await bench.workers(2, wanted)
        said: list[Any] = await bench.drive(workers, bench.start_epoch(workers, parts=(20, 16)))
        return said

    trainer = Trainer(training(wanted))
    while not trainer.stop_reason:
        trainer.step((20, 16))
    assert digests(run(work())) == {digest(trainer.training.model)}


def test_epochs_may_change_at_any_step(bench: Any, run: Any, program: MakeProgram) -> None:
    wanted = program(steps=20, evaluated=True, options=EXACT)
    chance = random.Random(3)

    async def work() -> list[Any]:
        workers = await bench.workers(3, wanted)
        step = 0
        while step < 16:
            edges = sorted(chance.choices(range(9), k=2))
            epoch = bench.start_epoch(workers, owners(*[b - a for a, b in itertools.pairwise([0, *edges, 8])]))
            if chance.random() < 0.5:  # given up in the middle of a step
                for worker in workers:
                    assert (await bench.answer(worker, workers)).step == step
                continue
            step += chance.randint(1, 3)
            said = await bench.drive(workers, epoch, until=step)
            assert said == [Halted(step)] * 3
        chance.shuffle(workers)
        last: list[Any] = await bench.drive(workers, bench.start_epoch(workers, owners(2, 5, 1)))
        return last

    assert digests(run(work())) == {plain(wanted)}


def test_the_others_continue_after_a_kill_in_the_middle_of_a_step(
    bench: Any, run: Any, program: MakeProgram, tmp_path: Path
) -> None:
    fault = f'[{{"job": "job", "step": 5, "kind": "kill", "rank": 1, "once": "{tmp_path / "mark"}"}}]'
    wanted = program(options=EXACT | {"environment": {"CARPOOL_FAULTS": fault}})

    async def work() -> list[Any]:
        workers = await bench.workers(3, wanted)
        epoch = bench.start_epoch(workers, owners(3, 3, 2))
        for step in range(5):
            for worker in workers:
                assert (await worker.receive(Contributed)).step == step
            for worker in workers:
                worker.send(Apply(epoch, step))
        assert await bench.exits[workers[1].pid] == -signal.SIGKILL
        survivors = [workers[2], workers[0]]
        newcomer = await bench.worker(wanted)
        epoch = bench.start_epoch(survivors, owners(6, 2))
        for worker in survivors:
            assert (await worker.receive(Contributed)).step == 5  # of the step that was given up, or of the retried one
        mirror = new_memory_file("mirror")
        for worker in survivors:
            worker.send(Halt())
            assert await worker.receive(Halted) == Halted(5)
        survivors[0].send(Publish(), mirror)
        await survivors[0].receive(Published)
        newcomer.send(Load(), mirror)
        assert await newcomer.receive(Loaded) == Loaded(5)
        os.close(mirror)
        crew = [newcomer, *survivors]
        last: list[Any] = await bench.drive(crew, bench.start_epoch(crew, owners(1, 2, 5)))
        return last

    assert digests(run(work())) == {plain(wanted)}


def test_a_new_worker_continues_from_the_mirror_of_a_dead_one(bench: Any, run: Any, program: MakeProgram) -> None:
    wanted = program(steps=30)

    async def work() -> list[Any]:
        worker = await bench.worker(wanted)
        mirror = new_memory_file("mirror")
        bench.start_epoch([worker], time_sliced=True)
        for step in (0, 4):
            assert await worker.receive(TurnRequested) == TurnRequested(step)
            worker.send(Grant(4))
        await worker.receive(TurnRequested)
        for _ in range(2):
            worker.send(Publish(), mirror)
            assert (await worker.receive(Published)).step == 8
        bench.forkserver.kill(worker.pid)
        assert await bench.exits[worker.pid] == -signal.SIGKILL
        heir = await bench.worker(wanted)
        heir.send(Load(), mirror)
        assert await heir.receive(Loaded) == Loaded(8)
        os.close(mirror)
        bench.start_epoch([heir])
        return [await heir.receive(Done)]

    assert digests(run(work())) == {plain(wanted)}


def test_a_halted_worker_publishes_saves_and_continues(
    bench: Any, run: Any, program: MakeProgram, tmp_path: Path
) -> None:
    wanted = program(steps=4000)

    async def work() -> tuple[Halted, Saved, Halted]:
        worker, other = await bench.workers(2, wanted, checkpoints=str(tmp_path))
        bench.start_epoch([worker])
        await worker.receive(Stepped)
        worker.send(Halt())
        halted = await worker.receive(Halted)
        worker.send(Save())
        saved = await worker.receive(Saved)
        other.send(Load(saved.path))
        await other.receive(Loaded)
        other.send(Halt())
        return halted, saved, await other.receive(Halted)

    halted, saved, other = run(work())
    assert halted.step == saved.step == other.step > 0


def test_time_sliced_steps_need_a_grant(bench: Any, run: Any, program: MakeProgram) -> None:
    wanted = program(steps=6)

    async def work() -> tuple[list[int], Done]:
        worker = await bench.worker(wanted)
        bench.start_epoch([worker], time_sliced=True)
        asked = []
        for steps in (1, 3, 2):
            asked.append((await worker.receive(TurnRequested)).step)
            worker.send(Grant(steps))
        return asked, await worker.receive(Done)

    asked, done = run(work())
    assert asked == [0, 1, 4]
    assert done.digest == plain(wanted)


def test_each_rank_may_update_a_range_of_the_parameters(bench: Any, run: Any, program: MakeProgram) -> None:
    wanted = program(options=EXACT, clip_norm=0.5)

    async def work() -> list[Any]:
        workers = await bench.workers(2, wanted)
        ranges = proportional_ranges(workers[0].ready.sizes, [1.0, 1.0])
        said = await bench.drive(workers, bench.start_epoch(workers, owners(4, 4), update_ranges=ranges), until=5)
        assert said == [Halted(5)] * 2
        mirror = new_memory_file("mirror")
        workers[1].send(Publish(), mirror)  # at a boundary any of them has the whole state
        await workers[1].receive(Published)
        workers.append(await bench.worker(wanted))
        workers[2].send(Load(), mirror)
        assert await workers[2].receive(Loaded) == Loaded(5)
        os.close(mirror)
        ranges = proportional_ranges(workers[0].ready.sizes, [1.0, 1.0, 2.0])
        last: list[Any] = await bench.drive(workers, bench.start_epoch(workers, owners(2, 2, 4), update_ranges=ranges))
        return last

    assert digests(run(work())) == {plain(wanted)}


def test_a_worker_halted_during_an_exchange_loses_its_state(bench: Any, run: Any, program: MakeProgram) -> None:
    wanted = program(options=EXACT)

    async def work() -> int:
        workers = await bench.workers(2, wanted)
        epoch = bench.start_epoch(workers, owners(4, 4), update_ranges=((0, 3), (3, 6)))
        for worker in workers:
            await worker.receive(Contributed)
        for worker in workers:
            worker.send(Apply(epoch, 0))
            await worker.receive(Updated)
        bench.start_epoch(workers[:1])
        code: int = await bench.exits[workers[0].pid]
        return code

    assert run(work()) == STATE_LOST


def test_ranks_update_with_equal_numbers_of_threads(bench: Any, run: Any, program: MakeProgram, tmp_path: Path) -> None:
    wanted = program("counts_threads", notes=str(tmp_path))

    async def work() -> list[Any]:
        workers = [await bench.worker(wanted, threads=threads) for threads in (3, 2)]
        last: list[Any] = await bench.drive(workers, bench.start_epoch(workers, update_threads=2))
        return last

    assert len(digests(run(work()))) == 1
    found = sorted(tuple(dict.fromkeys(file.read_text().splitlines())) for file in tmp_path.iterdir())
    assert found == [("pass 2", "update 2", "after 2"), ("pass 3", "update 2", "after 2")]


def test_the_batch_follows_the_number_of_devices_when_it_is_per_device(
    bench: Any, run: Any, program: MakeProgram
) -> None:
    wanted = program(steps=6, options={"batch_size": 20, "batch_per_device": True})

    async def work() -> list[Any]:
        workers = await bench.workers(2, wanted)
        assert {worker.ready.batch_size for worker in workers} == {20}
        said = await bench.drive(workers, bench.start_epoch(workers), until=2)
        assert said == [Halted(2)] * 2
        bench.start_epoch(workers[:1])
        return [await workers[0].receive(Done)]

    trainer = Trainer(training(wanted))
    trainer.resize_batch(40)
    for _ in range(2):
        trainer.step((1, 1))
    trainer.resize_batch(20)
    while not trainer.stop_reason:
        trainer.step()
    assert digests(run(work())) == {digest(trainer.training.model)}


def test_an_epoch_may_change_the_batch_size(bench: Any, run: Any, program: MakeProgram) -> None:
    async def work() -> Done:
        worker = await bench.worker(program(steps=3))
        bench.start_epoch([worker], batch_size=50, threads=1)
        return await worker.receive(Done)  # type: ignore[no-any-return]

    trainer = Trainer(training(program(steps=3)))
    trainer.resize_batch(50)
    while not trainer.stop_reason:
        trainer.step()
    assert run(work()).digest == digest(trainer.training.model)


def test_an_older_epoch_is_ignored(bench: Any, run: Any, program: MakeProgram) -> None:
    async def work() -> Halted:
        worker = await bench.worker(program(steps=4000))
        worker.send(Proceed(1000, time_sliced=True))
        worker.send(Proceed(999))
        worker.send(Halt())
        return await worker.receive(Halted)  # type: ignore[no-any-return]

    assert run(work()) == Halted(0)


@pytest.mark.parametrize("how", ["leave", "end of channel", "terminate"])
def test_a_worker_exits_on_request_or_without_executor(bench: Any, run: Any, program: MakeProgram, how: str) -> None:
    async def work() -> int:
        worker = await bench.worker(program(steps=1_000_000))
        bench.start_epoch([worker])
        await worker.receive(Stepped)
        if how == "leave":
            worker.send(Leave())
        elif how == "terminate":
            bench.forkserver.kill(worker.pid, signal.SIGTERM)
        else:
            worker.channel.close()
        code: int = await bench.exits[worker.pid]
        return code

    assert run(work()) == (-signal.SIGTERM if how == "terminate" else 0)
