"""What an error means for a worker, whatever words or wrappings it comes in."""

from __future__ import annotations

from pathlib import Path

import pytest

from carpool.core.errors import InputError
from carpool.runtime.errors import CheckpointError
from carpool.runtime.worker.entry_loader import load_training
from carpool.runtime.worker.error_classifier import broke_message, format_for_log, root_cause

ILLEGAL = RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress'")


def wrapped(error: BaseException, *, as_cause: bool) -> BaseException:
    """As the user's code, or ours, may hand it on."""
    try:
        try:
            raise error
        except BaseException as inner:
            if as_cause:
                raise CheckpointError(f"the state does not fit this training: {inner}") from inner
            raise ValueError("bad luck")  # noqa: B904 - as users do
    except (CheckpointError, ValueError) as outer:
        return outer


def answers() -> None:
    """A GPU that is well."""


def fails() -> None:
    raise ILLEGAL


@pytest.mark.parametrize("as_cause", [True, False])
def test_a_gpu_that_failed_is_found_beneath_other_errors(as_cause: bool) -> None:
    error = root_cause(wrapped(ILLEGAL, as_cause=as_cause), answers)
    assert error is ILLEGAL
    assert broke_message(error, 7).kind == "device"
    assert broke_message(error, 7).error == "CUDA error: an illegal memory access was encountered"


def test_memory_that_ran_out_is_found_beneath_other_errors() -> None:
    assert broke_message(root_cause(wrapped(MemoryError("no more"), as_cause=True), answers), 0).kind == "memory"


def test_a_gpu_that_does_not_answer_explains_any_error() -> None:
    error = RuntimeError("unable to find an engine to execute this computation")
    assert root_cause(error, fails) is ILLEGAL
    assert root_cause(error, answers) is error


def test_what_was_answered_for_another_reason_stays_the_users() -> None:
    def is_not_asked() -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    error = InputError("evaluate returned a list for 'accuracy'")
    assert root_cause(error, is_not_asked) is error
    assert broke_message(error, 3).kind == "user"


def test_an_error_that_led_to_itself_has_an_end() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__context__ = other, one
    assert root_cause(one, answers) is one


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: MPS client failed to connect to the MPS control daemon or the MPS server",
        "CUDA unknown error - this may be due to an incorrectly set up environment",
        "Unexpected error from cudaGetDeviceCount(). Error 805: MPS client failed to connect",
        "No CUDA GPUs are available",
    ],
)
def test_a_gpu_that_cannot_be_reached_is_no_fault_of_the_users(words: str) -> None:
    assert broke_message(RuntimeError(words), 0).kind == "device"


def logged(folder: Path, text: str) -> list[str]:
    """What the log of a job with this entry shows."""
    (folder / "own.py").write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_training("own.py:main", folder=folder)
    return format_for_log(caught.value).splitlines()


def test_a_log_shows_the_users_own_lines_and_none_of_ours(tmp_path: Path) -> None:
    lines = logged(tmp_path, "def main():\n    return load()\n\n\ndef load():\n    raise ValueError('no data')\n")
    assert [line for line in lines if "File" in line] == [
        f'  File "{tmp_path}/own.py", line 2, in main',
        f'  File "{tmp_path}/own.py", line 6, in load',
    ]
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "ValueError: no data")


def test_a_log_shows_where_a_file_cannot_be_read(tmp_path: Path) -> None:
    lines = logged(tmp_path, "def main(:\n    pass\n")
    assert (lines[0], lines[-1]) == (f'  File "{tmp_path}/own.py", line 1', "SyntaxError: invalid syntax")


def test_what_nobody_raised_is_told_in_a_line(tmp_path: Path) -> None:
    told = ["carpool: own.py:main: returned nothing; it must return a carpool.Training"]
    assert logged(tmp_path, "def main():\n    pass\n") == told


def test_a_bug_of_ours_is_logged_whole() -> None:
    assert "Traceback" in format_for_log(wrapped(KeyError("ours"), as_cause=False))
