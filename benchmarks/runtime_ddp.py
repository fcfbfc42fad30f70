"""Compares carpool with hand-written DistributedDataParallel: throughput and lines of user code.

    python benchmarks/runtime_ddp.py [--steps 60] [--repeats 5] [--only cnn] [--on 8+4] [--limit-s 600]

Two jobs, each written twice (trials/beside/): a residual CNN with BatchNorm and SGD, and an LSTM of 2.1 million
parameters with Adam and clipped gradients. DDP uses torchrun and gloo. Both get the same pinned cores, threads, batch
and steps, and alternate. Throughput counts from the end of step 10 to the end of the last step; start-up, where DDP is
far slower, is excluded and paid once per number of processes (trials/beside/again.py). On heterogeneous devices DDP
splits its batch evenly. Lines of code exclude blanks, comments, docstrings and the networks. Exits with 1 if a ratio
is below 0.97 on equal devices or 1 on heterogeneous ones.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import itertools
import os
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measured import ROOT, Patience, save
from trials.beside.again import Failed, Torchrun
from trials.clocked import ENTRY, taken_s
from trials.desk import Desk, dealt, new_mark

from carpool.jobs.program import Program

BESIDE = ROOT / "benchmarks" / "trials" / "beside"
WARM = 10  # steps
PATIENCE_S = 600.0
LIKE, UNLIKE = 0.97, 1.0  # what is asked for, as a part of DDP's throughput


@dataclass(frozen=True, slots=True)
class Job:
    """A job that is written twice."""

    name: str
    argument: str  # what its size is called
    size: int
    batch_size: int


def jobs(cores: int) -> tuple[Job, ...]:
    """In sizes that make steps of tens of milliseconds, or a few times that where there are few cores."""
    few = cores < 8
    return (Job("cnn", "channels", 12 if few else 32, 128), Job("lstm", "hidden", 512, 32 if few else 128))


@dataclass(frozen=True, slots=True)
class Setup:
    """Devices that a job runs on."""

    cores: tuple[int, ...]  # of each device
    first: int  # the number of the first one, of all that the executor has

    @property
    def name(self) -> str:
        """Cores of each, as 8+4."""
        return "+".join(map(str, self.cores))

    @property
    def is_like(self) -> bool:
        """Whether all have as many cores."""
        return len(set(self.cores)) == 1


def setups(cores: int, first: int = 0) -> list[Setup]:
    """Two and four like devices, and where there are cores enough one with twice as many as the other."""
    dealt_cores = [(max(1, cores // number),) * number for number in (2, 4)]
    if cores >= 4:
        dealt_cores.append((cores // 2, cores // 4))
    firsts = [first + sum(len(earlier) for earlier in dealt_cores[:number]) for number in range(len(dealt_cores))]
    return [Setup(each, first) for each, first in zip(dealt_cores, firsts, strict=True)]


Case = tuple[Job, Setup]


class Contest:
    """Carpool and DDP by turns on one machine: an executor with all devices, and a torchrun for each number of them."""

    def __init__(self, folder: Path, desk: Desk, runs: dict[int, Torchrun], steps: int) -> None:
        self._folder, self._desk, self._runs, self._steps = folder, desk, runs, steps
        self._number = 0

    async def rate(self, way: str, job: Job, setup: Setup) -> float:
        """Samples per second of one training."""
        self._number += 1
        name = f"{way}-{self._number}"
        notes = self._folder / name
        notes.mkdir()
        if way == "ddp":
            lists = ":".join(",".join(map(str, device.cores)) for device in dealt(setup.cores))
            sizes = (str(job.size), str(job.batch_size), str(self._steps))
            await self._runs[len(setup.cores)].run(f"{BESIDE}/{job.name}_ddp.py", *sizes, lists, str(notes))
            (notes / "checkpoint.pt").unlink()
        else:
            arguments = {job.argument: job.size, "batch_size": job.batch_size, "steps": self._steps}
            entry = f"{BESIDE}/{job.name}.py:training"
            clocked = {"entry": entry, "notes": str(notes), "steps": self._steps, "args": arguments}
            self._desk.introduce(name, Program(entry=ENTRY, args=clocked, folder=str(self._folder)))
            self._desk.assign(name, *range(setup.first, setup.first + len(setup.cores)))
            digest = await self._desk.end_of(name)
            if digest.startswith("FAILED"):
                raise Failed(f"{job.name}: {digest}")
        return job.batch_size * (self._steps - WARM) / taken_s(notes, WARM, self._steps)


def judged(job: Job, setup: Setup, rates: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and the median of the ratios."""
    ratios = [ours / theirs for ours, theirs in zip(rates["carpool"], rates["ddp"], strict=True)]
    return {
        "job": job.name,
        "cores_of_devices": list(setup.cores),
        "like": setup.is_like,
        "carpool_samples_per_s": round(statistics.median(rates["carpool"]), 1),
        "ddp_samples_per_s": round(statistics.median(rates["ddp"]), 1),
        "ddp_step_ms": round(1e3 * job.batch_size / statistics.median(rates["ddp"]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "asked": LIKE if setup.is_like else UNLIKE,
    }


async def compare(contest: Contest, cases: Sequence[Case], options: argparse.Namespace) -> dict[str, Any]:
    """Every job on every setup, both ways by turns; all of them once, then all again."""
    rates: dict[Case, dict[str, list[float]]] = {case: {"carpool": [], "ddp": []} for case in cases}
    chosen = dict.fromkeys(job for job, _ in cases)
    results: dict[str, Any] = {"rows": [], "failed": [], "lines_of_user_code": counted(chosen), "steps": options.steps}
    patience = Patience(options.limit_s)
    for repeat, case in itertools.product(range(options.repeats), cases):
        if patience.is_over:
            break
        try:
            ways = ("carpool", "ddp") if repeat % 2 else ("ddp", "carpool")
            found = {way: await contest.rate(way, *case) for way in ways}
        except Failed as error:
            results["failed"].append(f"{case[0].name} on {case[1].cores}: {error}")
            print(results["failed"][-1], flush=True)
            continue
        for way, rate in found.items():
            rates[case][way].append(rate)
        results["rows"] = [judged(*done, rates[done]) for done in cases if rates[done]["carpool"]]
        save("runtime_ddp", results)
        show(judged(*case, rates[case]))
    for name, counts in results["lines_of_user_code"].items():
        print(f"{name:>5}: {counts['carpool']} lines of user code with carpool, {counts['ddp']} with DDP")
    short = [row for row in results["rows"] if row["ratio"] < row["asked"]]
    print(f"{len(results['rows']) - len(short)} of {len(results['rows'])} as asked", flush=True)
    return results


def show(row: dict[str, Any]) -> None:
    """One row."""
    kind = "like" if row["like"] else "unlike"
    print(
        f"{row['job']:>5} on {kind} devices of {'+'.join(map(str, row['cores_of_devices']))} cores: carpool "
        f"{row['carpool_samples_per_s']} samples/s, DDP {row['ddp_samples_per_s']} "
        f"(step {row['ddp_step_ms']} ms), ratio {row['ratio']} {row['ratios']}",
        flush=True,
    )


def counted(chosen: Iterable[Job]) -> dict[str, dict[str, int]]:
    """Lines of user code of each job, written each way."""
    ways = (("carpool", ""), ("ddp", "_ddp"))
    return {job.name: {way: lines_of_code(BESIDE / f"{job.name}{end}.py") for way, end in ways} for job in chosen}


def lines_of_code(path: Path) -> int:
    """Lines that are neither blank nor comment nor docstring; those that only time the benchmark are left out."""
    text = path.read_text(encoding="utf-8")
    documented = [
        node.body[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None
    ]
    words = {line for first in documented for line in range(first.lineno, (first.end_lineno or first.lineno) + 1)}
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and "clock" not in line.lower() and number not in words
        for number, line in enumerate(text.splitlines(), 1)
    )


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", help="one of the jobs")
    parser.add_argument("--on", default="", help="some of the devices, as 4+4+4+4,8+4; by default all")
    parser.add_argument("--limit-s", type=float, default=600.0, help="begin no comparison after so many seconds")
    return parser.parse_args(words)


def cases_of(options: argparse.Namespace, first: int = 0) -> list[Case]:
    """What is compared; the first device is given."""
    cores = len(os.sched_getaffinity(0))
    chosen = [job for job in jobs(cores) if options.only in {None, job.name}]
    wanted = options.on.split(",") if options.on else []
    return [(job, setup) for job in chosen for setup in setups(cores, first) if not wanted or setup.name in wanted]


def start_runs(folder: Path, cases: Iterable[Case], stack: contextlib.ExitStack) -> dict[int, Torchrun]:
    """A torchrun for each number of processes."""
    numbers = sorted({len(setup.cores) for _, setup in cases})
    return {number: stack.enter_context(Torchrun(number, folder / str(number))) for number in numbers}


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """With an executor and torchruns of its own."""
    cases = cases_of(options)
    with contextlib.ExitStack() as stack:
        runs = start_runs(folder, cases, stack)
        devices, *others = (setup.cores for setup in setups(len(os.sched_getaffinity(0))))
        desk = await Desk.open(folder / "state", devices, others=others, mark=new_mark(), patience_s=PATIENCE_S)
        try:
            return await compare(Contest(folder, desk, runs, options.steps), cases, options)
        finally:
            await desk.close()


def main() -> None:
    """Compare everything."""
    with tempfile.TemporaryDirectory() as name:
        results = asyncio.run(measure(Path(name), parsed()))
    is_short = any(row["ratio"] < row["asked"] for row in results["rows"])
    raise SystemExit(1 if is_short or results["failed"] else 0)


if __name__ == "__main__":
    main()
