"""Plan changes: each decision's allocations beside those before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from carpool.dashboard.job_detail import format_devices
from carpool.service.queries.views import ChangeView, DecisionView

MAX_LINES = 8  # shown per plan


@dataclass(frozen=True, slots=True)
class ChangeLine:
    """Text of one change of allocation."""

    job: str  # empty: another user's
    text: str
    previous: str  # the allocation before, if known
    is_preempted: bool
    expected_rate: float


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A decision with the text of its changes."""

    number: int
    at: float
    reason: str
    lines: tuple[ChangeLine, ...]
    num_more: int


def plan_summaries(decisions: Sequence[DecisionView], limit: int) -> list[PlanSummary]:
    """Summaries of the newest `limit` decisions, newest first; older decisions only give previous allocations."""
    previous: dict[str, ChangeView] = {}
    summaries = []
    for index, decision in reversed(list(enumerate(decisions))):
        lines = [_line(change, previous.get(change.job) if change.job else None) for change in decision.changes]
        previous |= {change.job: change for change in decision.changes}
        if index < limit:
            shown = tuple(lines[:MAX_LINES])
            summaries.append(PlanSummary(decision.number, decision.at, decision.reason, shown, len(lines) - len(shown)))
    return summaries[::-1]


def _line(change: ChangeView, previous: ChangeView | None) -> ChangeLine:
    if not change.holds:
        before = f"from {format_devices(previous.holds)}" if previous is not None and previous.holds else ""
        return ChangeLine(change.job, "preempted", before, is_preempted=True, expected_rate=0.0)
    text = f"gets {format_devices(change.holds)}" + (f", batch {change.batch_size}" if change.batch_size else "")
    if previous is None:
        before = ""
    elif (previous.holds, previous.batch_size) == (change.holds, change.batch_size):
        before = "unchanged"
    else:
        is_other_batch = previous.batch_size and previous.batch_size != change.batch_size
        batch = f", batch {previous.batch_size}" if is_other_batch else ""
        before = f"before: {format_devices(previous.holds)}{batch}"
    return ChangeLine(change.job, text, before, is_preempted=False, expected_rate=change.believed)
