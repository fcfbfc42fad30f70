"""Form tokens, form decoding, offered actions and parsed fields."""

import contextlib
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import InputError
from carpool.core.model import JobId, Phase
from carpool.dashboard.actions import (
    check_token,
    job_actions,
    policy_action,
    read_devices,
    read_form,
    read_policy,
    read_weight,
    token_for,
)
from carpool.service.auth import Forbidden, Principal, Role
from carpool.service.queries.views import JobView

SECRET = b"secret"
_KNOWN: dict[str, Any] = {
    **{field.name: None for field in fields(JobView)},
    "id": JobId("a"),
    "user": "ada",
    "phase": Phase.RUNNING,
    "weight": 2.0,
    "min_devices": 1,
    "max_devices": 4,
}
JOB = JobView(**_KNOWN)


def test_a_form_token_is_bound_to_name_role_and_secret() -> None:
    ada = Principal("ada")
    check_token(ada, SECRET, token_for(ada, SECRET))
    for other in (
        token_for(Principal("ben"), SECRET),
        token_for(Principal("ada", Role.ADMIN), SECRET),
        token_for(ada, b"other"),
        "",
        "é",
    ):
        with pytest.raises(Forbidden):
            check_token(ada, SECRET, other)


def test_forms_are_decoded() -> None:
    assert read_form(b"job=a+b%26c&token=&job=d") == {"job": "d", "token": ""}


@given(st.binary(max_size=200))
def test_any_body_is_decoded_or_rejected(body: bytes) -> None:
    with contextlib.suppress(InputError):
        read_form(body)


def test_too_many_fields_are_rejected() -> None:
    with pytest.raises(InputError):
        read_form(b"&".join(b"a=1" for _ in range(50)))


@pytest.mark.parametrize(
    ("phase", "verbs"),
    [
        (Phase.RUNNING, ["weight", "limit", "pause", "cancel"]),
        (Phase.WAITING, ["weight", "limit", "pause", "cancel"]),
        (Phase.BLOCKED, ["weight", "limit", "cancel"]),
        (Phase.PAUSED, ["weight", "limit", "resume", "cancel"]),
        (Phase.FINISHED, []),
        (Phase.CANCELLED, []),
    ],
)
def test_actions_depend_on_the_phase(phase: Phase, verbs: list[str]) -> None:
    assert [action.verb for action in job_actions(replace(JOB, phase=phase), Principal("ada"))] == verbs


def test_only_owner_and_admins_get_actions() -> None:
    assert not job_actions(JOB, Principal("ben"))
    assert not job_actions(JOB, Principal("screen", Role.READER))
    assert job_actions(JOB, Principal("root", Role.ADMIN))


def test_fields_have_the_current_values() -> None:
    weight, limit, *_ = job_actions(JOB, Principal("ada"))
    assert [(field.name, field.value) for field in (*weight.fields, *limit.fields)] == [
        ("weight", 2.0),
        ("min_devices", 1),
        ("max_devices", 4),
    ]


def test_only_admins_may_change_the_policy() -> None:
    assert not policy_action("fifo", Principal("ada"))
    assert not policy_action("fifo", Principal("screen", Role.READER))
    (change,) = policy_action("fifo", Principal("root", Role.ADMIN))
    assert change.fields[0].value == "fifo"
    assert {"fifo", "las", "carpool"} <= set(change.fields[0].suggestions)


def test_policy_files_are_rejected() -> None:
    assert read_policy(" las:leases=true ") == "las:leases=true"
    with pytest.raises(InputError, match="carpool policy FILE"):
        read_policy("/tmp/mine.py:Mine")


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "1.5", "²", "1" * 20, "1000001"])
def test_invalid_numbers_of_devices_are_rejected(text: str) -> None:
    assert read_devices("4") == 4
    with pytest.raises(InputError, match="at least 1"):
        read_devices(text)


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "nan", "inf", "1e7"])
def test_invalid_weights_are_rejected(text: str) -> None:
    assert read_weight("2.5") == 2.5
    with pytest.raises(InputError, match="above 0"):
        read_weight(text)
