"""The step counter of a worker."""

from __future__ import annotations

import os
import signal

from carpool.runtime.process.shared_memory import StepCounter, new_step_counter, read_step_counter


def test_the_counter_of_a_killed_process_can_be_read() -> None:
    fd = new_step_counter("a job")
    assert read_step_counter(fd) == 0
    if not (pid := os.fork()):
        StepCounter(fd).set(1 << 40)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert read_step_counter(fd) == 1 << 40
    os.close(fd)
