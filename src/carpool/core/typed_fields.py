"""Typed decoding: checks plain JSON values against the annotations of a class before they are believed.

Every field has a range or a length. ``int`` is 0 to 2**53, ``float`` is finite, a text is printable and has at most
`MAX_TEXT` characters, a list `MAX_ITEMS` items; ``Annotated`` with a `Range` or `ANY_NUMBER` says otherwise.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from inspect import signature
from math import isfinite
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

from carpool.core.errors import CarpoolError

MAX_INT = 1 << 53  # every integer up to it is exact as a float
MAX_TEXT = 1 << 16
MAX_ITEMS = 1 << 20
MAX_METRICS = 4096
_BLANKS = "\n\t"
_SHOWN = 60  # characters of a refused value

_T = TypeVar("_T")
_Check = Callable[[Any], Any]  # the value, perhaps cut or frozen; raises _Refused


class Range(NamedTuple):
    """The least and the greatest value of a number, both included."""

    least: float = 0
    most: float = MAX_INT


ANY_NUMBER = "any"  # infinite or NaN too
Amount = Annotated[float, Range(0, MAX_INT)]  # of work, or of work per second
Signed = Annotated[int, Range(-MAX_INT, MAX_INT)]
Uncut = Annotated[str, "uncut"]  # a text that would mean something else if it were cut
Measured = Annotated[float, ANY_NUMBER]  # a loss may be anything


class InvalidField(CarpoolError, ValueError):
    """A value that is not of its field's type, or out of its range."""

    def __init__(self, owner: str, field: str, problem: str) -> None:
        self.owner = owner
        self.field = field
        super().__init__(f"{owner}.{field} {problem}")


class _Refused(Exception):
    """Why a value is refused, as the end of a sentence about its field."""


def shortened(text: str, limit: int = MAX_TEXT) -> str:
    """A text cut to at most `limit` characters, with a note of its full length."""
    if len(text) <= limit:
        return text
    note = f" … (cut: {len(text)} characters)"
    return text[: limit - len(note)] + note


def printable(text: str) -> str:
    """A text that every terminal, file and page can hold: control characters and lone surrogates as escapes."""
    if text.isprintable():
        return text
    return "".join([char if char in _BLANKS or char.isprintable() else _escaped(char) for char in text])


def _escaped(char: str) -> str:
    return char if unicodedata.category(char) == "Zs" else char.encode("unicode_escape").decode()


def shown(value: object) -> str:
    """A value for an error message, cut to a few words."""
    try:
        text = repr(value) if not isinstance(value, int) or abs(value) <= MAX_INT else f"about 2**{value.bit_length()}"
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def decode_fields(kind: type[_T], given: Mapping[str, Any], *, ignore_unknown: bool = False) -> _T:
    """An instance of a dataclass from JSON values; InvalidField for one that is missing, unknown or out of range."""
    checks = _CHECKS.get(kind) or _checks_of(kind)
    decoded = {}
    for name, value in given.items():
        check = checks.get(name)
        if check is None:
            if ignore_unknown:
                continue
            raise InvalidField(kind.__name__, shown(name), "is not known")
        try:
            decoded[name] = check(value)
        except _Refused as refused:
            raise InvalidField(kind.__name__, name, str(refused)) from None
    try:
        return kind(**decoded)
    except TypeError:
        missing = sorted(set(checks) - set(decoded))
        raise InvalidField(kind.__name__, ", ".join(missing), "is missing") from None


def decode_value(hint: Any, value: Any, where: str) -> Any:
    """A single value of a type; InvalidField, with the place it stands in, for another one."""
    check = _HINTS.get(hint)
    if check is None:
        check = _HINTS[hint] = _check_of(hint)
    try:
        return check(value)
    except _Refused as refused:
        owner, _, field = where.partition(".")
        raise InvalidField(owner, field, str(refused)) from None


_HINTS: dict[Any, _Check] = {}  # by type, made at first use
_CHECKS: dict[type, dict[str, _Check]] = {}  # by dataclass, made at first use


def _checks_of(kind: type) -> dict[str, _Check]:
    assert is_dataclass(kind), f"{kind} is not a dataclass"
    hints = get_type_hints(kind, include_extras=True)
    _CHECKS[kind] = {field.name: _check_of(hints[field.name]) for field in dataclass_fields(kind)}
    return _CHECKS[kind]


