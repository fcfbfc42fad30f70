"""Measures the parking of an unmodified script: seconds to free its device and to continue, and equal final weights.

Usage: PYTHONPATH=src python benchmarks/gpu_parking.py [--devices cuda:0] [--sizes 1,4,10,40] [--out FILE]

A plain PyTorch script trains with so many GB beside its model. It loses its device to a second script, gets it back
when that has ended, and finishes. Its weights are compared with those of an undisturbed run. The device must be free of
its memory while it is parked. JSON after each row; with ``--devices cpu:1`` it shows the same without a driver.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any, TypeVar

from measured import RESULTS, conditions

from carpool.core.messages import Assign, AssignApplied, Fact, JobFailed, JobFinished, Release, ReleaseApplied
from carpool.core.model import Allocation, JobId
from carpool.jobs.devices import parse_devices
from carpool.jobs.nvml import Nvml
from carpool.jobs.program import Program
from carpool.runtime.executor.client import ExecutorClient, ExecutorOptions
from carpool.runtime.executor.reports import Facts, Told

TIMEOUT_S = 180.0
SCRIPT = """
import os, sys, torch
torch.use_deterministic_algorithms(True)
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
ballast = torch.empty(int(float(sys.argv[1]) * 2**30), dtype=torch.uint8, device=device).fill_(7)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(int(sys.argv[2])):
    loss = model(torch.randn(512, 256, device=device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 50:
        loss.item()
        open(sys.argv[3] + ".begun", "w").close()
assert int(ballast[:: 1 << 20].sum()) == 7 * len(ballast[:: 1 << 20])
torch.save({name: value.cpu() for name, value in model.state_dict().items()}, sys.argv[3])
"""
F = TypeVar("F", AssignApplied, ReleaseApplied, JobFinished)


class Machine:
    """An executor with one device."""

    def __init__(self, client: ExecutorClient, folder: Path) -> None:
        self.client = client
        self.folder = folder
        self.facts: list[Fact] = []
        self.notes: list[str] = []
        self._generation = 0

    def add(self, job: str, size: float, steps: int, out: str) -> None:
        command = ("python", "train.py", f"{size:g}", str(steps), out)
        environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        program = Program(command=command, folder=str(self.folder), environment=environment)
        self.client.introduce(JobId(job), program, resume=False)

    async def assign(self, job: str) -> float:
        began, self._generation = time.monotonic(), self._generation + 1
        self.client.carry([Assign(JobId(job), Allocation.of(0), self._generation)])
        await self.until(job, AssignApplied)
        return time.monotonic() - began

    async def release(self, job: str) -> float:
        began, self._generation = time.monotonic(), self._generation + 1
        self.client.carry([Release(JobId(job), self._generation)])
        await self.until(job, ReleaseApplied)
        return time.monotonic() - began

    async def until(self, job: str, kind: type[F]) -> F:
        """Receive until a fact of this kind arrives."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                for fact in self.facts:
                    if isinstance(fact, JobFailed):
                        raise SystemExit(f"{fact.job} failed: {fact.error}; {self.notes}")
                    if isinstance(fact, kind) and fact.job == job:
                        self.facts.remove(fact)
                        return fact
                report = await self.client.receive()
                self.facts += report.facts if isinstance(report, Facts) else ()
                self.notes += [report.words] if isinstance(report, Told) else ()

    async def begun(self, out: str) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not (self.folder / f"{out}.begun").exists():  # noqa: ASYNC110 - the script knows no event
                await asyncio.sleep(0.01)


def used_gib(cuda: int | None) -> float | None:
    """Memory in use on the GPU."""
    nvml = Nvml.open() if cuda is not None else None
    if nvml is None or cuda is None:
        return None
    used = nvml.memory_bytes(cuda) - nvml.free_bytes(cuda)
    nvml.close()
    return round(used / 2**30, 2)


def digest(path: Path) -> str:
    """A digest of saved weights."""
    import torch

    values = torch.load(path, weights_only=True)
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in values.values())).hexdigest()[:16]


async def measure(devices: str, size: float, steps: int) -> dict[str, Any]:
    """One size: undisturbed, and parked once."""
    found = parse_devices(devices)[:1]
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
        client = await ExecutorClient.start(found, folder / "state", options=ExecutorOptions(mps=False))
        machine = Machine(client, folder)
        for job, job_size in (("alone", size), ("parked", size), ("urgent", 0.1)):
            machine.add(job, job_size, steps if job != "urgent" else 100, f"{job}.pt")
        await machine.assign("alone")
        await machine.until("alone", JobFinished)
        await machine.assign("parked")
        await machine.begun("parked.pt")
        running = used_gib(found[0].cuda)
        park_s = await machine.release("parked")
        while_parked = used_gib(found[0].cuda)
        await machine.assign("urgent")
        await machine.until("urgent", JobFinished)
        restore_s = await machine.assign("parked")
        await machine.until("parked", JobFinished)
        await client.stop(checkpoint=False)
        return {
            "size_gib": size,
            "park_s": round(park_s, 3),
            "restore_s": round(restore_s, 3),
            "used_gib_running": running,
            "used_gib_parked": while_parked,
            "weights_equal": digest(folder / "alone.pt") == digest(folder / "parked.pt"),
            "notes": [note for note in machine.notes if "park" in note or "cannot" in note],
        }


def main() -> None:
    """Measure each size and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cuda:0")
    parser.add_argument("--sizes", default="1,4,10,40", help="GiB beside the model")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_parking.json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for size in map(float, options.sizes.split(",")):
        rows.append(asyncio.run(measure(options.devices, size, options.steps)))
        print(json.dumps(rows[-1]), flush=True)
        options.out.write_text(json.dumps({**conditions(), "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
