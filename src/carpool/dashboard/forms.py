"""Tokens that prove a form came from a page of ours, shown to the person who sends it."""

from __future__ import annotations

import hmac
from hashlib import sha256
from urllib.parse import parse_qsl

from carpool.core.errors import InputError
from carpool.service.people import Forbidden, Person

_MOST_FIELDS = 20


def token_for(person: Person, secret: bytes) -> str:
    """HMAC-SHA256 over who they are: another site can send a form in their name, but cannot read the token."""
    return hmac.new(secret, f"form\0{person.role}\0{person.name}".encode(), sha256).hexdigest()


def check_token(person: Person, secret: bytes, token: str) -> None:
    """Forbidden unless the token is theirs; compared in constant time."""
    if not hmac.compare_digest(token_for(person, secret).encode(), token.encode()):
        raise Forbidden("the form is not from a page that is still valid. Go back, load the page again and repeat.")


def read_form(body: bytes) -> dict[str, str]:
    """The fields of a plain form; of a name that comes twice, the last."""
    try:
        return dict(parse_qsl(body.decode("utf-8"), keep_blank_values=True, max_num_fields=_MOST_FIELDS))
    except ValueError as error:  # not UTF-8, or too many fields
        raise InputError(f"the form cannot be read: {error}", way_out="Load the page again and repeat.") from error
