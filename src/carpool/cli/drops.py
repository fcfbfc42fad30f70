"""Which rows of a trace were left out, told to whoever gave it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carpool.sim.traces.trace import DroppedRow

_LISTED = 5  # of one reason


def drops_told(dropped: Mapping[str, int], rows: Sequence[DroppedRow]) -> Iterator[str]:
    """One line for every reason: how many rows, and the first of those that are known."""
    for reason, count in dropped.items():
        known = [f"row {row.row}" if row.row else f"job {row.job}" for row in rows if row.reason == reason][:_LISTED]
        more = ", …" if len(known) < count else ""
        yield f"dropped {count} row{'s' if count != 1 else ''}: {reason}" + (
            f" ({', '.join(known)}{more})" if known else ""
        )
