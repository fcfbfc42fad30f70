"""What a process counted is there when it is not any more."""

from __future__ import annotations

import os
import signal

from carpool.runtime.process.shared_memory import StepCounter, counted, new_counter


def test_what_a_killed_process_counted_can_be_read() -> None:
    fd = new_counter("a job")
    assert counted(fd) == 0
    if not (pid := os.fork()):
        StepCounter(fd).set(1 << 40)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert counted(fd) == 1 << 40
    os.close(fd)
