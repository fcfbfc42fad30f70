"""Runs an older and a younger real training on this machine, under fixed splits and policies."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trials.late import LateRun

from carpool.backends.run_folder import RunFolder
from carpool.core.model import Phase
from carpool.core.policy import Policy
from carpool.jobs.devices import LocalDevice, parse_devices
from carpool.jobs.job_file import parse_jobs
from carpool.policies.registry import parse_policy
from carpool.service.daemon.batch_run import RunRequest

HERE = Path(__file__).resolve().parent
Seconds = dict[str, float]


def once(policy: Policy, devices: Sequence[LocalDevice], jobs: Mapping[str, Any], gap_s: float = 0.0) -> Seconds:
    """One run; how long each job took from its submission, and the whole."""
    with tempfile.TemporaryDirectory() as place:
        listed = parse_jobs(jobs, HERE, "benchmark")
        request = RunRequest(
            "phases", listed, tuple(devices), repr(policy), "benchmark", find_policy=lambda text: policy
        )
        run = LateRun.prepare(request, RunFolder(Path(place)), {"younger": gap_s})
        asyncio.run(run.run())
        accounts = run.accounting.accounts
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
