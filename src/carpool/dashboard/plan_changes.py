"""Plan changes: each decision's allocations beside those before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from carpool.dashboard.job_detail import describe_holdings
from carpool.service.queries.views import ChangeView, DecisionView

MOST_LINES = 8  # of a plan; the others are counted


@dataclass(frozen=True, slots=True)
class ChangeLine:
    """One change, in words."""

    job: str  # empty: somebody else's
    words: str
    before: str  # what it had, where that is known and says something
    is_off: bool
    believed: float


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A decision with its changes in words."""

    number: int
    at: float
    reason: str
    lines: tuple[ChangeLine, ...]
    num_more: int


def plan_summaries(decisions: Sequence[DecisionView], most: int) -> list[PlanSummary]:
    """The newest `most` of decisions that come newest first; older ones only say what was before."""
    had: dict[str, ChangeView] = {}
    found = []
    for place, decision in reversed(list(enumerate(decisions))):
        lines = [_line(change, had.get(change.job) if change.job else None) for change in decision.changes]
        had |= {change.job: change for change in decision.changes}
        if place < most:
            shown = tuple(lines[:MOST_LINES])
            found.append(PlanSummary(decision.number, decision.at, decision.reason, shown, len(lines) - len(shown)))
    return found[::-1]


def _line(change: ChangeView, had: ChangeView | None) -> ChangeLine:
    batch = f", batch {change.batch_size}" if change.batch_size else ""
    if not change.holds:
        before = "" if had is None or not had.holds else describe_holdings(had.holds)
        return ChangeLine(change.job, "is taken off", before, is_off=True, believed=0.0)
    words = f"gets {describe_holdings(change.holds)}{batch}"
    if had is None:
        before = ""
    elif (had.holds, had.batch_size) == (change.holds, change.batch_size):
        before = "as before"
    else:
        had_batch = f", batch {had.batch_size}" if had.batch_size and had.batch_size != change.batch_size else ""
        before = f"before: {describe_holdings(had.holds)}{had_batch}"
    return ChangeLine(change.job, words, before, is_off=False, believed=change.believed)
