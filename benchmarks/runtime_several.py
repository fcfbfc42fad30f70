"""Runs the comparisons on several devices in one call, with one start-up.

    python benchmarks/runtime_several.py [--unlike "--fast 4 --slow 2"] [--ddp "--repeats 3"] [--updates "--repeats 2"]

Runs runtime_unlike.py, runtime_ddp.py and runtime_updates.py with the given arguments, each with its own result file;
empty arguments (--ddp "") skip one. Executors and torchruns are started together first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from pathlib import Path

import runtime_ddp
import runtime_unlike
import runtime_updates
from trials.desk import Desk, new_mark


async def measure(folder: Path, words: argparse.Namespace) -> None:
    """Start everything, then compare."""
    began = time.monotonic()
    unlike = [runtime_unlike.parsed(each.split()) for each in words.unlike if each]
    ddp = runtime_ddp.parsed(words.ddp.split())
    updates = runtime_updates.parsed(words.updates.split())
    cases = runtime_ddp.cases_of(ddp, first=2 * len(unlike))
    apart = unlike[0].apart if unlike else ()
    devices = [(each.fast, each.slow) for each in unlike]
    devices += [setup.cores for setup in runtime_ddp.setups(len(os.sched_getaffinity(0)))]
    with contextlib.ExitStack() as stack:
        runs = runtime_ddp.start_runs(folder, cases, stack) if words.ddp else {}
        desk, desks = await asyncio.gather(
            Desk.open(folder / "state", devices[0], others=devices[1:], mark=new_mark(), patience_s=600.0, apart=apart),
            runtime_updates.open_desks(folder, updates) if words.updates else asyncio.sleep(0, {}),
        )
        try:
            for number, options in enumerate(unlike):
                options.devices = (2 * number, 2 * number + 1)
                print(f"== {time.monotonic() - began:.0f} s: unlike {words.unlike[number]}", flush=True)
                await runtime_unlike.compare(desk, folder, options)
            if desks:
                print(f"== {time.monotonic() - began:.0f} s: updates {words.updates}", flush=True)
                await runtime_updates.compare(desks, folder, updates)
            if runs:
                print(f"== {time.monotonic() - began:.0f} s: DDP {words.ddp}", flush=True)
                await runtime_ddp.compare(runtime_ddp.Contest(folder, desk, runs, ddp.steps), cases, ddp)
        finally:
            await asyncio.gather(*(each.close() for each in (desk, *desks.values())))
    print(f"== {time.monotonic() - began:.0f} s: end", flush=True)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unlike", action="append", default=[])
    parser.add_argument("--ddp", default="")
    parser.add_argument("--updates", default="")
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(measure(Path(name), parser.parse_args()))


if __name__ == "__main__":
    main()
