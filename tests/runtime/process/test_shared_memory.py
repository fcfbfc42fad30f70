"""The step counter of a worker."""

from __future__ import annotations

import os
import signal

from carpool.runtime.process.shared_memory import (
    StepCounter,
    boot_clock,
    limit_worker,
    new_step_counter,
    read_step_counter,
)


def test_the_counter_of_a_killed_process_can_be_read() -> None:
    fd = new_step_counter("a job")
    assert read_step_counter(fd) == 0
    if not (pid := os.fork()):
        StepCounter(fd).set(1 << 40)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert read_step_counter(fd) == 1 << 40
    os.close(fd)


def test_no_step_begins_after_the_end_of_the_lease_and_again_when_it_is_renewed() -> None:
    fd = new_step_counter("job")
    counter = StepCounter(fd)
    seen = [counter.is_fenced]
    limit_worker(fd, boot_clock() - 1.0, 0.0)
    seen.append(counter.is_fenced)
    counter.set(7)
    seen.append(counter.is_fenced)
    limit_worker(fd, boot_clock() + 1000.0, 0.0)
    seen.append(counter.is_fenced)
    assert seen == [False, True, True, False]
    assert read_step_counter(fd) == 7


def test_a_state_may_be_saved_for_longer_than_steps_may_begin() -> None:
    fd = new_step_counter("job")
    counter = StepCounter(fd)
    seen = [counter.may_save()]
    for steps_s, writes_s in ((-2.0, 1000.0), (-2.0, -1.0), (1000.0, 1000.0)):
        limit_worker(fd, boot_clock() + steps_s, boot_clock() + writes_s)
        seen.append(counter.may_save())
    assert seen == [True, True, False, True]
