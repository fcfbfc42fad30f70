"""CPython internals: running a module as ``-m`` does, and ending the interpreter from within a program."""

from __future__ import annotations

import atexit
import ctypes
import runpy
import threading
from collections.abc import Iterator
from typing import NoReturn

from carpool.runtime.compat import Feature

_NEEDED = ((runpy, "_run_module_as_main"), (threading, "_shutdown"), (atexit, "_run_exitfuncs"))


def run_module_as_main(name: str) -> None:
    """Run a module in the current `__main__`, with the frames that a traceback of ``-m`` shows."""
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def exit_interpreter(code: int) -> NoReturn:
    """Finalize the interpreter and exit: threads are joined, exit handlers run, modules and open files are closed."""
    ctypes.pythonapi.Py_Exit(ctypes.c_int(code))
    raise AssertionError("Py_Exit returned")


def join_threads_and_run_exit_handlers() -> None:
    """The part of finalization after which Python code can still run."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def fork_start_problem() -> str:
    """Why programs cannot run in forks; empty if they can."""
    absent = [f"{module.__name__}.{name}" for module, name in _NEEDED if not hasattr(module, name)]
    absent += [] if hasattr(ctypes.pythonapi, "Py_Exit") else ["Py_Exit"]
    return f"this Python has no {', '.join(absent)}" if absent else ""


def features() -> Iterator[Feature]:
    """The internals of the interpreter in use, and whether they are available."""
    yield Feature("fork start", fork_start_problem(), "Python commands import torch themselves, which takes seconds.")
