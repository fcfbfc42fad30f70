"""Measures how long a running job stalls when resized 4 to 3 to 4 devices, beside restarting torchrun.

stall = gap between the last step of the old process group epoch and the first of the new one, less the median step.
Workers note the ends of steps (after_update). Usage: python benchmarks/runtime_resize.py [--resizes 20]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measured import ROOT, save

from carpool.core.messages import Assign, AssignApplied, JobFailed
from carpool.core.model import Allocation, JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.program import Program
from carpool.runtime.executor.client import ExecutorClient, ExecutorOptions
from carpool.runtime.executor.reports import Facts, Gone

JOB = JobId("resized")
PATIENCE_S = 120.0

# 1.9 million parameters; one file serves both sides.
ENTRY = """
import os, sys, time
import torch
from torch import nn

NOTES = os.environ["NOTES"]

def note(step):
    with open(f"{NOTES}/{os.getpid()}", "a") as file:
        file.write(f"{step} {time.monotonic_ns()}\\n")

def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    return model, torch.randn(4096, 784), torch.randint(0, 10, (4096,))

def training():
    from carpool import Stop, Training
    from carpool.runtime.data.datasets import TensorData
    model, inputs, labels = parts()
    return Training(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        dataset=TensorData(inputs, labels), batch_size=256, stop=Stop(steps=1_000_000),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        after_update=lambda model, step: note(step),
    )

def ddp(checkpoint):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model, inputs, labels = parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if os.path.exists(checkpoint):
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    wrapped = nn.parallel.DistributedDataParallel(model)
    rank, size = dist.get_rank(), dist.get_world_size()
    each = 256 // size
    for step in range(1, 1_000_000):
        start = (step * 256 + rank * each) % 3800
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(inputs[start:start + each]), labels[start:start + each]).backward()
        optimizer.step()
        note(step)
        if step == 3 and rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint + ".part")
            os.rename(checkpoint + ".part", checkpoint)

if __name__ == "__main__":
    ddp(sys.argv[1])
