"""What a policy does wrong, in words."""

from __future__ import annotations

import sys

from carpool.core.errors import place_of
from carpool.core.policy import Policy

FAULTS = (Exception, SystemExit)  # that a policy may raise: a file of somebody's own may call exit()

_LONGEST = 300  # of an error's own words: they are shown beside other things


def fault_of(policy: Policy, error: BaseException) -> str:
    """What was raised, and where in the policy's file: ``policy Mine failed: KeyError: 'a' (mine.py, line 12)``."""
    kind = type(policy)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    spot = place_of(error, lambda other: other == file)
    words = " ".join(str(error).split())
    words = words if len(words) <= _LONGEST else f"{words[:_LONGEST]}…"
    return f"policy {kind.__name__} failed: {type(error).__name__}: {words}{spot}"
