"""Python programs among commands: whether one may run in a fork of the fork server, and running it there.

A fork has torch imported already, which saves a script seconds. It may only be used where the program cannot
distinguish it from a plain start: the same interpreter, no interpreter options, and the fork server's values of all
variables that Python, torch or the C library reads at its start. `run_program` then does the same as CPython after
start-up: `__main__`, ``sys.argv``, ``sys.path``, standard streams, signal handlers, tracebacks, exit codes, and
finalization.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import io
import logging
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple, NoReturn, TextIO

from carpool.runtime.compat.interpreter import (
    exit_interpreter,
    join_threads_and_run_exit_handlers,
    run_module_as_main,
)

# Read when Python, torch, OpenMP, MKL or the C library starts. Those in _LATER are read afterwards, or applied here.
_EARLY = re.compile(
    r"PYTHON|OMP_|MKL_|KMP_|GOMP_|OPENBLAS_|PYTORCH_|TORCH_|ATEN_|CUDA_|NV|LD_|MALLOC_|GLIBC_|LC_|LANG|TZ"
)
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_LATER = frozenset(
    {*_THREADS, "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}
    | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "PYTHONUNBUFFERED"}
)
# Packages that import torch, in a script or in a module beside it.
_USES_TORCH = re.compile(
    rb"\b(torch|torchvision|transformers|lightning|pytorch_lightning|accelerate|timm|fastai|ignite|diffusers|peft)\b"
)
_OWN_FILES = frozenset({__file__, run_module_as_main.__code__.co_filename})
_MAX_SOURCE_BYTES = 1 << 18
_MAX_SOURCES = 50


class PythonProgram(NamedTuple):
    """A script, or a module as with ``-m``, and its arguments."""

    target: str
    is_module: bool
    arguments: tuple[str, ...] = ()


def parse_program(command: Sequence[str]) -> PythonProgram | None:
    """The program of ``python …``; None with interpreter options, ``-c`` or standard input."""
    match list(command[1:]):
        case ["-m", module, *arguments] if re.fullmatch(r"\w+(\.\w+)*", module):
            return PythonProgram(module, True, tuple(arguments))
        case [script, *arguments] if script.endswith(".py") and not script.startswith("-"):
            return PythonProgram(script, False, tuple(arguments))
        case _:
            return None


def is_same_interpreter(program: str, own: str = sys.executable) -> bool:
    """Whether a path names this interpreter in this virtual environment, which depends on the folder of the link."""
    try:
        return Path(program).samefile(own) and Path(program).parent.samefile(Path(own).parent)
    except OSError:
        return False


def uses_torch(program: PythonProgram, folder: Path) -> bool:
    """Whether the program, or a module beside it, seems to import torch."""
    path = folder / (program.target.replace(".", "/") if program.is_module else program.target)
    place = path if path.is_dir() else path.parent
    sources = [path] if path.is_file() else []
    try:
        sources += [file for file in sorted(place.glob("*.py")) if file != path][:_MAX_SOURCES]
        return any(_USES_TORCH.search(_beginning(source)) for source in sources)
    except OSError:
        return False


def _beginning(source: Path) -> bytes:
    with source.open("rb") as file:
        return file.read(_MAX_SOURCE_BYTES)


def problem_with_environment(wanted: Mapping[str, str], own: Mapping[str, str]) -> str:
    """Why a fork of a process with the environment ``own`` cannot stand for one started with ``wanted``."""
    if any("=" in name or "\0" in f"{name}{value}" for name, value in wanted.items()):
        return "a variable is invalid"
    for name in sorted(wanted.keys() | own.keys()):
        if _EARLY.match(name) and name not in _LATER and wanted.get(name) != own.get(name):
            return f"{name} must be set before Python starts"
    counts = {wanted.get(name) for name in _THREADS}
    if len(counts) > 1 or not (wanted.get("OMP_NUM_THREADS") or "1").isdecimal():
        return "thread counts differ"
    return ""


def problem_with_modules(folder: Path) -> str:
    """Why a program in this folder may get other modules than in a plain start: its own are already imported."""
    try:
        names = {file.name.partition(".")[0] for file in folder.iterdir() if file.suffix == ".py" or file.is_dir()}
    except OSError as error:
        return str(error)
    loaded = {name for name in sys.modules if "." not in name and name != "__main__"}
    shadowed = sorted(names & loaded - {"carpool"})
    return f"{shadowed[0]}.py has the name of an imported module" if shadowed else ""


def run_program(program: PythonProgram, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run a program in this process, which was forked for it, and exit as the interpreter would."""
    _reset_process(environment)
    main = ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=builtins, __package__=None)
    sys.modules["__main__"] = main
    sys.argv = [program.target, *program.arguments]
    sys.orig_argv = list(command)
    sys.executable = os.path.abspath(command[0])  # noqa: PTH100 - a virtual environment is known by the link
    importlib.invalidate_caches()
    code: int | None
    try:
        _run_module(program.target) if program.is_module else _run_script(program.target, main)
        code = 0
    except SystemExit as stop:
        code = _exit_code(stop.code)
    except BaseException as error:  # noqa: BLE001 - as the interpreter does with what nobody catches
        code = None if isinstance(error, KeyboardInterrupt) else 1
        _print_error(error)
    _exit(code, main)


