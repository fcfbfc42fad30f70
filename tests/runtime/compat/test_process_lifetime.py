"""Exits of processes are seen without a thread, and brought about."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from carpool.runtime.compat.process_lifetime import ProcessHandle, set_process_name, wait_for_exit


def child(program: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", program])


def test_an_exit_is_awaited_with_its_code() -> None:
    process = child("raise SystemExit(3)")
    handle = ProcessHandle(process.pid, process)
    asyncio.run(handle.wait())
    assert handle.exit_reason == "ended with exit code 3"


def test_a_process_is_killed_after_a_timeout() -> None:
    process = child("import time; time.sleep(60)")
    handle = ProcessHandle(process.pid, process)
    asyncio.run(handle.wait(kill_after_s=0.01))
    assert "SIGKILL" in handle.exit_reason
    asyncio.run(handle.wait())  # it is closed: nothing is left to wait for


def test_waiting_leaves_no_descriptor_even_when_it_is_cancelled() -> None:
    async def give_up(process: subprocess.Popen[bytes]) -> None:
        before = num_descriptors()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait_for_exit(process), 0.01)
        assert num_descriptors() == before
        process.kill()
        await wait_for_exit(process)

    process = child("import time; time.sleep(60)")
    asyncio.run(give_up(process))
    assert process.returncode == -9


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_the_process_name_is_cut_at_15_bytes() -> None:
    before = Path("/proc/self/comm").read_text(encoding="ascii").strip()
    try:
        set_process_name("carpool-with-a-long-name")
        assert Path("/proc/self/comm").read_text(encoding="ascii").strip() == "carpool-with-a-"
    finally:
        set_process_name(before)
