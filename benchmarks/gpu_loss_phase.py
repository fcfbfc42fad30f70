"""An older and a younger training over four equal lanes of one GPU, under fixed splits and policies, within minutes.

Usage: python benchmarks/gpu_loss_phase.py [--devices cuda|cpu:4x1] [--alone S] [--budget S] [--repeats N]
                                           [--scenes job,device,mixed] [--rows 2-2,carpool] [--pixels FILE]
       python benchmarks/gpu_loss_phase.py --keep-pixels FILE --cifar10 NPZ
As published: the older trains alone on all lanes; the younger is submitted after two thirds of the time that a lone
training takes; both end at the loss (mean of ten steps) that a lone training reaches in S seconds. Lanes are caps of a
quarter of the multiprocessors each (MPS), a device each to the scheduler, with processes kept warm; their gradients
meet in host memory. Policies come last and begin with the speeds that the fixed splits have shown. No row is begun that
would not fit into the budget; what is measured is written after every row.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from colocation.daemon import mps
from loss_phase import PUBLISHED, Split
from measured import conditions, save
from trials.late import LateRun
from trials.phased import keep_pixels
from trials.phases import lanes_of

from carpool.backends.profile_library import ProfileLibrary
from carpool.backends.run_folder import RunFolder
from carpool.core.model import Phase
from carpool.core.policy import Policy
from carpool.jobs.devices import LocalDevice, parse_devices
from carpool.jobs.job_file import ListedJob, parse_jobs
from carpool.policies.registry import parse_policy
from carpool.runtime.executor.client import ExecutorClient, ExecutorOptions
from carpool.service.daemon.batch_run import RunRequest
from tests.support.shared_executor import SharedExecutor

HERE = Path(__file__).resolve().parent / "trials"
FIRST = ("2-2", "3-1", "1-3", "one after another", "loss-phase", "carpool")
FEWER = ("2-2", "3-1", "loss-phase", "carpool")
ORDER = [  # the most telling rows first: time may end before the rows do
    *[("job", row) for row in FIRST],
    *[(scene, row) for scene in ("device", "mixed") for row in FEWER],
    *[(scene, row) for scene in ("device", "mixed") for row in ("1-3", "one after another")],
]
SCENES: dict[str, tuple[str, str, bool]] = {  # models of the older and the younger; whether the batch is per device
    "job": ("vgg16", "vgg16", False),
    "device": ("vgg16", "vgg16", True),
    "mixed": ("resnet50", "vgg16", False),
}
NUM_LANES = 4
_FIRST = 10  # steps that show how fast a training is
WARM = 2  # processes kept ready on each lane: starts take as long as many steps
WARM_S = 8.0


class Table:
    """All rows, one executor, and the time that is left."""

    def __init__(
        self, devices: list[LocalDevice], root: Path, lender: SharedExecutor, batch: int, budget_s: float
    ) -> None:
        self.devices, self.root, self.lender, self.batch = devices, root, lender, batch
        self.until = time.monotonic() + budget_s
        self.longest_s = 0.0
        self.number = 0

    async def run(self, policy: Policy, jobs: list[dict[str, Any]], gap_s: float = 0.0) -> dict[str, float]:
        """One run; how long each job took from its submission, and the whole."""
        self.number += 1
        began = time.monotonic()
        rows = [{**job, "name": f"{job['name']}-{self.number}"} for job in jobs]
        listed: tuple[ListedJob, ...] = parse_jobs({"job": rows}, HERE, "benchmark")
        request = RunRequest(
            "phases",
            listed,
            tuple(self.devices),
            repr(policy),
            "benchmark",
            find_policy=lambda text: policy,
            profiles=ProfileLibrary(self.root).beliefs(listed),
        )
        late = {rows[-1]["name"]: gap_s}
        folder = RunFolder(self.root / "runs" / str(self.number))
        run = LateRun.prepare(request, folder, late, self.lender.lend)
        await asyncio.wait_for(run.run(), max(1.0, self.until - time.monotonic()))
        accounts = list(run.accounting.accounts.values())
        if failed := [account.error for account in accounts if account.phase is not Phase.FINISHED]:
            raise RuntimeError("; ".join(failed))
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        took = {job["name"]: account.jct_s or 0.0 for job, account in zip(jobs, accounts, strict=True)}
        steps = {f"{job['name']}_steps": account.done for job, account in zip(jobs, accounts, strict=True)}
        moves = float(sum(len(account.decisions) for account in accounts))
        total = max(account.ended_at or 0.0 for account in accounts)
        return took | steps | {"total": total, "decisions": moves} | _at_the_end(folder, rows[0]["name"])

    def job(self, name: str, entry: str, args: Mapping[str, Any], *, per_device: bool) -> dict[str, Any]:
        """A job of a job file: elastic from one lane to all."""
        size = {"size": self.batch // NUM_LANES, "per": "device"} if per_device else {"size": self.batch}
        shape = {
            "devices": NUM_LANES,
            "min_devices": 1,
            "max_devices": NUM_LANES,
            "deterministic": False,
            "graph": False,
        }
        seed = 0 if name == "older" else 1
        return {"name": name, "entry": f"phased.py:{entry}", "args": dict(args), "batch": size, "seed": seed, **shape}

    def has_time(self) -> bool:
        """Whether another row like the longest would fit."""
        return time.monotonic() + 1.2 * self.longest_s < self.until


def _at_the_end(folder: RunFolder, job: str) -> dict[str, float]:
    """The mean of the last few losses that a job has reported, and its speed then."""
    lines = (folder.job(job) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row.get("loss") is not None][-5:]
    return {key: sum(row[key] for row in rows) / len(rows) for key in ("loss", "steps_per_s")}


def policy_of(row: str) -> Policy:
    """A fixed split, or a policy by name."""
    if row == "one after another":
        return parse_policy("fifo")
    older, dash, younger = row.partition("-")
    return Split(int(older), int(younger)) if dash and older.isdecimal() else parse_policy(row)


class Play:
    """The rows of all scenes, as far as they are known."""

    def __init__(self, table: Table, alone_s: float, *, is_cuda: bool) -> None:
        self._table, self._alone_s, self._is_cuda = table, alone_s, is_cuda
        self._alone: dict[tuple[str, bool], dict[str, float]] = {}
        self.scenes: dict[str, dict[str, Any]] = {}

    async def row(self, scene: str, row: str) -> None:
        """Measure one row, after what it is compared with."""
        older, younger, per_device = SCENES[scene] if self._is_cuda else ("paced", "paced", SCENES[scene][2])
        known = self.scenes.setdefault(scene, {"published_pct": PUBLISHED[scene], "rows": []})
        if not self._table.has_time():
            known["rows"].append({"policy": row, "error": "no time left"})
            return
        alone = {entry: await self._lone(entry, per_device=per_device) for entry in (older, younger)}
        known |= {"alone": alone, "gap_s": alone[older]["total"] / 1.5}
        jobs = [
            self._table.job(name, entry, {"target": round(alone[entry]["loss"], 3)}, per_device=per_device)
            for name, entry in (("older", older), ("younger", younger))
        ]
        found = await self._table.run(policy_of(row), jobs, known["gap_s"])
        known["rows"].append({"policy": row} | {key: round(value, 3) for key, value in found.items()})
        base = known["rows"][0]
        words = [
            f"{key} {found[key]:5.1f} s{_change(found[key], base.get(key))}" for key in ("total", "older", "younger")
        ]
        print(f"{scene:7} {row:18} {'  '.join(words)}  {found['decisions']:.0f} decisions", flush=True)

    async def _lone(self, entry: str, *, per_device: bool) -> dict[str, float]:
        """One training on all lanes, after a few steps that show its speed: how long it takes, the loss it reaches."""
        key = (entry, per_device)
        if key not in self._alone:
            steps = _FIRST
            for _ in range(2):
                jobs = [self._table.job("older", entry, {"steps": steps}, per_device=per_device)]
                found = await self._table.run(policy_of("4-0"), jobs)
                steps = max(2 * _FIRST, round(self._alone_s * found["steps_per_s"]))
            self._alone[key] = found
            told = f"{found['older_steps']:.0f} steps in {found['total']:.1f} s to a loss of {found['loss']:.3f}"
            print(f"        {entry} alone: {told}, {found['steps_per_s']:.1f} steps/s", flush=True)
        return self._alone[key]


def _change(now: float, before: float | None) -> str:
    return f" ({100.0 * (now / before - 1.0):+6.2f} %)" if before else ""


def _keep(results: Mapping[str, Any]) -> None:
    """What is measured by now, where a machine that may go away hands files out."""
    if place := os.environ.get("OUT"):
        document = {"schema": 1, "benchmark": "gpu_loss_phase", **conditions(), "results": results}
        (Path(place) / "gpu_loss_phase.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


async def measure(options: argparse.Namespace, environment: dict[str, str], root: Path) -> dict[str, Any]:
    """All scenes under one executor."""
    devices = list(parse_devices(options.devices, oversubscribe=True))
    is_cuda = devices[0].cuda is not None
    if is_cuda:
        devices = lanes_of(devices, NUM_LANES)
    warm = WARM if is_cuda else 0
    chosen = ExecutorOptions(mps=False, warm=warm, environment=environment)
    lender = SharedExecutor(await ExecutorClient.start(devices, root / "state", options=chosen))
    if warm:
        await asyncio.sleep(WARM_S)  # the first row shall find them like the others
    table = Table(devices, root, lender, 512 if is_cuda else 256, options.budget)
    play = Play(table, options.alone, is_cuda=is_cuda)
    images = ("CIFAR-10, the first 10,240" if options.pixels else "made up") if is_cuda else "digits, paced"
    results = {"devices": options.devices, "caps": bool(environment), "images": images, "scenes": play.scenes}
    try:
        for scene, row in ORDER * options.repeats:
            if scene not in options.scenes or row not in options.rows or (not is_cuda and scene == "mixed"):
                continue
            try:
                await play.row(scene, row)
            except (RuntimeError, TimeoutError) as error:
                play.scenes[scene]["rows"].append({"policy": row, "error": f"{type(error).__name__}: {error}"[:300]})
                print(f"{scene:7} {row:18} {type(error).__name__}: {error}"[:300], flush=True)
            _keep(results)
    finally:
        await lender.close()
    return results


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--devices", default="cuda", help="one GPU, or four cpu devices to try it out")
    parser.add_argument("--alone", type=float, default=4.0, help="seconds of a lone training, whose loss is the target")
    parser.add_argument(
        "--scenes", type=lambda text: text.split(","), default=list(SCENES), help=f"some of {','.join(SCENES)}"
    )
    parser.add_argument(
        "--rows", type=lambda text: text.split(","), default=list(FIRST), help=f"some of {','.join(FIRST)}"
    )
    parser.add_argument("--repeats", type=int, default=1, help="of all rows, one round after another")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds for all rows")
    parser.add_argument("--out", default="", help="name of the result file, without .json")
    parser.add_argument("--pixels", default="", help="decoded images, as --keep-pixels writes them")
    parser.add_argument(
        "--keep-pixels", default="", metavar="FILE", help="only write decoded images to FILE.pixels.npz"
    )
    parser.add_argument("--cifar10", default="", help="the JPEG file they are decoded from")
    options = parser.parse_args()
    if options.keep_pixels:
        keep_pixels(options.cifar10, Path(options.keep_pixels), 10_240)
        return
    if options.pixels:
        os.environ["CARPOOL_CIFAR10"] = str(Path(options.pixels).resolve())
    with ExitStack() as stack:
        environment: dict[str, str] = {}
        if options.devices.startswith("cuda") and (found := stack.enter_context(mps())):
            environment = {**found, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // NUM_LANES)}
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        results = asyncio.run(measure(options, environment, root))
    name = options.out or ("gpu_loss_phase" if options.devices.startswith("cuda") else "loss_phase_lanes_cpu")
    print(f"wrote {save(name, results)}")


if __name__ == "__main__":
    main()
