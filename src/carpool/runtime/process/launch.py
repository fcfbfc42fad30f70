"""Launches the executor and the fork server with nothing but the standard library imported.

Importing torch is most of a start, so the fork server is launched before its parents import their own modules.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

EXECUTOR = "carpool.runtime.executor"
EXECUTOR_PID = "CARPOOL_EXECUTOR_PID"  # in the environment of its fork server: whose processes these are
_FORK_SERVER = "carpool.runtime.process.forkserver"
# Libraries that would start threads when imported; workers set their number of threads themselves.
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

# How often an OpenMP thread (GNU's, as in torch) polls at the end of a parallel region before it sleeps. The default is
# far larger; where other programs compute on the same cores, that time is taken from the thread that it waits for.
_SPIN, _SPIN_COUNT, _WAIT_POLICY = "GOMP_SPINCOUNT", "1000", "OMP_WAIT_POLICY"

_PCI_BUS_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # as `use_pci_bus_order`, whose module imports much more


class Launched(NamedTuple):
    """A child process and this side's end of its socket."""

    process: subprocess.Popen[bytes]
    end: socket.socket

    def kill(self) -> None:
        """End the process at once; its children exit with it."""
        self.end.close()
        self.process.kill()
        self.process.wait()


def launch_executor(environment: Mapping[str, str]) -> Launched:
    """Launch an executor that exits with this process, with additional variables."""
    from carpool.jobs.environment import shell_environment

    return _launch(EXECUTOR, {**shell_environment(os.environ), **environment})


def launch_forkserver() -> Launched:
    """Launch a fork server that exits with this process."""
    from carpool.runtime.compat.allocator import with_huge_pages

    more = {**dict.fromkeys(ONE_THREAD, "1"), **_PCI_BUS_ORDER, EXECUTOR_PID: str(os.getpid())}
    return _launch(_FORK_SERVER, with_huge_pages(os.environ) | more)


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Let waiting threads of programs with this environment sleep soon, unless it already sets how they wait."""
    if _WAIT_POLICY not in environment:
        environment.setdefault(_SPIN, _SPIN_COUNT)


def _launch(module: str, environment: Mapping[str, str]) -> Launched:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
            process_group=0,  # Ctrl-C in the terminal is handled by the client
        )
    return Launched(process, ours)
