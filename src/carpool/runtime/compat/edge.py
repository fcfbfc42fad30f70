"""Edge: an interface without a stability promise that carpool uses, for ``carpool doctor``."""

from __future__ import annotations

from typing import NamedTuple


class Edge(NamedTuple):
    """One such interface, and what carpool does without it."""

    name: str
    problem: str  # why it is unavailable; empty: it is available
    fallback: str
