"""Fault injection for tests and benchmarks: breaks a worker as CARPOOL_FAULTS specifies.

    CARPOOL_FAULTS='[{"job": "a", "step": 5, "kind": "kill", "once": "/some/folder/mark"}]'

``step``: steps done before the fault. ``kind``: ``kill`` and ``stop`` (signals during the step), ``memory`` and
``raise`` (exceptions), ``disk`` (checkpoints fail from that step on), ``kill_in_save`` and ``stop_in_save`` (signals
before a checkpoint is written from that step on), on a GPU also ``kernel`` (killed while a kernel runs) and ``illegal``
(a write to an invalid address). ``rank`` restricts the fault to one rank. ``above`` makes ``memory`` strike in every
step from that one on whose largest micro-batch has more samples. ``once`` is a file created by the fault that prevents
it from striking again, in any process.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from carpool.runtime.compat.torch_api import occupy_gpu
from carpool.runtime.compat.vmm import CudaRegion
from carpool.runtime.engine.forward_backward import Step

VARIABLE = "CARPOOL_FAULTS"
_IN_SAVE = {"disk", "kill_in_save", "stop_in_save"}
_BUSY_CYCLES = 4_000_000_000  # two seconds of one kernel, at 2 GHz
_KERNEL_STARTED_S = 0.05


def die_in_kernel() -> None:
    """Kill this process while its kernel runs."""
    occupy_gpu(_BUSY_CYCLES)
    time.sleep(_KERNEL_STARTED_S)
    os.kill(os.getpid(), signal.SIGKILL)


def write_invalid_address() -> None:
    """Write to an address whose memory was unmapped; the GPU reports an illegal access."""
    region = CudaRegion(torch.device("cuda", torch.cuda.current_device()), 1)
    region.grow(1)
    unmapped = region.bytes()
    region.unmap()
    unmapped.fill_(1)
    torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault; the module's docstring describes the fields."""

    job: str
    step: int
    kind: str
    rank: int | None = None
    above: int | None = None
    once: str = ""


class FaultInjector:
    """The faults of one job."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self._faults = faults

    @classmethod
    def of(cls, job: str) -> FaultInjector:
        named = json.loads(os.environ.get(VARIABLE, "[]"))
        return cls(tuple(fault for fault in (Fault(**each) for each in named) if fault.job == job))

    def inject(self, step: Step, rank: int, pieces: range) -> None:
        """Inject the faults due in this step: before its pass, or with several ranks between pass and reduction."""
        for fault in self._faults:
            if fault.rank not in {None, rank} or fault.kind in _IN_SAVE:
                continue
            if fault.above is None:
                is_due = fault.step == step.number
            else:
                is_due = fault.step <= step.number and step.largest_micro_batch(pieces) > fault.above
            if not is_due or not _first_time(fault):
                continue
            if fault.kind in {"kill", "stop"}:
                os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
            elif fault.kind == "kernel":
                die_in_kernel()
            elif fault.kind == "illegal":
                write_invalid_address()
            elif fault.kind == "memory":
                raise MemoryError("an injected fault")
            else:
                raise RuntimeError("an injected fault")

    def inject_in_save(self, step: int) -> None:
        """Inject the faults due when a checkpoint is written."""
        for fault in self._faults:
            if fault.kind not in _IN_SAVE or step < fault.step or not _first_time(fault):
                continue
            if fault.kind == "disk":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill_in_save" else signal.SIGSTOP)


def _first_time(fault: Fault) -> bool:
    if not fault.once:
        return True
    try:
        Path(fault.once).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
