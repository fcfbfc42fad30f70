"""Baselines of ``carpool demo``: its trainings as ordinary PyTorch loops, started by hand.

One after another, each with the number of threads that is best for it, and all at once in processes of their own. Each
process imports torch before its clock starts, as the executor does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import accumulate, cycle

import click

from carpool.core.errors import CarpoolError


@dataclass(frozen=True, slots=True)
class HandRun:
    """Seconds from the start until each job had ended."""

    ends_s: dict[str, float]

    @property
    def makespan_s(self) -> float:
        return max(self.ends_s.values())

    @property
    def avg_jct_s(self) -> float:
        return sum(self.ends_s.values()) / len(self.ends_s)


def run_in_turn(jobs: Sequence[str], devices: Sequence[str], num_cores: int, epochs: int | None) -> HandRun:
    """Run each job alone, with one thread and with all cores, and count the faster of the two.

    The second attempt is stopped once it is slower: on a busy machine several threads can take many times as long.
    """
    seconds: dict[str, float] = {}
    for threads in sorted({1, num_cores}) if devices[0] == "cpu" else [num_cores]:
        with _Process(_Loops(tuple(jobs), devices[0], threads, epochs, seconds)) as process:
            process.start()
            for job, took in process.results():
                seconds[job] = min(seconds.get(job, took), took)
                click.echo(f"  {job} with {threads} thread{'s' * (threads > 1)}: {took:.1f} s", err=True)
    return HandRun(dict(zip(jobs, accumulate(seconds[job] for job in jobs), strict=True)))


def run_at_once(jobs: Sequence[str], devices: Sequence[str], num_cores: int, epochs: int | None) -> HandRun:
    """Run all jobs at the same time, each in its own process with its part of the cores, over the devices in turn."""
    threads = max(1, num_cores // len(jobs))  # torch's default, all cores for each, takes many times as long
    loops = [_Loops((job,), device, threads, epochs, {}) for job, device in zip(jobs, cycle(devices), strict=False)]
    with ExitStack() as stack:
        processes = [stack.enter_context(_Process(each)) for each in loops]
        for process in processes:
            process.wait_until_ready()
        for process in processes:
            process.start()
        return HandRun(dict(result for process in processes for result in process.results()))


@dataclass(frozen=True, slots=True)
class _Loops:
    """The jobs that one process trains in turn; the arguments of `runtime.demo_trainings.train_by_hand`."""

    jobs: tuple[str, ...]
    device: str
    threads: int
    epochs: int | None
    limits_s: Mapping[str, float]


class _Process:
    """A Python process that imports torch, waits for a start signal and then trains."""

    def __init__(self, loops: _Loops) -> None:
        command = [sys.executable, "-m", "carpool.runtime.demo_trainings", json.dumps(asdict(loops))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._is_ready = False

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def wait_until_ready(self) -> None:
        self._is_ready = self._is_ready or bool(self._read())

    def start(self) -> None:
        self.wait_until_ready()
        assert self._process.stdin is not None
        click.echo(file=self._process.stdin)

    def results(self) -> Iterator[tuple[str, float]]:
        """Each job and the seconds that its loop took."""
        while line := self._read():
            result = json.loads(line)
            yield result["job"], result["seconds"]

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line and self._process.wait():
            raise CarpoolError(f"a baseline of the demo failed with exit code {self._process.returncode}")
        return line
