"""Decisions about a job as JSON: what programs read of runs and of plans."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from carpool.backends.ledger import Given

Json = dict[str, object]


def as_allocation(given: Given, batch_size: int, names: Mapping[int, str]) -> Json:
    """One decision; no devices means that it was taken off them."""
    held = given.allocation
    fractions = [] if held is None else [share.fraction for share in held.shares for _ in share.devices]
    return {
        "at_s": given.at,
        "devices": [] if held is None else [names.get(device, str(device)) for device in held.devices()],
        "fractions": fractions,
        "batch_size": (batch_size if held is None else held.batch_size or batch_size) or None,
        "parts": [] if held is None else list(held.parts),
        "reason": given.reason,
    }


def finite(value: float | None) -> float | None:
    """JSON knows no NaN."""
    return value if value is not None and isfinite(value) else None
