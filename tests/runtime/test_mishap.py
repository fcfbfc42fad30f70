"""What an error means for a worker, whatever words or wrappings it comes in."""

from __future__ import annotations

import pytest

from carpool.core.errors import InputError
from carpool.runtime.errors import CheckpointError
from carpool.runtime.mishap import broke, really

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
    error = really(wrapped(ILLEGAL, as_cause=as_cause), answers)
    assert error is ILLEGAL
    assert broke(error, 7).kind == "device"
    assert broke(error, 7).error == "CUDA error: an illegal memory access was encountered"


def test_memory_that_ran_out_is_found_beneath_other_errors() -> None:
    assert broke(really(wrapped(MemoryError("no more"), as_cause=True), answers), 0).kind == "memory"


def test_a_gpu_that_does_not_answer_explains_any_error() -> None:
    error = RuntimeError("unable to find an engine to execute this computation")
    assert really(error, fails) is ILLEGAL
    assert really(error, answers) is error


def test_what_was_answered_for_another_reason_stays_the_users() -> None:
    def is_not_asked() -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    error = InputError("evaluate returned a list for 'accuracy'")
    assert really(error, is_not_asked) is error
    assert broke(error, 3).kind == "user"


def test_an_error_that_led_to_itself_has_an_end() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__context__ = other, one
    assert really(one, answers) is one


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
    assert broke(RuntimeError(words), 0).kind == "device"