def _reset_process(environment: Mapping[str, str]) -> None:
    """Undo the settings of the fork server, and apply those that interpreter and libraries read at their start."""
    os.environ.clear()
    os.environ.update(environment)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    for handler in logging.root.handlers[:]:
        logging.root.removeHandler(handler)
    unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
    sys.stdout = sys.__stdout__ = _stream(1, sys.stdout, unbuffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, sys.stderr, unbuffered)  # type: ignore[misc]
    sys.stdin = sys.__stdin__ = open(0, encoding=sys.stdout.encoding, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    _set_threads(int(environment.get("OMP_NUM_THREADS") or 0))
    _reseed()


def _stream(descriptor: int, old: TextIO, unbuffered: bool) -> Any:
    """A standard stream as CPython creates it (pylifecycle.c: create_stdio)."""
    raw: Any = open(descriptor, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    is_lines = not unbuffered and (descriptor == 2 or os.isatty(descriptor))
    stream = io.TextIOWrapper(
        raw, old.encoding, old.errors, newline="\n", line_buffering=is_lines, write_through=unbuffered
    )
    stream.mode = "w"  # type: ignore[misc]
    return stream


def _reseed() -> None:
    """Let programs that set no seed draw different numbers in different forks; `random` does so by itself."""
    import torch

    torch.default_generator.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()


def _set_threads(count: int) -> None:
    """Set the threads that libraries would have read from the environment when they were loaded."""
    import torch
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    if count:
        threadpool_limits(count, user_api="blas")
        torch.set_num_threads(count)


def _run_script(script: str, main: ModuleType) -> None:
    path = os.path.abspath(script)  # noqa: PTH100 - the interpreter resolves no links here
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))  # noqa: PTH120
    main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    source = Path(path).read_bytes()
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _run_module(name: str) -> None:
    sys.path.insert(0, str(Path.cwd()))
    sys.argv[0] = "-m"
    run_module_as_main(name)


def _exit_code(code: object) -> int:
    if code is None or isinstance(code, int):
        return int(code or 0)
    print(code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    return 1


def _print_error(error: BaseException) -> None:
    """Print an exception through the program's excepthook, without the frames of this module."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
        trace = trace.tb_next
    error = error.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit as stop:
        _exit(_exit_code(stop.code), sys.modules["__main__"])


def _exit(code: int | None, main: ModuleType) -> NoReturn:
    """Exit with a code, or by SIGINT: threads are joined, exit handlers run, and open files are flushed."""
    if code is not None:
        exit_interpreter(code)
    join_threads_and_run_exit_handlers()
    main.__dict__.clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(128 + signal.SIGINT)
