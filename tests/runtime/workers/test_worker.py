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
from carpool.runtime.process.worker_main import TORN
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


def test_alone_it_learns_what_an_ordinary_loop_learns(
    bench: Any, run: Any, program: MakeProgram, tmp_path: Path
) -> None:
    wanted = program(evaluated=True, options={"keep": 1})

    async def work() -> tuple[Done, Stepped, list[Any]]:
        hand = await bench.worker(wanted, checkpoints=str(tmp_path))
        assert hand.ready.total_steps == 12
        assert hand.ready.sizes == (96, 16, 16, 16, 48, 3)
        bench.form([hand])
        first = await hand.hear(Stepped)
        return await hand.hear(Done), first, hand.others

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
def test_an_exact_company_gives_the_bits_of_the_plain_loop(
    bench: Any, run: Any, program: MakeProgram, owned: Any
) -> None:
    wanted = program(evaluated=True, options=EXACT)

    async def work() -> list[Any]:
        hands = await bench.workers(len(owned), wanted)
        said: list[Any] = await bench.drive(hands, bench.form(hands, owned))
        return said

    assert digests(run(work())) == {plain(wanted)}


def test_parts_of_the_default_mode_are_those_of_one_process(bench: Any, run: Any, program: MakeProgram) -> None:
    wanted = program()

    async def work() -> list[Any]:
        hands = await bench.workers(2, wanted)
        said: list[Any] = await bench.drive(hands, bench.form(hands, parts=(20, 16)))
        return said

    trainer = Trainer(training(wanted))
    while not trainer.stop_reason:
        trainer.step((20, 16))
    assert digests(run(work())) == {digest(trainer.training.model)}


def test_formations_may_change_at_any_step(bench: Any, run: Any, program: MakeProgram) -> None:
    wanted = program(steps=20, evaluated=True, options=EXACT)
    chance = random.Random(3)

    async def work() -> list[Any]:
        hands = await bench.workers(3, wanted)
        step = 0
        while step < 16:
            edges = sorted(chance.choices(range(9), k=2))
            formation = bench.form(hands, owners(*[b - a for a, b in itertools.pairwise([0, *edges, 8])]))
            if chance.random() < 0.5:  # given up in the middle of a step
                for hand in hands:
                    assert (await bench.answer(hand, hands)).step == step
                continue
            step += chance.randint(1, 3)
            said = await bench.drive(hands, formation, until=step)
            assert said == [Halted(step)] * 3
        chance.shuffle(hands)
        last: list[Any] = await bench.drive(hands, bench.form(hands, owners(2, 5, 1)))
        return last

    assert digests(run(work())) == {plain(wanted)}


def test_survivors_of_a_kill_in_the_middle_of_a_step_go_on(
    bench: Any, run: Any, program: MakeProgram, tmp_path: Path
) -> None:
    fault = f'[{{"job": "job", "step": 5, "kind": "kill", "rank": 1, "once": "{tmp_path / "mark"}"}}]'
    wanted = program(options=EXACT | {"environment": {"CARPOOL_FAULTS": fault}})

    async def work() -> list[Any]:
        hands = await bench.workers(3, wanted)
        formation = bench.form(hands, owners(3, 3, 2))
        for step in range(5):
            for hand in hands:
                assert (await hand.hear(Contributed)).step == step
            for hand in hands:
                hand.say(Apply(formation, step))
        assert await bench.exits[hands[1].pid] == -signal.SIGKILL
        survivors = [hands[2], hands[0]]
        newcomer = await bench.worker(wanted)
        formation = bench.form(survivors, owners(6, 2))
        for hand in survivors:
            assert (await hand.hear(Contributed)).step == 5  # of the step that was given up, or of the retried one
        mirror = new_memory_file("mirror")
        for hand in survivors:
            hand.say(Halt())
            assert await hand.hear(Halted) == Halted(5)
        survivors[0].say(Publish(), mirror)
        await survivors[0].hear(Published)
        newcomer.say(Load(), mirror)
        assert await newcomer.hear(Loaded) == Loaded(5)
        os.close(mirror)
        crew = [newcomer, *survivors]
        last: list[Any] = await bench.drive(crew, bench.form(crew, owners(1, 2, 5)))
        return last

    assert digests(run(work())) == {plain(wanted)}


def test_another_goes_on_from_the_mirror_of_one_that_died(bench: Any, run: Any, program: MakeProgram) -> None:
    wanted = program(steps=30)

    async def work() -> list[Any]:
        hand = await bench.worker(wanted)
        mirror = new_memory_file("mirror")
        bench.form([hand], by_token=True)
        for step in (0, 4):
            assert await hand.hear(TurnRequested) == TurnRequested(step)
            hand.say(Grant(4))
        await hand.hear(TurnRequested)
        for _ in range(2):
            hand.say(Publish(), mirror)
            assert (await hand.hear(Published)).step == 8
        bench.forkserver.kill(hand.pid)
        assert await bench.exits[hand.pid] == -signal.SIGKILL
        heir = await bench.worker(wanted)
        heir.say(Load(), mirror)
        assert await heir.hear(Loaded) == Loaded(8)
        os.close(mirror)
        bench.form([heir])
        return [await heir.hear(Done)]

    assert digests(run(work())) == {plain(wanted)}


def test_a_halted_worker_publishes_saves_and_goes_on(
    bench: Any, run: Any, program: MakeProgram, tmp_path: Path
) -> None:
    wanted = program(steps=4000)

    async def work() -> tuple[Halted, Saved, Halted]:
        hand, other = await bench.workers(2, wanted, checkpoints=str(tmp_path))
        bench.form([hand])
        await hand.hear(Stepped)
        hand.say(Halt())
        halted = await hand.hear(Halted)
        hand.say(Save())
        saved = await hand.hear(Saved)
        other.say(Load(saved.path))
        await other.hear(Loaded)
        other.say(Halt())
        return halted, saved, await other.hear(Halted)

    halted, saved, other = run(work())
    assert halted.step == saved.step == other.step > 0


