"""Environment diagnosis: tries CUDA, graphs, MPS, NCCL and shared memory, and suggests fixes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from carpool.jobs.devices import Gpu, list_gpus
from carpool.jobs.nvml import Nvml, NvmlUnavailable
from carpool.runtime.compat import Feature, cuda_driver, interpreter, libc
from carpool.runtime.process.shared_memory import new_memory_file
from carpool.runtime.sharing.mps_daemon import MpsDaemon, MpsUnavailable

_TEST_BYTES = 1 << 20
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # PCI vendor, and the class of display controllers
_NO_GPU = "Nothing to do: without a GPU, trainings run on CPU cores."
_INSTALL = "Needed for training: pip install 'carpool[torch]'."


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether this machine has one capability."""

    name: str
    is_there: bool
    found: str  # a version or device if it is available, else the problem
    way_out: str = ""  # the fix, or what carpool does without it


def examine() -> Iterator[Finding]:
    """Check everything, one finding after another."""
    yield Finding("Python", True, platform.python_version())
    yield _cores()
    yield _try("shared memory", _shared_memory, "Workers exchange gradients through it: allow memfd_create.")
    yield from _features(libc.features())
    yield from _features(interpreter.features())
    has_torch = importlib.util.find_spec("torch") is not None
    yield _try("torch", _torch, _INSTALL) if has_torch else Finding("torch", False, "not installed", _INSTALL)
    if has_torch:
        from carpool.runtime.compat import torch_api

        yield from _features(torch_api.features())
    has_gpu = has_nvidia_gpu()
    for finding in _about_gpus(list_gpus() if has_torch else [], has_gpu=has_gpu):
        yield finding if has_gpu or finding.is_there else replace(finding, way_out=_NO_GPU)


def has_nvidia_gpu(root: Path = Path("/")) -> bool:
    """Whether this machine has a GPU of NVIDIA, even without its driver."""
    if any((root / path).exists() for path in ("dev/nvidiactl", "proc/driver/nvidia")):
        return True
    for device in (root / "sys/bus/pci/devices").glob("*"):
        with contextlib.suppress(OSError):
            vendor, kind = ((device / name).read_text(encoding="ascii").strip() for name in ("vendor", "class"))
            if vendor == _NVIDIA and kind.startswith(_DISPLAY):
                return True
    return False


def _about_gpus(gpus: list[Gpu], *, has_gpu: bool) -> Iterator[Finding]:
    yield _try(
        "NVML", _nvml, "GPUs are not detected without it. Install nvidia-ml-py, and check the driver (nvidia-smi)."
    )
    yield _gpus(gpus, has_gpu=has_gpu)
    yield from _features(cuda_driver.features())
    yield from _on_gpus(gpus)


def _features(features: Iterable[Feature]) -> Iterator[Finding]:
    for name, problem, fallback in features:
        yield Finding(name, not problem, problem or "available", fallback if problem else "")


def _cores() -> Finding:
    usable, installed = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return Finding("cores", True, f"{usable} of {installed} usable" if usable < installed else f"{usable} usable")


def _gpus(gpus: list[Gpu], *, has_gpu: bool) -> Finding:
    if not gpus:
        if not has_gpu:
            return Finding("GPUs", False, "none on this machine")
        way_out = "Check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES; without a GPU, trainings run on CPU cores."
        return Finding("GPUs", False, "none visible", way_out)
    names = ", ".join(f"cuda:{gpu.index} {gpu.model} ({gpu.memory_bytes / 2**30:.0f} GiB)" for gpu in gpus)
    return Finding("GPUs", True, names)


def _on_gpus(gpus: list[Gpu]) -> Iterator[Finding]:
    checks: list[tuple[str, Callable[[], str], str]] = [
        ("CUDA", _cuda, "Install a torch build for the CUDA version of this driver."),
        ("CUDA graphs", _graph, "Steps launch kernel by kernel: small models run several times slower."),
        ("MPS", _mps, "Jobs that share a GPU take turns step by step, and lanes (cuda:0@50) are not available."),
        ("NCCL", _nccl, "Gradients travel through host memory; on a single machine nothing else is needed."),
    ]
    for name, check, way_out in checks:
        yield _try(name, check, way_out) if gpus else Finding(name, False, "no GPU", _NO_GPU)


def _try(name: str, check: Callable[[], str], way_out: str) -> Finding:
    try:
        return Finding(name, True, check())
    except (MpsUnavailable, NvmlUnavailable, OSError, RuntimeError, ImportError, AttributeError) as error:
        return Finding(name, False, str(error).partition("\n")[0] or type(error).__name__, way_out)


def _shared_memory() -> str:
    fd = new_memory_file("doctor", _TEST_BYTES)
    try:
        os.pwrite(fd, b"\1", _TEST_BYTES - 1)
    finally:
        os.close(fd)
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    return f"memfd_create works; /dev/shm (not needed) has {free / 1e9:.1f} GB free"


def _torch() -> str:
    import torch

    from carpool.runtime.compat.torch_api import NEWEST, OLDEST

    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if OLDEST <= version <= NEWEST:
        return torch.__version__
    return f"{torch.__version__}, untested: carpool is tested with {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def _nvml() -> str:
    with closing(Nvml()) as nvml:
        return f"driver {nvml.driver_version()}"


def _cuda() -> str:
    import torch

    torch.ones(1, device="cuda").add_(1).item()
    return f"{torch.version.cuda}, torch computes on {torch.cuda.get_device_name(0)}"


def _graph() -> str:
    import torch

    from carpool.runtime.graphs.capture import CudaGraphCapture

    cell = torch.zeros(1, device="cuda")
    replay = CudaGraphCapture(torch.device("cuda", 0)).capture(lambda: cell.add_(1))
    for _ in range(3):
        replay()
    if cell.item() != 3.0:
        raise RuntimeError(f"a captured 'add 1', replayed 3 times, computed {cell.item():g}")
    return "captured and replayed"


def _mps() -> str:
    async def start_and_quit() -> None:
        mps = MpsDaemon()
        await mps.start()
        await mps.quit()

    asyncio.run(start_and_quit())
    return "the daemon starts and stops: jobs can compute on shares of a GPU at the same time"


def _nccl() -> str:
    import torch

    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
