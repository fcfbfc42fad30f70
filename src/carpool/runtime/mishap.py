"""What went wrong in a worker, in the words its job's story will use."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import carpool
from carpool.core.errors import CarpoolError, InputError
from carpool.runtime.errors import CheckpointError, Diverged, NoLane
from carpool.runtime.protocol import Broke

_WAY_TO_AN_ENTRY = (str(Path(carpool.__file__).parent), "<frozen importlib")
_NOT_THE_USERS = (
    *_WAY_TO_AN_ENTRY,
    *[sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")],
    "<frozen",
)
# How torch words them, in a step and while CUDA starts.
_GPU_FAULTS = (
    *("CUDA error: ", "cuDNN error: ", "CUDA driver error: "),
    *("CUDA unknown error", "CUDA driver initialization failed", "cudaGetDeviceCount()", "No CUDA GPUs are available"),
)
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


def really(error: BaseException, ask_gpu: Callable[[], object] | None = None) -> BaseException:
    """What went wrong, whatever the error says: what the process lost beneath it, or the GPU if it does not answer.

    A fault of one client of MPS ends all of them, and a victim meets it wherever it happens to be: in the user's entry,
    in a state that is loaded, in a library that turns it into words of its own. Only an error with none of it is the
    user's.
    """
    for each in _chain(error):
        if is_lost(each):
            return each
    try:
        (ask_gpu or _ask_gpu)()
    except RuntimeError as lost:
        return lost if is_device(lost) else error
    return error


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


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what led to it; an error that was raised again may have led to itself."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _ask_gpu() -> None:
    """Wait for the GPU, if this process uses one: after a fault every answer is an error."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def told(error: BaseException) -> str:
    """Type and message of an error, and the line of the user's own file it came through last."""
    if isinstance(error, CarpoolError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)] or frames
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{place}"


def as_logged(error: BaseException) -> str:
    """An error as its job's log shows it: from the user's own code on; a bug of ours whole."""
    raised = error
    if isinstance(error, InputError):
        if error.__cause__ is None:  # nothing of the user's has raised anything
            return f"carpool: {error}\n"
        raised = error.__cause__
    way = raised.__traceback__
    while way is not None and way.tb_frame.f_code.co_filename.startswith(_WAY_TO_AN_ENTRY):
        way = way.tb_next
    if way is None and raised is error:
        way = raised.__traceback__
    return "".join(traceback.format_exception(type(raised), raised, way))
