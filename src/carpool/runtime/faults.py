"""Faults on purpose, for tests and benchmarks: a worker that reads CARPOOL_FAULTS breaks as it says.

    CARPOOL_FAULTS='[{"job": "a", "step": 5, "kind": "kill", "once": "/some/folder/mark"}]'

``step`` counts steps done before it; kinds are ``kill`` and ``stop`` (signals, in the middle of the step), ``memory``
and ``raise`` (exceptions there), ``disk`` (no checkpoint can be written from that step on); on a GPU also ``kernel`` (a
kill while a kernel runs) and ``illegal`` (a write to memory that is not there). ``rank`` narrows it to one rank,
``above`` makes ``memory`` strike at every step from that one on whose longest pass holds more samples than that,
``once`` names a file that is made when the fault strikes and keeps it from striking again, in whatever process.
"""

from __future__ import annotations

import errno
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from carpool.runtime.mischief import die_in_a_kernel, write_nowhere
from carpool.runtime.passes import Step

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


class Faults:
    """The faults that await a job."""

    def __init__(self, awaiting: tuple[Fault, ...]) -> None:
        self._awaiting = awaiting

    @classmethod
    def of(cls, job: str) -> Faults:
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
                die_in_a_kernel()
            elif fault.kind == "illegal":
                write_nowhere()
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
