"""Feature: an interface without a stability promise, and what carpool does without it."""

from __future__ import annotations

from typing import NamedTuple


class Feature(NamedTuple):
    """One such interface, for ``carpool doctor``."""

    name: str
    problem: str  # why it is unavailable; empty: it is available
    fallback: str
