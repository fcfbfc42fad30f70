"""An older and a younger real training on the devices of this machine, under fixed splits and policies."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from carpool.backends.local import Link
from carpool.backends.runfolder import RunFolder
from carpool.backends.running import Asked, LocalRun
from carpool.core.messages import JobFinished, JobSubmitted, Order
from carpool.core.model import JobId, JobSpec, Phase
from carpool.core.policy import Policy
from carpool.policies.registry import parse_policy
from carpool.runtime.devices import LocalDevice, parse_devices
from carpool.runtime.jobfile import parse_jobs
from carpool.runtime.link import ExecutorLink
from carpool.runtime.program import Program
from carpool.runtime.reports import Facts, Report

HERE = Path(__file__).resolve().parent
Seconds = dict[str, float]


class LateLink:
    """An executor's link through which one more job is submitted after a while."""

    def __init__(self, link: Link, spec: JobSpec, after_s: float) -> None:
        self._link = link
        self._late: JobSpec | None = spec
        self._due = time.monotonic() + after_s
        self._hearing: asyncio.Task[Report] | None = None

    def introduce(self, job: JobId, program: Program, *, resume: bool = False) -> None:
        """As it is."""
        self._link.introduce(job, program, resume=resume)

    def carry(self, orders: Sequence[Order]) -> None:
        """As it is."""
        self._link.carry(orders)

    async def receive(self) -> Report:
        """What the executor says, or the late submission when its time has come or nothing else is left."""
        if self._hearing is None:
            self._hearing = asyncio.create_task(self._link.receive())
        if self._late is not None:
            heard, _ = await asyncio.wait({self._hearing}, timeout=max(0.0, self._due - time.monotonic()))
            if not heard:
                spec, self._late = self._late, None
                return Facts((JobSubmitted(spec),))
        report = await self._hearing
        self._hearing = None
        if (
            self._late is not None
            and isinstance(report, Facts)
            and any(isinstance(f, JobFinished) for f in report.facts)
        ):
            spec, self._late = self._late, None  # else the run would end before its time has come
            return Facts((*report.facts, JobSubmitted(spec)))
        return report

    async def stop(self, *, checkpoint: bool) -> None:
        """As it is."""
        await self._link.stop(checkpoint=checkpoint)


class Staggered(LocalRun):
    """A run whose second job is submitted some seconds after the first."""

    def __init__(self, asked: Asked, folder: RunFolder, gap_s: float) -> None:
        super().__init__(asked, folder)
        self._gap_s = gap_s
        self._first = self._first[:1]

    async def start(self, devices: Sequence[LocalDevice], state: Path) -> Link:
        """The executor of this machine, and the second job behind it."""
        link: Link = await ExecutorLink.start(devices, state)
        return link if len(self.asked.jobs) == 1 else LateLink(link, self.asked.jobs[1].spec, self._gap_s)


def once(policy: Policy, devices: Sequence[LocalDevice], jobs: Mapping[str, Any], gap_s: float = 0.0) -> Seconds:
    """One run; how long each job took from its submission, and the whole."""
    with tempfile.TemporaryDirectory() as place:
        listed = parse_jobs(jobs, HERE, "benchmark")
        asked = Asked("phases", listed, tuple(devices), policy, repr(policy), "benchmark")
        run = Staggered(asked, RunFolder(Path(place)), gap_s)
        asyncio.run(run.go(run.start))
        accounts = run.ledger.accounts
        failed = [account.error for account in accounts.values() if account.phase is not Phase.FINISHED]
        if failed:
            raise SystemExit(f"{policy!r}: {failed}")
        took = {str(name): account.jct_s or 0.0 for name, account in accounts.items()}
        moves = float(sum(len(account.decisions) for account in accounts.values()))
        return took | {"total": max(account.ended_at or 0.0 for account in accounts.values()), "decisions": moves}


def jobs_of(names: Sequence[str], entries: Sequence[str], batch: Mapping[str, Any], devices: int) -> dict[str, Any]:
    """A job file's content: elastic from one device to all."""
    return {
        "job": [
            {
                "name": name,
                "entry": f"phased.py:{entry}",
                "devices": devices,
                "min_devices": 1,
                "max_devices": devices,
                "batch": dict(batch),
                "seed": seed,
            }
            for seed, (name, entry) in enumerate(zip(names, entries, strict=True))
        ]
    }


def lanes_of(devices: Sequence[LocalDevice], lanes: int) -> list[LocalDevice]:
    """One GPU as several equal devices; how much of it each may use is for MPS to say."""
    (gpu,) = devices
    return [
        replace(gpu, id=lane, name=f"{gpu.name}/{lane}", memory_bytes=gpu.memory_bytes // lanes)
        for lane in range(lanes)
    ]


def live(
    text: str, repeats: int, split: Callable[[int, int], Policy], policies: Sequence[str], lanes: int
) -> dict[str, Any]:
    """Every split and policy, for a batch per job and per device; the younger comes after two thirds of a lone run."""
    devices = parse_devices(text)
    if len(devices) == 1:
        if devices[0].cuda is None:
            raise SystemExit(f"devices {text!r} are one; two jobs take at least two")
        os.environ.setdefault("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", str(100 // lanes))
        devices = lanes_of(devices, lanes)
    count = len(devices)
    is_cuda = text.startswith("cuda")
    batch = 512 if is_cuda else 256
    scenes = {"job": ({"size": batch}, ("vgg16", "vgg16") if is_cuda else ("small", "small"))}
    scenes["device"] = ({"size": batch // count, "per": "device"}, scenes["job"][1])
    if is_cuda:
        scenes["mixed"] = ({"size": batch}, ("resnet50", "vgg16"))
    quarter = max(1, count // 4)
    ratios = sorted({(count - quarter, quarter), (count - count // 2, count // 2), (quarter, count - quarter)})
    rows: dict[str, Callable[[], Policy]] = {f"{a}-{b}": _split(split, a, b) for a, b in reversed(ratios)}
    rows |= {"one after another": lambda: parse_policy("fifo")} | {name: _named(name) for name in policies}
    found: dict[str, Any] = {"devices": text}
    for scene, (size, entries) in scenes.items():
        alone = once(parse_policy("fifo"), devices, jobs_of(["older"], entries[:1], size, count))["total"]
        print(f"\nbatch per {scene}, {count} devices; alone {alone:.1f} s, the younger comes after {alone / 1.5:.1f} s")
        found[scene] = {"alone_s": alone, "runs": []}
        for name, make in rows.items():
            for _ in range(repeats):
                taken = once(make(), devices, jobs_of(["older", "younger"], entries, size, count), alone / 1.5)
                found[scene]["runs"].append({"policy": name} | {key: round(value, 2) for key, value in taken.items()})
                told = "  ".join(f"{key} {taken[key]:6.1f}" for key in ("total", "older", "younger"))
                print(f"  {name:26} {told} s  {taken['decisions']:.0f} decisions", flush=True)
    return found


def _split(split: Callable[[int, int], Policy], older: int, younger: int) -> Callable[[], Policy]:
    return lambda: split(older, younger)


def _named(text: str) -> Callable[[], Policy]:
    return lambda: parse_policy(text)
