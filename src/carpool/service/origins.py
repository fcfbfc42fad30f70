"""Addresses that people have for a daemon behind a proxy: what comes from a page there is from a page of ours."""

from __future__ import annotations

from urllib.parse import urlsplit

from carpool.core.errors import InputError

_USUAL = {"http": 80, "https": 443}  # ports that browsers leave out


def origin_of(address: str) -> str:
    """An address as browsers write it into ``Origin`` (RFC 6454): scheme, name, and port where it is not the usual."""
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:
        port = -1
    rest = (parts.path.strip("/"), parts.query, parts.fragment, parts.username)
    if parts.scheme not in _USUAL or not parts.hostname or any(rest) or port in (-1, 0):
        raise InputError(f"public is {address!r}", way_out="Give what people see, such as https://carpool.lab:8443.")
    return f"{parts.scheme}://{_bracketed(parts.hostname)}{'' if port in (None, _USUAL[parts.scheme]) else f':{port}'}"


def host_of(origin: str) -> str:
    """The name in an origin, as a ``Host`` header has it."""
    return _bracketed(urlsplit(origin).hostname or "")


def _bracketed(name: str) -> str:
    return f"[{name}]" if ":" in name else name
