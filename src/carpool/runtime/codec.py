"""Messages between an executor and its workers as lines of JSON, and back; nothing is pickled."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from carpool.core.errors import CarpoolError
from carpool.runtime import protocol
from carpool.runtime.protocol import Message

_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in vars(protocol).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
}
_SPOTS = {name: tuple(spot.name for spot in fields(kind)) for name, kind in _KINDS.items()}
_write = json.JSONEncoder(separators=(",", ":")).encode


class ProtocolError(CarpoolError):
    """A line that is no message: a bug, or somebody else on the socket."""


def encode(message: Message) -> bytes:
    """A message as one line."""
    name = type(message).__name__
    return _write({"say": name, **{spot: getattr(message, spot) for spot in _SPOTS[name]}}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The inverse of `encode`."""
    try:
        value = json.loads(line)
        name = value.pop("say")
        return _KINDS[name](**{spot: _frozen(value[spot]) for spot in _SPOTS[name]})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"{line[:200]!r} is no message: {type(error).__name__}: {error}") from None


def _frozen(item: Any) -> Any:
    """Lists back into the tuples they were."""
    return tuple(_frozen(part) for part in item) if isinstance(item, list) else item
