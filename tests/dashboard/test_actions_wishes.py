"""Pages offer only what may be wished, and take only what can be meant."""

from dataclasses import fields, replace
from typing import Any

import pytest

from carpool.core.errors import InputError
from carpool.core.model import JobId, Phase
from carpool.dashboard.actions import job_actions, policy_action, read_devices, read_policy, read_weight
from carpool.service.auth import Principal, Role
from carpool.service.queries.views import JobView

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


@pytest.mark.parametrize(
    ("phase", "verbs"),
    [
        (Phase.RUNNING, ["weigh", "limit", "pause", "cancel"]),
        (Phase.WAITING, ["weigh", "limit", "pause", "cancel"]),
        (Phase.BLOCKED, ["weigh", "limit", "cancel"]),
        (Phase.PAUSED, ["weigh", "limit", "resume", "cancel"]),
        (Phase.FINISHED, []),
        (Phase.CANCELLED, []),
    ],
)
def test_only_what_is_possible_is_offered(phase: Phase, verbs: list[str]) -> None:
    assert [action.verb for action in job_actions(replace(JOB, phase=phase), Principal("ada"))] == verbs


def test_nothing_is_offered_to_others() -> None:
    assert not job_actions(JOB, Principal("ben"))
    assert not job_actions(JOB, Principal("screen", Role.READER))
    assert job_actions(JOB, Principal("root", Role.ADMIN))


def test_the_fields_hold_what_is_so_now() -> None:
    weigh, limit, *_ = job_actions(JOB, Principal("ada"))
    assert [(field.name, field.value) for field in (*weigh.fields, *limit.fields)] == [
        ("weight", 2.0),
        ("min_devices", 1),
        ("max_devices", 4),
    ]


def test_a_policy_is_changed_by_admins_alone() -> None:
    assert not policy_action("fifo", Principal("ada"))
    assert not policy_action("fifo", Principal("screen", Role.READER))
    (change,) = policy_action("fifo", Principal("root", Role.ADMIN))
    assert change.fields[0].value == "fifo"
    assert {"fifo", "las", "carpool"} <= set(change.fields[0].suggestions)


def test_a_policy_in_a_file_is_left_to_the_command_line() -> None:
    assert read_policy(" las:leases=true ") == "las:leases=true"
    with pytest.raises(InputError, match="carpool policy FILE"):
        read_policy("/tmp/mine.py:Mine")


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "1.5", "²", "1" * 20, "1000001"])
def test_a_number_of_devices_is_whole_and_at_least_one(text: str) -> None:
    assert read_devices("4") == 4
    with pytest.raises(InputError, match="at least 1"):
        read_devices(text)


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "nan", "inf", "1e7"])
def test_a_weight_is_a_number_above_nothing(text: str) -> None:
    assert read_weight("2.5") == 2.5
    with pytest.raises(InputError, match="above 0"):
        read_weight(text)
