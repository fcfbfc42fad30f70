"""What went wrong in a worker, in the words its job's story will use."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import torch

import carpool
from carpool.core.errors import CarpoolError
from carpool.runtime.errors import CheckpointError, Diverged, NoLane
from carpool.runtime.protocol import Broke

_NOT_THE_USERS = (
    str(Path(carpool.__file__).parent),
    *[sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")],
    "<frozen",
)
_GPU_FAULTS = ("CUDA error: ", "cuDNN error: ")  # how torch words them
# How torch words it on CPU, where it has no class of its own for it.
_NO_MEMORY = ("can't allocate memory", "not enough memory")


def broke(error: BaseException, step: int) -> Broke:
    """The message for an error that came up after so many steps."""
    if isinstance(error, Diverged):
        return Broke("diverged", str(error), step)
    if is_memory(error):
        return Broke("memory", f"{type(error).__name__}: {error}".strip(": "), step)
    if isinstance(error, NoLane):
        return Broke("lane", str(error), step)
    if is_device(error):
        return Broke("device", str(error).partition("\n")[0], step)
    if isinstance(error, CheckpointError) and isinstance(error.__cause__, OSError):
        return Broke("disk", str(error), step)
    return Broke("user", told(error), step)


def is_memory(error: BaseException) -> bool:
    """Whether memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def is_device(error: BaseException) -> bool:
    """Whether the GPU failed, or what stands between it and this process: the process is of no use any more."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _GPU_FAULTS)


def is_lost(error: BaseException) -> bool:
    """Whether another process might get further than this one, which cannot go on."""
    return is_memory(error) or is_device(error) or isinstance(error, NoLane)


def told(error: BaseException) -> str:
    """Type and message of an error, and the line of the user's own file it came through last."""
    if isinstance(error, CarpoolError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)] or frames
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{place}"
