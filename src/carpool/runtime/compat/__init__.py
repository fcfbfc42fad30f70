"""Bindings to the operating system, the NVIDIA driver and private torch APIs."""

from __future__ import annotations

from typing import NamedTuple


class Feature(NamedTuple):
    """An interface without a stability promise, and the effect of its absence, for ``carpool doctor``."""

    name: str
    problem: str  # why it is unavailable; empty: it is available
    fallback: str
