"""A tree of processes is stopped as a whole, also while one of them starts another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from carpool.runtime.process.process_tree import continue_tree, descendants, kill_tree, stop_tree

SPAWN = """
import os, sys
opens = [(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)]
os.posix_spawn("/bin/true", ["true"], {}, file_actions=opens)
"""


def test_a_parent_between_vfork_and_exec_counts_as_stopped(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)  # the new child opens it before its exec, and waits for a writer
    with subprocess.Popen(["sh", "-c", '"$0" -c "$1" "$2"; exit 3', sys.executable, SPAWN, fifo]) as shell:
        try:
            while len(descendants(shell.pid)) < 2:
                assert shell.poll() is None
            _, child = descendants(shell.pid)
            os.kill(child, signal.SIGSTOP)
            for _ in range(100_000):
                if stop_tree(shell.pid):
                    break
            else:
                pytest.fail("never stopped")
            continue_tree(shell.pid)
            fifo.open("w").close()
            assert shell.wait(60) == 3
        finally:
            kill_tree(shell.pid)
            shell.kill()
