"""Fault injection for tests and benchmarks: breaks a worker as CARPOOL_FAULTS specifies."""

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

_BUSY_CYCLES = 4_000_000_000  # two seconds of one kernel, at 2 GHz
_UNDER_WAY_S = 0.05


def die_in_kernel() -> None:
    """Be killed while a kernel of ours runs."""
    occupy_gpu(_BUSY_CYCLES)
    time.sleep(_UNDER_WAY_S)
    os.kill(os.getpid(), signal.SIGKILL)


def write_invalid_address() -> None:
    """Write to an address whose memory was unmapped: the GPU reports an illegal access."""
    region = CudaRegion(torch.device("cuda", torch.cuda.current_device()), 1)
    region.grow(1)
    unmapped = region.bytes()
    region.unmap()
    unmapped.fill_(1)
    torch.cuda.synchronize()


# CARPOOL_FAULTS='[{"job": "a", "step": 5, "kind": "kill", "once": "/some/folder/mark"}]'
#
# ``step`` counts steps done before it; kinds are ``kill`` and ``stop`` (signals, in the middle of the step), ``memory``
# and ``raise`` (exceptions there), ``disk`` (no checkpoint can be written from that step on); on a GPU also ``kernel`` (a
# kill while a kernel runs) and ``illegal`` (a write to memory that is not there). ``rank`` narrows it to one rank,
# ``above`` makes ``memory`` strike at every step from that one on whose longest pass holds more samples than that,
# ``once`` names a file that is made when the fault strikes and keeps it from striking again, in whatever process.


VARIABLE = "CARPOOL_FAULTS"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    job: str
    step: int
    kind: str
    rank: int | None = None
    above: int | None = None
    once: str = ""


class FaultInjector:
    """The faults that await a job."""

    def __init__(self, awaiting: tuple[Fault, ...]) -> None:
        self._awaiting = awaiting

    @classmethod
    def of(cls, job: str) -> FaultInjector:
        """Those that the environment names for the job; usually none."""
        named = json.loads(os.environ.get(VARIABLE, "[]"))
        return cls(tuple(fault for fault in (Fault(**each) for each in named) if fault.job == job))

    def strike(self, step: Step, rank: int, pieces: range) -> None:
        """In the middle of a step: in company after the pass and before anybody hears of it, alone before the pass."""
        for fault in self._awaiting:
            if fault.rank not in {None, rank} or fault.kind == "disk":
                continue
            if fault.above is None:
                is_due = fault.step == step.number
            else:
                is_due = fault.step <= step.number and step.longest(pieces) > fault.above
            if not is_due or not _first_time(fault):
                continue
            if fault.kind in {"kill", "stop"}:
                os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
            elif fault.kind == "kernel":
                die_in_kernel()
            elif fault.kind == "illegal":
                write_invalid_address()
            elif fault.kind == "memory":
                raise MemoryError("a fault on purpose")
            else:
                raise RuntimeError("a fault on purpose")

    def strike_disk(self, step: int) -> None:
        """Before a checkpoint is written."""
        for fault in self._awaiting:
            if fault.kind == "disk" and step >= fault.step and _first_time(fault):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _first_time(fault: Fault) -> bool:
    if not fault.once:
        return True
    try:
        Path(fault.once).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
