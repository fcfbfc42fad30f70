"""Carpool beside hand-written DistributedDataParallel: throughput on like and unlike devices, and lines of user code.

    python benchmarks/runtime_ddp.py [--steps 60] [--repeats 5] [--only cnn]

Two jobs, each written twice (trials/beside/): a residual CNN with BatchNorm and SGD, and an LSTM of 2.1 million
parameters with Adam and clipped gradients. DDP is started by torchrun with gloo; both get the same cores, pinned, as
many threads as cores, the same batch and the same number of steps, and take turns. Throughput counts from the end of
step 10 to the end of the last step, as the workers saw them: start-up, where DDP is slower by far, is left out. Unlike
devices: one has twice the cores of the other; DDP cuts its batch evenly, as it does. Lines of code: neither blank nor
comment nor docstring, the networks counted for neither. Exits with 1 if a ratio is below 0.97 on like devices or 1 on
unlike ones.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measured import ROOT, save
from trials.clocked import ENTRY, taken_s
from trials.desk import Desk, dealt, new_mark

from carpool.runtime.program import Program

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


async def with_carpool(folder: Path, job: Job, cores: Sequence[int], steps: int) -> float:
    """Samples per second."""
    notes = folder / "notes"
    notes.mkdir()
    desk = await Desk.open(folder / "state", cores, mark=new_mark(), patience_s=PATIENCE_S)
    try:
        arguments = {job.argument: job.size, "batch_size": job.batch_size, "steps": steps}
        clocked = {"entry": f"{BESIDE}/{job.name}.py:training", "notes": str(notes), "steps": steps, "args": arguments}
        desk.introduce(job.name, Program(entry=ENTRY, args=clocked, folder=str(folder)))
        desk.assign(job.name, *range(len(cores)))
        digest = await desk.end_of(job.name)
    finally:
        await desk.close()
    if digest.startswith("FAILED"):
        raise SystemExit(f"{job.name}: {digest}")
    return job.batch_size * (steps - WARM) / taken_s(notes, WARM, steps)


def with_ddp(folder: Path, job: Job, cores: Sequence[int], steps: int) -> float:
    """Samples per second."""
    notes = folder / "notes"
    notes.mkdir()
    lists = ":".join(",".join(map(str, device.cores)) for device in dealt(cores))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(cores)}"]
    script = [f"{BESIDE}/{job.name}_ddp.py", str(job.size), str(job.batch_size), str(steps), lists, str(notes)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}/benchmarks", "OMP_NUM_THREADS": str(cores[0])}
    ran = subprocess.run([*command, *script], env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if ran.returncode:
        raise SystemExit(f"torchrun ended with {ran.returncode}: {ran.stderr[-2000:]}")
    (notes / "checkpoint.pt").unlink()
    return job.batch_size * (steps - WARM) / taken_s(notes, WARM, steps)


def compare(job: Job, cores: Sequence[int], options: argparse.Namespace) -> dict[str, Any]:
    """Both by turns; medians, and the median of the ratios."""
    rates: dict[str, list[float]] = {"carpool": [], "ddp": []}
    for repeat in range(options.repeats):
        for way in ("carpool", "ddp") if repeat % 2 else ("ddp", "carpool"):
            with tempfile.TemporaryDirectory() as name:
                if way == "ddp":
                    rate = with_ddp(Path(name), job, cores, options.steps)
                else:
                    rate = asyncio.run(with_carpool(Path(name), job, cores, options.steps))
            rates[way].append(rate)
    ratios = [ours / theirs for ours, theirs in zip(rates["carpool"], rates["ddp"], strict=True)]
    is_like = len(set(cores)) == 1
    found = {
        "job": job.name,
        "cores_of_devices": list(cores),
        "like": is_like,
        "carpool_samples_per_s": round(statistics.median(rates["carpool"]), 1),
        "ddp_samples_per_s": round(statistics.median(rates["ddp"]), 1),
        "ddp_step_ms": round(1e3 * job.batch_size / statistics.median(rates["ddp"]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "asked": LIKE if is_like else UNLIKE,
    }
    print(
        f"{job.name:>5} on {'like' if is_like else 'unlike'} devices of {'+'.join(map(str, cores))} cores: carpool "
        f"{found['carpool_samples_per_s']} samples/s, DDP {found['ddp_samples_per_s']} "
        f"(step {found['ddp_step_ms']} ms), ratio {found['ratio']} {found['ratios']}",
        flush=True,
    )
    return found


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


def main() -> None:
    """Compare everything."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", help="one of the jobs")
    options = parser.parse_args()
    chosen = [job for job in jobs(cores) if options.only in {None, job.name}]
    setups = [(max(1, cores // number),) * number for number in (2, 4)]
    if cores >= 4:
        setups.append((cores // 2, cores // 4))
    rows = [compare(job, setup, options) for job in chosen for setup in setups]
    lines = {
        job.name: {
            way: lines_of_code(BESIDE / f"{job.name}{end}.py") for way, end in (("carpool", ""), ("ddp", "_ddp"))
        }
        for job in chosen
    }
    for name, counts in lines.items():
        print(f"{name:>5}: {counts['carpool']} lines of user code with carpool, {counts['ddp']} with DDP")
    path = save("runtime_ddp", {"rows": rows, "lines_of_user_code": lines, "steps": options.steps})
    short = [row for row in rows if row["ratio"] < row["asked"]]
    print(f"{len(rows) - len(short)} of {len(rows)} as asked; wrote {path}")
    raise SystemExit(1 if short else 0)


if __name__ == "__main__":
    main()
