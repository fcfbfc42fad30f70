"""Amounts with units such as ``16GiB`` and ``90min``, parsed; number ranges and hyper-parameters as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from carpool.core.errors import InputError

_BYTES = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_BYTES |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_MOST_BYTES = 1 << 53
_LEAST_CAP = 1 << 20
_MOST_SECONDS = 1e12  # thirty thousand years
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: object, where: str) -> int:
    """A number of bytes, or text such as ``16GiB``."""
    amount: float = -1.0
    if isinstance(value, int) and not isinstance(value, bool):
        amount = value
    elif isinstance(value, str) and (match := _AMOUNT.fullmatch(value)) and match[2] in _BYTES:
        amount = float(match[1]) * _BYTES[match[2]]
    if amount > _MOST_BYTES:
        raise InputError(f"{value!r} is too much", where=where, way_out=f"Write at most {_MOST_BYTES >> 40} TiB.")
    if not amount >= 0:
        raise InputError(
            f"{value!r} is not an amount of memory", where=where, way_out="Write bytes, or for example 16GiB."
        )
    return int(amount)


def format_bytes(count: int) -> str:
    """An amount of memory as text, such as ``814 MiB`` or ``1.6 GiB``."""
    return f"{count / (1 << 20):.0f} MiB" if count < 1 << 30 else f"{count / (1 << 30):.4g} GiB"


def parse_cap(value: str, where: str) -> int:
    """A cap on device memory, 0 for none; too few bytes are rejected, since a unit is probably missing."""
    cap = parse_bytes(value, where) if value else 0
    if 0 < cap < _LEAST_CAP:
        raise InputError(f"{value!r} is only {cap} bytes", where=where, way_out="Add a unit, for example 16GiB.")
    return cap


def parse_seconds(value: object, where: str) -> float:
    """A number of seconds, or text such as ``90min``."""
    amount: float = -1.0
    if isinstance(value, int | float) and not isinstance(value, bool):
        amount = value
    elif isinstance(value, str) and (match := _AMOUNT.fullmatch(value)) and match[2] in _SECONDS:
        amount = float(match[1]) * _SECONDS[match[2]]
    if not 0 <= amount <= _MOST_SECONDS:
        raise InputError(
            f"{value!r} is not a duration", where=where, way_out="Write seconds, or for example 90min or 2h."
        )
    return float(amount)


def format_ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as text: ``1-3,7``."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


_MAX_VALUE = 32  # characters of a parameter's value


def format_params(params: Iterable[tuple[str, object]]) -> str:
    """Hyper-parameters as text: ``lr=0.1 width=64``."""
    return " ".join(f"{name}={format_param(value)}" for name, value in params)


def format_param(value: object) -> str:
    """The value of a hyper-parameter as text, cut where it is long."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 1]}…"
