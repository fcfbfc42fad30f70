"""Lanes of a GPU: another share is another process, which warms up before it takes over."""

from __future__ import annotations

from dataclasses import replace

from carpool.jobs.devices import LocalDevice
from carpool.runtime.job_state.types import JobOptions, Target, WorkerSlot
from carpool.runtime.process.protocol import (
    Leave,
    Load,
    Stepped,
)
from tests.runtime.job_state.harness import Harness


def on_gpu() -> Harness:
    """A job on a GPU with lanes that has reported and has a mirror."""
    gpu = LocalDevice(0, "cuda:0", "gpu", (0,), memory_bytes=2 << 30, cuda=0)
    harness = Harness(JobOptions(has_lanes=True, mirror_s=0.5), {0: gpu})
    take_lane(harness, 1.0)
    (solo,) = harness.alive_workers
    while not harness.mirrors:
        solo.act()
        while solo.outbox:
            message = solo.outbox.popleft()
            said = replace(message, memory_bytes=7) if isinstance(message, Stepped) else message
            harness.run_actions(harness.machine.message(harness.at, solo.id, said))
        harness.tick()
    return harness


def take_lane(harness: Harness, fraction: float) -> None:
    """Order another share of the GPU."""
    harness.generation += 1
    harness.target = Target(harness.generation, (WorkerSlot(0, fraction),))
    harness.run_actions(harness.machine.order(harness.at, harness.target))


def change_lane(harness: Harness, fraction: float) -> None:
    """Have another share of the GPU, in so few steps that the training is not over yet."""
    take_lane(harness, fraction)
    for _ in range(40):
        if harness.acks()[-1].generation == harness.generation and not any(
            worker.inbox for worker in harness.alive_workers
        ):
            return
        for worker in harness.alive_workers:
            if worker.at != "working" or worker.inbox:
                worker.act()
            harness.deliver(worker)
    raise AssertionError("stuck")


def warming_up() -> tuple[Harness, Load]:
    """A job that moves to another lane, and the first message of its new worker."""
    harness = on_gpu()
    take_lane(harness, 0.5)
    new_worker = harness.alive_workers[-1]
    new_worker.act()
    harness.deliver(new_worker)
    message = new_worker.inbox[0][0]
    assert isinstance(message, Load)
    return harness, message


def test_a_worker_that_left_a_lane_is_on_standby_until_the_next_one() -> None:
    harness = on_gpu()
    lanes = []
    for fraction in (0.5, 1.0, 0.5, 0.4, 0.5):
        change_lane(harness, fraction)
        lanes.append(sorted((w.lane, w.at) for w in harness.alive_workers if w.alive))
    assert lanes[0] == lanes[2] == [(50, "working"), (100, "resting")]
    assert lanes[1] == [(50, "resting"), (100, "working")]
    assert lanes[3] == [(40, "working"), (50, "resting")]
    assert lanes[4] == [(40, "resting"), (50, "working")]
    assert len(harness.workers) == 3, "none was started twice"
    harness.run()
    harness.check_finish()


def test_standby_is_limited() -> None:
    harness = on_gpu()
    change_lane(harness, 0.5)
    first, second = harness.alive_workers
    harness.tick(29.0)
    assert not first.inbox
    harness.tick(2.0)
    assert first.inbox[0][0] == Leave()
    first.act()
    harness.deliver(first)
    assert harness.alive_workers == [second]


def test_new_workers_on_a_gpu_warm_up_with_a_mirror_while_the_others_run() -> None:
    harness, load = warming_up()
    assert load.warmup_bytes == 7
    assert [worker.at for worker in harness.alive_workers] == ["working", "resting"]
    harness.run()
    harness.check_finish()


def test_a_worker_that_warms_up_is_not_killed() -> None:
    """It has work on the device: killing it may end its neighbours too."""
    harness, _ = warming_up()
    new_worker = harness.alive_workers[-1]
    harness.order(0)
    assert new_worker.alive
    assert new_worker.inbox[-1][0] == Leave()
    harness.run()
    harness.check_finish()
