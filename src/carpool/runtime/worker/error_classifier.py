"""Error classifier: maps an exception to a failure kind and formats it for messages and logs."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import carpool
from carpool.core.errors import CarpoolError, InputError
from carpool.runtime.errors import CheckpointError, Diverged, LaneMismatch
from carpool.runtime.process.protocol import WorkerFailed

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


def broke_message(error: BaseException, step: int) -> WorkerFailed:
    """The message for an error that came up after so many steps."""
    if isinstance(error, Diverged):
        return WorkerFailed("diverged", str(error), step)
    if is_out_of_memory(error):
        return WorkerFailed("memory", f"{type(error).__name__}: {error}".strip(": "), step)
    if isinstance(error, LaneMismatch):
        return WorkerFailed("lane", str(error), step)
    if is_device_fault(error):
        return WorkerFailed("device", str(error).partition("\n")[0], step)
    if isinstance(error, CheckpointError) and isinstance(error.__cause__, OSError):
        return WorkerFailed("disk", str(error), step)
    return WorkerFailed("user", describe_error(error), step)


def root_cause(error: BaseException, ask_gpu: Callable[[], object] | None = None) -> BaseException:
    """What went wrong, whatever the error says: what the process lost beneath it, or the GPU if it does not answer.

    A fault of one client of MPS ends all of them, and a victim meets it wherever it happens to be: in the user's entry,
    in a state that is loaded, in a library that turns it into words of its own. Only an error with none of it is the
    user's.
    """
    for each in _chain(error):
        if is_process_lost(each):
            return each
    try:
        (ask_gpu or _ask_gpu)()
    except RuntimeError as lost:
        return lost if is_device_fault(lost) else error
    return error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def is_device_fault(error: BaseException) -> bool:
    """Whether the GPU failed, or what stands between it and this process: the process is of no use any more."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _GPU_FAULTS)


def is_process_lost(error: BaseException) -> bool:
    """Whether another process might get further than this one, which cannot go on."""
    return is_out_of_memory(error) or is_device_fault(error) or isinstance(error, LaneMismatch)


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


def describe_error(error: BaseException) -> str:
    """Type and message of an error, and the line of the user's own file it came through last."""
    if isinstance(error, CarpoolError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)] or frames
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{place}"


def format_for_log(error: BaseException) -> str:
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
