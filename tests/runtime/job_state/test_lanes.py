"""A team on lanes of a GPU: another share is another process, which rehearses before it takes over."""

from __future__ import annotations

from dataclasses import replace

from carpool.jobs.devices import LocalDevice
from carpool.runtime.job_state.types import JobOptions, Target, WorkerSlot
from carpool.runtime.process.protocol import (
    Leave,
    Load,
    Stepped,
)
from tests.runtime.job_state.world import World


def on_gpu() -> World:
    """A job on a GPU with lanes that has reported, and of which there is a mirror."""
    gpu = LocalDevice(0, "cuda:0", "gpu", (0,), memory_bytes=2 << 30, cuda=0)
    world = World(JobOptions(has_lanes=True, mirror_s=0.5), {0: gpu})
    take_lane(world, 1.0)
    (solo,) = world.living
    while not world.mirrors:
        solo.act()
        while solo.outbox:
            message = solo.outbox.popleft()
            said = replace(message, memory_bytes=7) if isinstance(message, Stepped) else message
            world.do(world.team.said(world.at, solo.id, said))
        world.tick()
    return world


def take_lane(world: World, fraction: float) -> None:
    """Order another share of the GPU."""
    world.generation += 1
    world.wish = Target(world.generation, (WorkerSlot(0, fraction),))
    world.do(world.team.order(world.at, world.wish))


def change_lane(world: World, fraction: float) -> None:
    """Have another share of the GPU, in so few steps that the training is not over yet."""
    take_lane(world, fraction)
    for _ in range(40):
        if world.answers()[-1].generation == world.generation and not any(worker.inbox for worker in world.living):
            return
        for worker in world.living:
            if worker.at != "working" or worker.inbox:
                worker.act()
            world.hear(worker)
    raise AssertionError("stuck")


def rehearsing() -> tuple[World, Load]:
    """A job on a GPU that moves to another lane of it, and what its newcomer is told first."""
    world = on_gpu()
    take_lane(world, 0.5)
    newcomer = world.living[-1]
    newcomer.act()
    world.hear(newcomer)
    message = newcomer.inbox[0][0]
    assert isinstance(message, Load)
    return world, message


def test_who_left_a_lane_stands_by_until_the_next_one_does() -> None:
    world = on_gpu()
    lanes = []
    for fraction in (0.5, 1.0, 0.5, 0.4, 0.5):
        change_lane(world, fraction)
        lanes.append(sorted((w.lane, w.at) for w in world.living if w.alive))
    assert lanes[0] == lanes[2] == [(50, "working"), (100, "resting")]
    assert lanes[1] == [(50, "resting"), (100, "working")]
    assert lanes[3] == [(40, "working"), (50, "resting")]
    assert lanes[4] == [(40, "resting"), (50, "working")]
    assert len(world.workers) == 3, "none was started twice"
    world.run()
    world.check_finish()


def test_nobody_stands_by_for_long() -> None:
    world = on_gpu()
    change_lane(world, 0.5)
    first, second = world.living
    world.tick(29.0)
    assert not first.inbox
    world.tick(2.0)
    assert first.inbox[0][0] == Leave()
    first.act()
    world.hear(first)
    assert world.living == [second]


def test_newcomers_on_a_gpu_rehearse_with_a_mirror_while_the_others_work() -> None:
    world, told = rehearsing()
    assert told.rehearses == 7
    assert [worker.at for worker in world.living] == ["working", "resting"]
    world.run()
    world.check_finish()


def test_who_rehearses_is_sent_away_politely() -> None:
    """It has work on the device, and who is killed then may take its neighbours along."""
    world, _ = rehearsing()
    newcomer = world.living[-1]
    world.order(0)
    assert newcomer.alive
    assert newcomer.inbox[-1][0] == Leave()
    world.run()
    world.check_finish()