def test_steps_by_token_are_made_only_when_granted(bench: Any, run: Any, program: MakeProgram) -> None:
    wanted = program(steps=6)

    async def work() -> tuple[list[int], Done]:
        hand = await bench.worker(wanted)
        bench.form([hand], by_token=True)
        asked = []
        for steps in (1, 3, 2):
            asked.append((await hand.hear(TurnRequested)).step)
            hand.say(Grant(steps))
        return asked, await hand.hear(Done)

    asked, done = run(work())
    assert asked == [0, 1, 4]
    assert done.digest == plain(wanted)


def test_each_rank_may_update_a_range_of_the_parameters(bench: Any, run: Any, program: MakeProgram) -> None:
    wanted = program(options=EXACT, clip_norm=0.5)

    async def work() -> list[Any]:
        hands = await bench.workers(2, wanted)
        ranges = proportional_ranges(hands[0].ready.sizes, [1.0, 1.0])
        said = await bench.drive(hands, bench.form(hands, owners(4, 4), updates=ranges), until=5)
        assert said == [Halted(5)] * 2
        mirror = new_memory_file("mirror")
        hands[1].say(Publish(), mirror)  # at a boundary any of them has the whole state
        await hands[1].hear(Published)
        hands.append(await bench.worker(wanted))
        hands[2].say(Load(), mirror)
        assert await hands[2].hear(Loaded) == Loaded(5)
        os.close(mirror)
        ranges = proportional_ranges(hands[0].ready.sizes, [1.0, 1.0, 2.0])
        last: list[Any] = await bench.drive(hands, bench.form(hands, owners(2, 2, 4), updates=ranges))
        return last

    assert digests(run(work())) == {plain(wanted)}


def test_whoever_gives_up_an_exchange_has_nothing_to_go_on_with(bench: Any, run: Any, program: MakeProgram) -> None:
    wanted = program(options=EXACT)

    async def work() -> int:
        hands = await bench.workers(2, wanted)
        formation = bench.form(hands, owners(4, 4), updates=((0, 3), (3, 6)))
        for hand in hands:
            await hand.hear(Contributed)
        for hand in hands:
            hand.say(Apply(formation, 0))
            await hand.hear(Updated)
        bench.form(hands[:1])
        code: int = await bench.exits[hands[0].pid]
        return code

    assert run(work()) == TORN


def test_ranks_with_unlike_numbers_of_threads_update_with_the_same(
    bench: Any, run: Any, program: MakeProgram, tmp_path: Path
) -> None:
    wanted = program("counts_threads", notes=str(tmp_path))

    async def work() -> list[Any]:
        hands = [await bench.worker(wanted, threads=threads) for threads in (3, 2)]
        last: list[Any] = await bench.drive(hands, bench.form(hands, update_threads=2))
        return last

    assert len(digests(run(work()))) == 1
    found = sorted(tuple(dict.fromkeys(file.read_text().splitlines())) for file in tmp_path.iterdir())
    assert found == [("pass 2", "update 2", "after 2"), ("pass 3", "update 2", "after 2")]


def test_the_batch_follows_the_number_of_devices_when_it_is_per_device(
    bench: Any, run: Any, program: MakeProgram
) -> None:
    wanted = program(steps=6, options={"batch_size": 20, "batch_per_device": True})

    async def work() -> list[Any]:
        hands = await bench.workers(2, wanted)
        assert {hand.ready.batch_size for hand in hands} == {20}
        said = await bench.drive(hands, bench.form(hands), until=2)
        assert said == [Halted(2)] * 2
        bench.form(hands[:1])
        return [await hands[0].hear(Done)]

    trainer = Trainer(training(wanted))
    trainer.resize_batch(40)
    for _ in range(2):
        trainer.step((1, 1))
    trainer.resize_batch(20)
    while not trainer.stop_reason:
        trainer.step()
    assert digests(run(work())) == {digest(trainer.training.model)}


def test_a_formation_may_bring_a_batch_size(bench: Any, run: Any, program: MakeProgram) -> None:
    async def work() -> Done:
        hand = await bench.worker(program(steps=3))
        bench.form([hand], batch_size=50, threads=1)
        return await hand.hear(Done)  # type: ignore[no-any-return]

    trainer = Trainer(training(program(steps=3)))
    trainer.resize_batch(50)
    while not trainer.stop_reason:
        trainer.step()
    assert run(work()).digest == digest(trainer.training.model)


def test_an_older_formation_is_not_taken_up(bench: Any, run: Any, program: MakeProgram) -> None:
    async def work() -> Halted:
        hand = await bench.worker(program(steps=4000))
        hand.say(Proceed(1000, by_token=True))
        hand.say(Proceed(999))
        hand.say(Halt())
        return await hand.hear(Halted)  # type: ignore[no-any-return]

    assert run(work()) == Halted(0)


@pytest.mark.parametrize("how", ["leave", "end of channel", "terminate"])
def test_it_leaves_when_told_and_when_nobody_is_there(bench: Any, run: Any, program: MakeProgram, how: str) -> None:
    async def work() -> int:
        hand = await bench.worker(program(steps=1_000_000))
        bench.form([hand])
        await hand.hear(Stepped)
        if how == "leave":
            hand.say(Leave())
        elif how == "terminate":
            bench.forkserver.kill(hand.pid, signal.SIGTERM)
        else:
            hand.channel.close()
        code: int = await bench.exits[hand.pid]
        return code

    assert run(work()) == (-signal.SIGTERM if how == "terminate" else 0)
