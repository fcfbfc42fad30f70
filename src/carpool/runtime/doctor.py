"""Environment diagnosis: tries CUDA, graphs, MPS, NCCL and shared memory, and suggests fixes."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from carpool.jobs.devices import Gpu, list_gpus
from carpool.runtime.process.shared_memory import new_memory_file
from carpool.runtime.sharing.mps_daemon import MpsDaemon, MpsUnavailable

_TRIED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One ability."""

    name: str
    is_there: bool
    found: str  # in words
    way_out: str = ""  # where it is missing


def examine() -> Iterator[Finding]:
    """Look at everything, one finding after another."""
    yield Finding("Python", True, platform.python_version())
    yield _cores()
    yield _shared_memory()
    torch = _package("torch", "torch", "No real trainings without it: pip install 'carpool[torch]'.")
    yield torch
    gpus = list_gpus() if torch.is_there else []
    yield _gpus(gpus)
    yield from _on_gpus(gpus)
    if torch.is_there:
        yield _tried("gloo", _gloo, "Jobs on several machines need it; trainings on one machine do not.")
    yield _package("Ray", "ray", "Only for clusters under Ray: pip install 'carpool[ray]'.")
    yield _package("Flower", "flwr", "Only for federations: pip install 'carpool[federated]'.")


def _cores() -> Finding:
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    words = f"{usable} of {there} usable" if usable < there else f"{usable} usable"
    return Finding("cores", True, words)


def _shared_memory() -> Finding:
    try:
        fd = new_memory_file("doctor", _TRIED_BYTES)
        try:
            os.pwrite(fd, b"\1", _TRIED_BYTES - 1)
        finally:
            os.close(fd)
    except OSError as error:
        return Finding("shared memory", False, str(error), "Workers exchange gradients in it: allow memfd_create.")
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    return Finding("shared memory", True, f"memory files work; /dev/shm, which is not needed, has {free / 1e9:.1f} GB")


def _package(name: str, package: str, way_out: str) -> Finding:
    if importlib.util.find_spec(package) is None:
        return Finding(name, False, "not installed", way_out)
    try:
        return Finding(name, True, version(package))
    except PackageNotFoundError:
        return Finding(name, True, "installed")


def _gpus(gpus: list[Gpu]) -> Finding:
    if not gpus:
        way_out = "Check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES; until then trainings run on cores."
        return Finding("GPUs", False, "none visible", way_out)
    told = ", ".join(f"cuda:{gpu.index} {gpu.model} ({gpu.memory_bytes / 2**30:.0f} GiB)" for gpu in gpus)
    return Finding("GPUs", True, told)


def _on_gpus(gpus: list[Gpu]) -> Iterator[Finding]:
    tried: list[tuple[str, Callable[[], str], str]] = [
        ("CUDA", _cuda, "Install a build of torch for this driver's CUDA."),
        ("CUDA graphs", _graph, "Steps are launched kernel by kernel: small models run several times slower."),
        ("MPS", _mps, "Jobs that share a GPU take turns, step by step, instead of computing at the same time."),
        ("NCCL", _nccl, "Gradients travel through the host's memory, which is all that one machine needs."),
    ]
    for name, attempt, way_out in tried:
        if gpus:
            yield _tried(name, attempt, way_out)
        else:
            yield Finding(name, False, "there is no GPU", way_out)


def _tried(name: str, attempt: Callable[[], str], way_out: str) -> Finding:
    try:
        return Finding(name, True, attempt())
    except (MpsUnavailable, OSError, RuntimeError, ImportError, AttributeError) as error:
        return Finding(name, False, str(error).partition("\n")[0] or type(error).__name__, way_out)


def _cuda() -> str:
    import torch

    torch.ones(1, device="cuda").add_(1).item()
    return f"{torch.version.cuda}, torch computes on {torch.cuda.get_device_name(0)}"


def _graph() -> str:
    import torch

    from carpool.runtime.graphs.capture import CudaGraphCapture

    cell = torch.zeros(1, device="cuda")

    def work() -> None:
        cell.add_(1)

    replay = CudaGraphCapture(torch.device("cuda", 0)).capture(work)
    for _ in range(3):
        replay()
    if cell.item() != 3.0:
        raise RuntimeError(f"a recording of 'add one', replayed three times, gave {cell.item():g}")
    return "recorded and replayed"


def _mps() -> str:
    async def attempt() -> None:
        mps = MpsDaemon()
        await mps.start()
        await mps.quit()

    asyncio.run(attempt())
    return "its daemon starts and ends: shares of a GPU are lanes, side by side"


def _nccl() -> str:
    import torch

    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _gloo() -> str:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        raise RuntimeError("this build of torch has none")
    return "built in"
