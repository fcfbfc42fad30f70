"""Runs hand-written scripts repeatedly in processes that torchrun starts once.

Under torchrun it reads numbered command files from a folder, one script after another; every rank reads them itself.
Each run is a new "attempt" for torch's store, and all threads are moved to the cores of the run.
"""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

from carpool.runtime.compat.process_lifetime import exit_with_parent

ROOT = Path(__file__).resolve().parents[3]
LOOK_S = 0.02
PATIENCE_S = 120.0


class Failed(Exception):
    """A script did not come to its end."""


class Torchrun:
    """Processes that wait for scripts to run."""

    def __init__(self, size: int, folder: Path) -> None:
        folder.mkdir()
        self._size, self._folder, self._number = size, folder, 0
        self._log = (folder / "log").open("w+", encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        paths = [ROOT / "src", ROOT / "benchmarks", Path(__file__).parent]
        cores = len(os.sched_getaffinity(0))
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "OMP_NUM_THREADS": str(max(1, cores // size)),
        }
        parent = os.getpid()
        self._process = subprocess.Popen(
            [*command, __file__, str(folder)],
            env=env,
            stdout=self._log,
            stderr=self._log,
            preexec_fn=lambda: exit_with_parent(parent, signal.SIGTERM),  # noqa: PLW1509 - there is one thread here
        )

    async def run(self, *words: str) -> None:
        """Run a script with arguments in all processes, to its end."""
        order = self._folder / f"{self._number}.part"
        order.write_text(json.dumps(words), encoding="utf-8")
        order.rename(self._folder / f"{self._number}.json")
        patient_until = time.monotonic() + PATIENCE_S
        while len(list(self._folder.glob(f"{self._number}.done.*"))) < self._size:
            if self._process.poll() is not None or time.monotonic() > patient_until:
                self._log.seek(0)
                raise Failed(f"{' '.join(words)}: torchrun did not get there: {self._log.read()[-1500:]}")
            await asyncio.sleep(LOOK_S)
        self._number += 1

    def __enter__(self) -> Torchrun:
        return self

    def __exit__(self, *args: object) -> None:
        (self._folder / "end").touch()
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
        self._log.close()


def serve(folder: Path) -> None:
    """In each process: run what the files say until there is one that says end."""
    number, agent = 0, os.getppid()
    while not (folder / "end").exists() and os.getppid() == agent:
        order = folder / f"{number}.json"
        if not order.exists():
            time.sleep(LOOK_S)
            continue
        words = json.loads(order.read_text(encoding="utf-8"))
        rank = int(os.environ["RANK"])
        for thread in Path("/proc/self/task").iterdir():  # a pool of threads outlasts the run that made it
            os.sched_setaffinity(int(thread.name), [int(core) for core in words[4].split(":")[rank].split(",")])
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
        (folder / f"{number}.done.{rank}").touch()
        number += 1


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
