"""Errors are classified by their root cause, however they are wrapped."""

from __future__ import annotations

from pathlib import Path

import pytest

from carpool.core.errors import InputError
from carpool.runtime.errors import CheckpointError
from carpool.runtime.worker.entry_loader import load_training
from carpool.runtime.worker.error_classifier import describe_error, failure_message, format_for_log, root_cause

ILLEGAL = RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress'")


def wrapped(error: BaseException, *, as_cause: bool) -> BaseException:
    """Re-raised by user code or carpool, as cause or context."""
    try:
        try:
            raise error
        except BaseException as inner:
            if as_cause:
                raise CheckpointError(f"the state does not fit this training: {inner}") from inner
            raise ValueError("bad luck")  # noqa: B904 - as users do
    except (CheckpointError, ValueError) as outer:
        return outer


def gpu_works() -> None: ...


def gpu_fails() -> None:
    raise ILLEGAL


@pytest.mark.parametrize("as_cause", [True, False])
def test_a_device_fault_is_found_behind_other_errors(as_cause: bool) -> None:
    error = root_cause(wrapped(ILLEGAL, as_cause=as_cause), gpu_works)
    assert error is ILLEGAL
    assert failure_message(error, 7).kind == "device"
    assert failure_message(error, 7).error == "CUDA error: an illegal memory access was encountered"


def test_out_of_memory_is_found_behind_other_errors() -> None:
    assert failure_message(root_cause(wrapped(MemoryError("no more"), as_cause=True), gpu_works), 0).kind == "memory"


def test_a_failed_gpu_explains_any_error() -> None:
    error = RuntimeError("unable to find an engine to execute this computation")
    assert root_cause(error, gpu_fails) is ILLEGAL
    assert root_cause(error, gpu_works) is error


def test_another_error_of_the_gpu_check_is_ignored() -> None:
    def fails_otherwise() -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    error = InputError("evaluate returned a list for 'accuracy'")
    assert root_cause(error, fails_otherwise) is error
    assert failure_message(error, 3).kind == "user"


def test_a_cycle_of_causes_terminates() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__context__ = other, one
    assert root_cause(one, gpu_works) is one


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: MPS client failed to connect to the MPS control daemon or the MPS server",
        "CUDA unknown error - this may be due to an incorrectly set up environment",
        "Unexpected error from cudaGetDeviceCount(). Error 805: MPS client failed to connect",
        "No CUDA GPUs are available",
    ],
)
def test_cuda_startup_errors_are_device_faults(message: str) -> None:
    assert failure_message(RuntimeError(message), 0).kind == "device"


def logged(folder: Path, text: str) -> list[str]:
    """The log of a job with this entry."""
    (folder / "own.py").write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_training("own.py:main", folder=folder)
    return format_for_log(caught.value).splitlines()


def test_a_log_shows_user_code_only(tmp_path: Path) -> None:
    lines = logged(tmp_path, "def main():\n    return load()\n\n\ndef load():\n    raise ValueError('no data')\n")
    assert [line for line in lines if "File" in line] == [
        f'  File "{tmp_path}/own.py", line 2, in main',
        f'  File "{tmp_path}/own.py", line 6, in load',
    ]
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "ValueError: no data")


def test_a_log_shows_the_place_of_a_syntax_error(tmp_path: Path) -> None:
    lines = logged(tmp_path, "def main(:\n    pass\n")
    assert (lines[0], lines[-1]) == (f'  File "{tmp_path}/own.py", line 1', "SyntaxError: invalid syntax")


def test_an_error_without_traceback_is_one_line(tmp_path: Path) -> None:
    (line,) = logged(tmp_path, "def main():\n    pass\n")
    assert line.startswith("carpool: own.py:main: returned None")


def test_a_bug_of_carpool_is_logged_completely() -> None:
    assert "Traceback" in format_for_log(wrapped(KeyError("ours"), as_cause=False))


class Unprintable(RuntimeError):
    def __str__(self) -> str:
        raise KeyboardInterrupt


def test_an_error_whose_text_raises_is_reported_by_its_type() -> None:
    failed = failure_message(root_cause(Unprintable(), gpu_works), 3)
    assert (failed.kind, failed.step) == ("user", 3)
    assert describe_error(Unprintable()) == failed.error
    assert all(name in failed.error for name in ("Unprintable", "KeyboardInterrupt"))
    assert "Unprintable" in format_for_log(Unprintable())


def test_a_long_text_is_cut_but_not_in_the_log() -> None:
    error = ValueError("x" * 1_000_000)
    assert len(describe_error(error)) < 5_000
    assert len(format_for_log(error)) > 1_000_000
