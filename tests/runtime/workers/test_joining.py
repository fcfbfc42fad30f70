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


async def published(hand: Any, mirror: int) -> dict[str, Tensor]:
    """A worker's weights and statistics."""
    hand.say(Publish(), mirror)
    await hand.hear(Published)
    state: dict[str, Tensor] = read_mirror(mirror)[1]["model"]
    return {name: value.clone() for name, value in state.items()}


def test_joint_statistics_are_those_of_one_device_also_after_a_resize(
    bench: Any, run: Any, program: MakeProgram
) -> None:
    wanted = program("normalised", options=JOINT)
    mirror = new_memory_file("mirror")

    async def alone() -> dict[str, Tensor]:
        hand = await bench.worker(wanted)
        bench.form([hand], by_token=False)
        await hand.hear(Done)
        return await published(hand, mirror)

    async def cut() -> dict[str, Tensor]:
        hands = await bench.workers(2, wanted)
        said = await bench.drive(hands, bench.form(hands, parts=(25, 11)), until=3)
        assert said == [Halted(3)] * 2
        await published(hands[1], mirror)
        hands.append(await bench.worker(wanted))
        hands[2].say(Load(), mirror)
        assert await hands[2].hear(Loaded) == Loaded(3)
        done = await bench.drive(hands, bench.form(hands, parts=(6, 20, 10)))
        assert len({each.digest for each in done}) == 1
        return await published(hands[0], mirror)

    whole, parts = run(alone()), run(cut())
    os.close(mirror)
    for name, expected in whole.items():
        assert float((parts[name] - expected).float().norm() / expected.float().norm()) < 1e-5, name


def test_a_worker_that_waits_for_the_statistics_of_others_hears_orders(
    bench: Any, run: Any, program: MakeProgram
) -> None:
    wanted = program("normalised", options=JOINT)

    async def work() -> Halted:
        hands = await bench.workers(2, wanted)
        os.kill(hands[1].pid, signal.SIGSTOP)
        bench.form(hands, parts=(20, 16))
        hands[0].say(Halt())
        halted: Halted = await hands[0].hear(Halted)
        os.kill(hands[1].pid, signal.SIGKILL)
        bench.form(hands[:1])
        assert isinstance(await hands[0].hear(Done), Done)
        return halted

    assert run(work()) == Halted(0)


def test_a_process_group_adds_up_to_the_same_bits(bench: Any, run: Any, program: MakeProgram) -> None:
    wanted = program(options=EXACT)

    async def work() -> list[Any]:
        hands = await bench.workers(2, wanted)
        first = bench.form(hands, owners(3, 5), reducer="group")
        assert await bench.drive(hands, first, until=4) == [Halted(4)] * 2
        last: list[Any] = await bench.drive(hands, bench.form(hands, owners(6, 2), reducer="group"))
        return last

    assert {done.digest for done in run(work())} == {plain_loop(training(wanted), shards=8).digest}


def test_a_peer_that_dies_in_the_middle_of_adding_up_costs_a_formation(
    bench: Any, run: Any, program: MakeProgram
) -> None:
    wanted = program(options=EXACT)

    async def work() -> Done:
        hands = await bench.workers(2, wanted)
        formation = bench.form(hands, owners(4, 4), reducer="group")
        for hand in hands:
            await hand.hear(Contributed)
        os.kill(hands[1].pid, signal.SIGKILL)
        hands[0].say(Apply(formation, 0))
        hands[0].say(Halt())
        assert await hands[0].hear(Halted) == Halted(0)
        bench.form(hands[:1])
        done: Done = await hands[0].hear(Done)
        return done

    assert run(work()).digest == plain_loop(training(wanted), shards=8).digest
