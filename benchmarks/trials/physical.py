"""Finds out which cores are threads of one physical core, and which are slowed by others, by timing them.

A virtual machine's kernel does not know. Two threads of one core share the square root unit: together each gets half of
what it gets alone. A core whose sibling another machine uses is slower than the rest.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np

SPELL_S = 0.025
ROUNDS = 5
SHARED = 0.75  # of the rate alone: below it, two are taken to be of one core


def roots(core: int, line: Connection) -> None:
    """On one core: how many rows of square roots fit into each spell that begins at a given moment."""
    os.sched_setaffinity(0, {core})
    row = np.random.default_rng(0).random(4096, dtype=np.float32)
    out = np.empty_like(row)
    while begin := line.recv():
        while time.monotonic() < begin:
            pass
        count, end = 0, begin + SPELL_S
        while time.monotonic() < end:
            for _ in range(8):
                np.sqrt(row, out=out)
            count += 8
        line.send(count)


@functools.cache
def felt_apart(cores: tuple[int, ...]) -> tuple[int, ...]:
    """The first thread of every physical core, the quickest first; all of them where none feels another."""
    context = get_context("fork")
    lines: dict[int, Connection] = {}
    started = []
    for core in cores:
        lines[core], theirs = context.Pipe()
        started.append(context.Process(target=roots, args=(core, theirs), daemon=True))
        started[-1].start()
        theirs.close()

    def counted(*on: int) -> list[int]:
        begin = time.monotonic() + 0.002
        for core in on:
            lines[core].send(begin)
        return [lines[core].recv() for core in on]

    def most(*on: int) -> list[int]:  # what else the machine does only ever takes away
        return [max(pair) for pair in zip(counted(*on), counted(*on), strict=True)]

    rounds = [{core: counted(core)[0] for core in cores} for _ in range(ROUNDS)]
    alone = {core: statistics.median(counts[core] for counts in rounds) for core in cores}
    firsts: list[int] = []
    left = sorted(cores, key=lambda core: -alone[core])
    while left:
        first = left.pop(0)
        firsts.append(first)
        for other in left:
            if min(n / alone[core] for n, core in zip(most(first, other), (first, other), strict=True)) < SHARED:
                left.remove(other)
                break
    for line in lines.values():
        line.send(0.0)
    for process in started:
        process.join()
    return tuple(firsts)


if __name__ == "__main__":
    began = time.monotonic()
    print(felt_apart(tuple(sorted(os.sched_getaffinity(0)))), f"{time.monotonic() - began:.1f} s")
