"""Error classifier: maps an exception to a failure kind and formats it for messages and logs."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import carpool
from carpool.core.errors import CarpoolError, InputError
from carpool.core.typed_fields import shortened
from carpool.runtime.errors import CheckpointError, Diverged, LaneMismatch, LeaseEnded
from carpool.runtime.process.protocol import WorkerFailed

_ENTRY_CALLERS = (str(Path(carpool.__file__).parent), "<frozen importlib")
_LIBRARY_FILES = (
    *_ENTRY_CALLERS,
    *[sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")],
    "<frozen",
)
# Torch's messages, in a step and during CUDA initialization.
_GPU_FAULTS = (
    *("CUDA error: ", "cuDNN error: ", "CUDA driver error: "),
    *("CUDA unknown error", "CUDA driver initialization failed", "cudaGetDeviceCount()", "No CUDA GPUs are available"),
)
# Torch's messages on a CPU, where it has no class for this error.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory")


_MAX_SHOWN = 4000  # characters of an error; the job's log has all of it


def failure_message(error: BaseException, step: int) -> WorkerFailed:
    """Classify an error raised after `step` steps."""
    if isinstance(error, Diverged):
        return WorkerFailed("diverged", text_of(error), step)
    if is_out_of_memory(error):
        return WorkerFailed("memory", f"{type(error).__name__}: {text_of(error)}".strip(": "), step)
    if isinstance(error, LaneMismatch):
        return WorkerFailed("lane", str(error), step)
    if is_device_fault(error):
        return WorkerFailed("device", str(error).partition("\n")[0], step)
    if isinstance(error, LeaseEnded) or (isinstance(error, CheckpointError) and isinstance(error.__cause__, OSError)):
        return WorkerFailed("disk", str(error), step)
    return WorkerFailed("user", describe_error(error), step)


def root_cause(error: BaseException, synchronize: Callable[[], object] | None = None) -> BaseException:
    """Find a lost device or exhausted memory as the cause of an error; else the error itself, which is the user's.

    A fault of one MPS client ends all of them, and can surface anywhere: in the user's entry, while a state is loaded,
    or inside a library that raises its own error. So the GPU is synchronized to see whether it still works.
    """
    for each in _chain(error):
        if is_process_lost(each):
            return each
    try:
        (synchronize or _synchronize)()
    except RuntimeError as lost:
        return lost if is_device_fault(lost) else error
    return error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether host or device memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in text_of(error) for text in _OUT_OF_MEMORY)


def is_device_fault(error: BaseException) -> bool:
    """Whether the GPU, driver or MPS failed: this process has lost the device."""
    return isinstance(error, RuntimeError) and any(text in text_of(error) for text in _GPU_FAULTS)


def is_process_lost(error: BaseException) -> bool:
    """Whether this process cannot continue, but another one may succeed."""
    return is_out_of_memory(error) or is_device_fault(error) or isinstance(error, LaneMismatch)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes; a re-raised error may be among its own."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _synchronize() -> None:
    """Wait for the GPU, if this process uses one: after a fault every call fails."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def text_of(error: BaseException) -> str:
    """The text of an error; `__str__` is the user's code and may raise too."""
    try:
        return str(error)
    except BaseException as raised:  # noqa: BLE001 - anything
        return f"(no text: its __str__ raised {type(raised).__name__})"


def describe_error(error: BaseException) -> str:
    """Type and message of an error, and the last line of the user's code in its traceback."""
    if isinstance(error, CarpoolError):
        return shortened(str(error), _MAX_SHOWN)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARY_FILES)] or frames
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    text = f"{type(error).__name__}: {text_of(error)}".removesuffix(": ")
    return f"{shortened(text, _MAX_SHOWN)}{place}"


def format_for_log(error: BaseException) -> str:
    """Format an error for the job's log: the traceback starts at the user's code, a bug of carpool's is complete."""
    raised = error
    if isinstance(error, InputError):
        if error.__cause__ is None:  # carpool's own check, without a traceback of user code
            return f"carpool: {error}\n"
        raised = error.__cause__
    frame = raised.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_ENTRY_CALLERS):
        frame = frame.tb_next
    if frame is None and raised is error:
        frame = raised.__traceback__
    return "".join(traceback.format_exception(type(raised), raised, frame))
