"""Private torch APIs: all uses; those in `features` have a fallback, the others are required.

`features` lists the missing ones and the effect, for ``carpool doctor``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from carpool.runtime.compat import Feature

OLDEST, NEWEST = (2, 11), (2, 13)  # versions of torch that the uses below were tested with
BatchNorm = _BatchNorm  # the base class of all BatchNorm layers
_FOREACH = ("_foreach_copy_", "_foreach_add_", "_foreach_mul_")


def _copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor], non_blocking: bool = False) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=non_blocking)


def _add_each(targets: Sequence[Tensor], sources: Sequence[Tensor], *, alpha: float = 1) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.add_(source, alpha=alpha)


def _multiply_each(targets: Sequence[Tensor], factor: float) -> None:
    for target in targets:
        target.mul_(factor)


# In place, on lists of tensors: torch's optimizers use them, with a few kernels per list instead of one per tensor.
foreach_copy_: Callable[..., object] = getattr(torch, "_foreach_copy_", _copy_each)
foreach_add_: Callable[..., object] = getattr(torch, "_foreach_add_", _add_each)
foreach_mul_: Callable[..., object] = getattr(torch, "_foreach_mul_", _multiply_each)


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers of a module itself by name, with those that are None, to read and to replace."""
    return module._buffers


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each tensor was changed in place; zeros if torch does not count them."""
    try:
        return [tensor._version for tensor in tensors]
    except AttributeError:
        return [0] * len(tensors)


def check_batch_norm_input(layer: BatchNorm, inputs: Tensor) -> None:
    """Raise torch's own error where a BatchNorm layer gets inputs of the wrong rank."""
    if (check := getattr(layer, "_check_input_dim", None)) is not None:
        check(inputs)


def nested_schedules(schedule: Any) -> Sequence[Any]:
    """Return the learning-rate schedules that a `SequentialLR` or `ChainedScheduler` consists of."""
    parts: Sequence[Any] = getattr(schedule, "_schedulers", ())
    return parts


def file_store(path: str) -> Any:
    """Open a rendezvous store in a file."""
    return dist.FileStore(path, -1)  # type: ignore[attr-defined]


def tcp_store(host: str, port: int, listener: int | None, *, timeout_s: float) -> Any:
    """Open a rendezvous store at an address; with a listening socket, which it takes over, serve it there."""
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, None, listener is not None, timeout, wait_for_workers=False, master_listen_fd=listener
    )


def new_process_group(
    store: Any,
    prefix: str,
    rank: int,
    size: int,
    *,
    join: timedelta,
    collective: timedelta,
    address: str = "127.0.0.1",
) -> Any:
    """Join a gloo process group without making it torch's default group. `RuntimeError` where peers are missing.

    `join` limits the wait for all ranks, `collective` that of each collective. Gloo listens at the address, which the
    other ranks must be able to reach.
    """
    prefixed = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = join
    group = dist.ProcessGroupGloo(prefixed, rank, size, options)
    group._set_default_timeout(collective)
    return group


def release_cublas_workspaces() -> None:
    """Free the cuBLAS workspaces, which the caching allocator otherwise holds until the process exits."""
    with contextlib.suppress(AttributeError):
        torch._C._cuda_clearCublasWorkspaces()


def end_allocation_to_pool(device: int, pool: Any) -> None:
    """Stop the caching allocator from using the memory pool of a failed capture."""
    with contextlib.suppress(AttributeError, RuntimeError):
        torch._C._cuda_endAllocateToPool(device, pool)  # type: ignore[attr-defined, unused-ignore]


def has_custom_pools() -> bool:
    """Whether a CUDA memory pool can take its memory from an allocator given by addresses."""
    return hasattr(torch._C, "_cuda_customAllocator")


def custom_pool(allocate: int, free: int) -> torch.cuda.MemPool:
    """Make a CUDA memory pool whose memory comes from two C functions, given by their addresses."""
    return torch.cuda.MemPool(torch._C._cuda_customAllocator(allocate, free))


def occupy_gpu(cycles: int) -> None:
    """Launch a kernel that spins for `cycles` clock cycles."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def features() -> Iterator[Feature]:
    """Which private APIs are used, and whether this build of torch has them."""
    yield Feature(
        "foreach ops", _missing(torch, *_FOREACH), "Copies and sums of gradients launch one kernel per tensor."
    )
    yield Feature(
        "tensor version",
        _missing(torch.Tensor, "_version"),
        "A loss that changes weights in place is detected in the first step of a job only.",
    )
    yield Feature("gloo", _missing(dist, "ProcessGroupGloo"), "carpool run --reducer group fails; the default works.")
    if torch.version.cuda is None:
        return
    yield Feature(
        "graph pools",
        _missing(torch._C, "_cuda_customAllocator"),
        "A job that is swapped out keeps the memory of its CUDA graphs on the GPU.",
    )
    yield Feature(
        "capture abort",
        _missing(torch._C, "_cuda_endAllocateToPool"),
        "After a failed CUDA graph capture, later allocations stay in its memory pool.",
    )
    yield Feature(
        "cuBLAS memory",
        _missing(torch._C, "_cuda_clearCublasWorkspaces"),
        "A warm worker without a job holds some 10 MiB more of GPU memory.",
    )


def _missing(owner: Any, *names: str) -> str:
    absent = [name for name in names if not hasattr(owner, name)]
    return f"torch {torch.__version__} has no {', '.join(absent)}" if absent else ""