def _check_of(hint: Any) -> _Check:
    """The check of a type; values of a type that JSON cannot hold are not checked."""
    if isinstance(hint, NewType):
        return _name if hint.__supertype__ is str else _check_of(hint.__supertype__)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _SPECIAL.get(arguments[1]) or _number(*arguments)
    if origin in (Union, UnionType):
        checks = [_check_of(each) for each in arguments if each is not NoneType]
        check = checks[0] if len(checks) == 1 else _any_of(checks)
        return _optional(check) if NoneType in arguments else check
    if origin is tuple:
        return _list_of(arguments)
    if isinstance(hint, type) and issubclass(hint, tuple):
        return _named_tuple(hint)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(_uncut if arguments[1] is str else _check_of(arguments[1]))
    return _PLAIN.get(hint, _anything)


def _anything(value: Any) -> Any:
    return value


def _switch(value: Any) -> bool:
    if value is not True and value is not False:
        raise _Refused(f"is {shown(value)}; it must be true or false")
    return bool(value)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _Refused(f"is {shown(value)}; it must be a text")
    return shortened(printable(shortened(value)))  # cut first: a job may send a text of any length


def _uncut(value: Any) -> str:
    if type(value) is not str:
        raise _Refused(f"is {shown(value)}; it must be a text")
    return value


def _name(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_TEXT:
        raise _Refused(f"is {shown(value)}; it must be a name of at most {MAX_TEXT} characters")
    return value


def _number(kind: type, limits: Range) -> _Check:
    least, most = limits
    what = "a whole number" if kind is int else "a number"

    def check(value: Any) -> Any:
        is_number = type(value) is kind or (type(value) is int and kind is float)
        if is_number and least <= value <= most:
            return value
        raise _Refused(f"is {shown(value)}; it must be {what} from {least:g} to {most:g}")

    return check


def _finite(value: Any) -> Any:
    if (type(value) is float and isfinite(value)) or _is_exact(value):
        return value
    raise _Refused(f"is {shown(value)}; it must be a finite number")


def _measured(value: Any) -> Any:
    if type(value) is float or _is_exact(value):
        return value
    raise _Refused(f"is {shown(value)}; it must be a number")


def _is_exact(value: Any) -> bool:
    return type(value) is int and abs(value) <= MAX_INT


def _optional(check: _Check) -> _Check:
    return lambda value: None if value is None else check(value)


def _any_of(checks: Sequence[_Check]) -> _Check:
    def check(value: Any) -> Any:
        refusals = []
        for each in checks:
            try:
                return each(value)
            except _Refused as refused:
                refusals.append(refused)
        raise refusals[-1]

    return check


def _list_of(items: Sequence[Any]) -> _Check:
    if len(items) == 2 and items[1] is Ellipsis:
        each = _check_of(items[0])
        return lambda value: tuple([each(item) for item in _listed(value, MAX_ITEMS)])
    checks = [_check_of(item) for item in items]
    return lambda value: tuple([check(item) for check, item in _paired(checks, value, len(checks))])


def _named_tuple(kind: Any) -> _Check:
    checks = [_check_of(hint) for hint in get_type_hints(kind, include_extras=True).values()]
    least = sum(each.default is each.empty for each in signature(kind).parameters.values())
    return lambda value: kind(*[check(item) for check, item in _paired(checks, value, least)])


def _paired(checks: Sequence[_Check], value: Any, least: int) -> list[tuple[_Check, Any]]:
    items = _listed(value, len(checks))
    if len(items) < least:
        raise _Refused(f"is {shown(value)}; it must have {least} items")
    return list(zip(checks, items, strict=False))


def _listed(value: Any, most: int) -> Sequence[Any]:
    if not isinstance(value, list | tuple) or len(value) > most:
        raise _Refused(f"is {shown(value)}; it must be a list of at most {most} items")
    return value


def _mapping(check: _Check) -> _Check:
    most = MAX_METRICS if check is _measured else MAX_ITEMS

    def checked(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping) or len(value) > most:
            raise _Refused(f"is {shown(value)}; it must be a mapping of at most {most} entries")
        return {_name(name): check(item) for name, item in value.items()}

    return checked


_SPECIAL: dict[Any, _Check] = {ANY_NUMBER: _measured, "uncut": _uncut}
_PLAIN: dict[Any, _Check] = {
    int: _number(int, Range()),
    float: _finite,
    str: _text,
    bool: _switch,
}
