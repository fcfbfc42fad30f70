"""A form is taken from whom it was made for, and from nobody else."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import InputError
from carpool.dashboard.actions import check_token, read_form, token_for
from carpool.service.auth import Forbidden, Principal, Role

SECRET = b"secret"


def test_only_their_own_token_counts() -> None:
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


def test_forms_are_read_as_browsers_send_them() -> None:
    assert read_form(b"job=a+b%26c&token=&job=d") == {"job": "d", "token": ""}


@given(st.binary(max_size=200))
def test_no_body_does_worse_than_be_refused(body: bytes) -> None:
    with contextlib.suppress(InputError):
        read_form(body)


def test_too_many_fields_are_refused() -> None:
    with pytest.raises(InputError):
        read_form(b"&".join(b"a=1" for _ in range(50)))