"""


def read_notes(folder: Path) -> dict[int, list[int]]:
    """For every step the instants at which a worker ended it."""
    steps: dict[int, list[int]] = {}
    for file in folder.iterdir():
        for line in file.read_text(encoding="ascii").splitlines():
            step, at = line.split()
            steps.setdefault(int(step), []).append(int(at))
    return steps


def stalls(notes: dict[int, list[int]]) -> tuple[dict[str, list[float]], float]:
    """Stalls in ms by direction, and the median step: a step counts as ended when its last worker has ended it."""
    ends = {step: max(instants) for step, instants in notes.items()}
    gaps = {step: (ends[step] - ends[step - 1]) / 1e6 for step in sorted(ends) if step - 1 in ends}
    median = statistics.median(gaps.values())
    found: dict[str, list[float]] = {}
    for step, gap in gaps.items():
        before, after = len(notes[step - 1]), len(notes[step])
        if {before, after} == {3, 4}:
            found.setdefault(f"{before} to {after}", []).append(gap - median)
    return found, median


async def resize(folder: Path, resizes: int, *, exact: bool) -> tuple[dict[str, list[float]], float]:
    """Resize a running job many times."""
    notes = folder / "notes"
    notes.mkdir()
    cores = sorted(os.sched_getaffinity(0))
    devices = [LocalDevice(i, f"cpu:{i}", "cpu1", cores=(cores[i % len(cores)],)) for i in range(4)]
    link = await ExecutorClient.start(devices, folder / "state", options=ExecutorOptions())
    try:
        environment = {"NOTES": str(notes)}
        program = Program(entry="entry.py:training", folder=str(folder), exact=exact, environment=environment)
        link.introduce(JOB, program)
        for number in range(resizes + 1):
            width = 3 if number % 2 else 4
            link.carry([Assign(JOB, Allocation.of(*range(width)), number + 1)])
            await asyncio.wait_for(applied(link, number + 1), PATIENCE_S)
            print(f"\r{number} of {resizes} resizes", end="", flush=True, file=sys.stderr)
            await some_steps(notes, 15)
    finally:
        await link.stop(checkpoint=False)
    print(file=sys.stderr)
    return stalls(read_notes(notes))


async def applied(link: ExecutorClient, generation: int) -> None:
    """Wait until an order is answered."""
    while True:
        report = await link.receive()
        assert not isinstance(report, Gone), report
        for fact in report.facts if isinstance(report, Facts) else ():
            assert not isinstance(fact, JobFailed), fact
            if isinstance(fact, AssignApplied) and fact.generation == generation:
                return


async def some_steps(notes: Path, count: int) -> None:
    """Let a number of steps pass."""
    now = max(read_notes(notes), default=0)
    while max(read_notes(notes), default=0) < now + count:  # noqa: ASYNC110 - steps are made in other processes
        await asyncio.sleep(0.2)


def restart(folder: Path, times: int) -> list[float]:
    """Kill torchrun with 4 processes and start it again with 3: ms from the kill to the first new step."""
    taken = []
    for number in range(times):
        checkpoint = folder / f"{number}.pt"
        first = torchrun(folder, 4, folder / f"ddp-{number}-4", checkpoint)
        wait_for_step(folder / f"ddp-{number}-4", 10)
        killed_at = time.monotonic_ns()
        end(first)
        second = torchrun(folder, 3, folder / f"ddp-{number}-3", checkpoint)
        wait_for_step(folder / f"ddp-{number}-3", 1)
        end(second)
        taken.append((max(read_notes(folder / f"ddp-{number}-3")[1]) - killed_at) / 1e6)
        print(f"torchrun restart {number + 1} of {times}: {taken[-1]:.0f} ms", file=sys.stderr)
    return taken


def torchrun(folder: Path, processes: int, notes: Path, checkpoint: Path) -> subprocess.Popen[bytes]:
    """Start the same model with DDP over gloo."""
    notes.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    env = {**os.environ, "NOTES": str(notes), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    script = [str(folder / "entry.py"), str(checkpoint)]
    return subprocess.Popen([*command, *script], env=env, start_new_session=True, stderr=subprocess.DEVNULL)


def wait_for_step(notes: Path, step: int) -> None:
    """Wait until every process has made a step."""
    deadline = time.monotonic() + PATIENCE_S
    while max(read_notes(notes), default=0) < step:
        assert time.monotonic() < deadline, f"torchrun makes no step in {PATIENCE_S:.0f} s"
        time.sleep(0.02)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill torchrun and its processes, each of which leads a session of its own and would live on."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
    for pid in (process.pid, *map(int, found)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    """Measure both and print them beside each other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resizes", type=int, default=20)
    parser.add_argument("--restarts", type=int, default=3)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for mode in ("default", "exact"):
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / "entry.py").write_text(ENTRY, encoding="utf-8")
            found, median = asyncio.run(resize(Path(name), options.resizes, exact=mode == "exact"))
        every = [stall for direction in found.values() for stall in direction]
        by_direction = {direction: round(statistics.median(values), 1) for direction, values in found.items()}
        results[mode] = {
            "median_stall_ms": round(statistics.median(every), 1),
            "worst_stall_ms": round(max(every), 1),
            "median_by_direction_ms": by_direction,
            "median_step_ms": round(median, 1),
            "resizes": len(every),
            "load_average": os.getloadavg()[0],  # others on the machine make all of it slower
        }
        print(f"{mode}: {results[mode]}")
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "entry.py").write_text(ENTRY, encoding="utf-8")
        taken = restart(Path(name), options.restarts)
    results["torchrun"] = {
        "median_restart_ms": round(statistics.median(taken)),
        "restarts": len(taken),
        "load_average": os.getloadavg()[0],
    }
    ratio = results["torchrun"]["median_restart_ms"] / max(results["default"]["median_stall_ms"], 0.1)
    print(f"torchrun: {results['torchrun']}, {ratio:.0f} x the stall; wrote {save('runtime_resize', results)}")


if __name__ == "__main__":
    main()
