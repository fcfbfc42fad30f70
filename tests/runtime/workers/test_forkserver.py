"""The fork server forks, reaps and reports; nothing outlives it, and nothing outlives whoever started it."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from carpool.jobs.program import Program
from carpool.runtime.process.channel import AsyncChannel, pair
from carpool.runtime.process.forkserver import ForkServer, ForkServerDied
from carpool.runtime.process.protocol import Begin, Stepped, WorkerFailed

HERE = Path(__file__).parent
MakeProgram = Callable[..., Program]
PATIENCE_MS = 30_000


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def open_files(pid: int | str) -> dict[str, str]:
    return {link.name: str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()


def test_a_worker_inherits_only_its_channel(bench: Any, run: Any) -> None:
    async def work() -> dict[str, str]:
        await bench.fork()
        worker = await bench.fork()
        worker.send(Begin("job", {"entry": "no.py:none"}, "cpu"))
        await worker.receive(WorkerFailed)
        return open_files(worker.pid)

    inherited = {number: target for number, target in run(work()).items() if int(number) > 2}
    assert len(inherited) == 1, inherited
    assert next(iter(inherited.values())).startswith("socket:")


def test_a_worker_has_its_own_session_cores_and_threads(bench: Any, run: Any, program: MakeProgram) -> None:
    core = min(os.sched_getaffinity(0))

    async def work() -> tuple[bool, set[int], str]:
        worker = await bench.worker(program(), cores=(core,))
        leads = os.getsid(worker.pid) == os.getpgid(worker.pid) == worker.pid
        return leads, os.sched_getaffinity(worker.pid), name_of(worker.pid)

    leads, cores, name = run(work())
    assert leads
    assert cores == {core}
    assert name == "carpool:job"


def test_output_of_user_code_goes_to_the_log(bench: Any, run: Any, program: MakeProgram) -> None:
    async def work() -> int:
        worker = await bench.worker(program("speaks"))
        return int(worker.pid)

    assert (bench.folder / f"log-{run(work())}").read_text(encoding="utf-8") == "good morning\n"


def test_processes_of_a_worker_end_with_it(bench: Any, run: Any, program: MakeProgram) -> None:
    async def work() -> int:
        worker = await bench.worker(program("starts_another"))
        (child,) = children(worker.pid)
        handle = os.pidfd_open(child)
        bench.forkserver.kill(worker.pid)
        await bench.exits[worker.pid]
        return handle

    handle = run(work())
    assert select.select([handle], [], [], PATIENCE_MS / 1000)[0]
    os.close(handle)


def test_workers_use_huge_pages_and_their_children_do_not(bench: Any, run: Any, program: MakeProgram) -> None:
    async def work() -> tuple[bytes, bytes]:
        worker = await bench.worker(program("starts_another"))
        (child,) = children(worker.pid)
        return environment_of(bench.forkserver.pid), environment_of(child)

    ours, theirs = run(work())
    assert b"glibc.malloc.hugetlb=1" in ours
    assert b"GLIBC_TUNABLES" not in theirs


def test_no_zombie_and_no_descriptor_is_left(bench: Any, run: Any, program: MakeProgram) -> None:
    async def work() -> list[int]:
        counts = []
        for _ in range(3):
            worker = await bench.worker(program())
            bench.start_epoch([worker])
            await worker.receive(Stepped)
            await bench.dismiss()
            counts.append(len(open_files(bench.forkserver.pid)))
        assert children(bench.forkserver.pid) == []
        return counts

    here, shared = len(open_files("self")), sorted(Path("/dev/shm").iterdir())
    counts = run(work())
    assert counts == counts[:1] * 3
    assert (len(open_files("self")), sorted(Path("/dev/shm").iterdir())) == (here, shared)


def test_a_signal_to_an_exited_worker_is_ignored(bench: Any, run: Any) -> None:
    async def work() -> int:
        worker = await bench.fork()
        bench.forkserver.kill(os.getpid(), signal.SIGKILL)  # not the fork server's child
        bench.forkserver.kill(worker.pid)
        code: int = await bench.exits[worker.pid]
        return code

    assert run(work()) == -signal.SIGKILL


SCRIPT = """
import asyncio, json, sys
sys.path.insert(0, {folder!r})
from carpool.runtime.process.channel import AsyncChannel, pair
from carpool.runtime.process.forkserver import ForkServer
from carpool.runtime.process.protocol import Begin, Proceed, Ready, Stepped

async def main():
    forkserver = ForkServer(print)
    await forkserver.start()
    ours, theirs = pair()
    pid = await forkserver.fork(theirs)
    theirs.close()
    channel = AsyncChannel(ours)
    program = {{"entry": "jobs.py:mlp", "args": {{"steps": 1000000}}, "folder": {folder!r}}}
    channel.send(Begin("job", program, "cpu"))
    while True:
        message = (await channel.receive()).message
        if isinstance(message, Ready):
            channel.send(Proceed(1))
        if isinstance(message, Stepped):
            print(json.dumps([forkserver.pid, pid]), "torch" in sys.modules, flush=True)

asyncio.run(main())
"""


def test_all_processes_die_with_a_killed_executor() -> None:
    """Torch is not imported in the executor, and a SIGKILL of it leaves no process."""
    with subprocess.Popen([sys.executable, "-c", SCRIPT.format(folder=str(HERE))], stdout=subprocess.PIPE) as executor:
        assert executor.stdout is not None
        pids, _, has_torch = executor.stdout.readline().decode().rpartition(" ")
        handles = [os.pidfd_open(pid) for pid in json.loads(pids)]
        executor.kill()
    assert has_torch == "False\n"
    for handle in handles:
        assert select.select([handle], [], [], PATIENCE_MS / 1000)[0], "a process outlived its executor"
        os.close(handle)


def test_a_dead_fork_server_is_reported_and_can_be_replaced(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[str] = []
    monkeypatch.setattr("carpool.runtime.process.forkserver._STOP_S", 5.0)

    async def work() -> None:
        forkserver = ForkServer(lambda exited: None, gone.append)
        await forkserver.start()
        ours, theirs = pair()
        with theirs:
            await forkserver.fork(theirs)
        channel = AsyncChannel(ours)
        os.kill(forkserver.pid, signal.SIGKILL)
        with pytest.raises(ForkServerDied):
            await forkserver.fork(ours)
        with pytest.raises(Exception, match="closed"):  # its worker went with it
            await channel.receive()
        await asyncio.sleep(0)
        channel.close()
        await forkserver.stop()

    run(work())
    assert len(gone) == 1
