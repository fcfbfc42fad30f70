"""Reads a run's journal: which shares held when, what was decided, and the jobs' progress."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

Records = Sequence[dict[str, Any]]


class Held(NamedTuple):
    """A share, in percent, that all jobs had from one instant to another, in the run's own seconds."""

    share: int
    since: float
    until: float


def read(journal: Path) -> Records:
    """The records so far; the last line may be half written."""
    try:
        lines = journal.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines[1:]:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


def plans(records: Records) -> list[list[Any]]:
    """When what was decided."""
    return [[round(record["at"], 2), _reason(record)] for record in records if _reason(record)]


def applied(records: Records) -> list[list[Any]]:
    """When which job came to hold what was ordered."""
    return [[round(at, 2), fact["job"]] for at, fact in _facts(records, "AssignApplied")]


def settled_at(records: Records) -> float | None:
    """When the policy had settled for shares, and these had come to hold; None if it has not."""
    pending: set[str] | None = None
    for record in records:
        done = {fact["job"] for fact in record.get("facts", ()) if fact["fact"] == "AssignApplied"}
        if "keeps" in _reason(record):
            pending = _changed(record)
        elif pending is not None:
            pending -= done
        if pending is not None and not pending:
            return float(record["at"])
    return None


def left_at(records: Records) -> float:
    """When the shares that were chosen were given up for equal ones; infinite where they never were."""
    return min((record["at"] for record in records if _reason(record).startswith("holds ")), default=inf)


def is_walked(records: Records) -> bool:
    """Whether all equal shares of a walk have been held."""
    return any(_reason(record) == "walked through all" for record in records)


class _Standing:
    """Since when all jobs have had what was ordered, as far as the records have been heard."""

    def __init__(self) -> None:
        self.since: float | None = None
        self._pending: set[str] = set()

    def hear(self, record: Mapping[str, Any]) -> None:
        """What jobs say of orders before this record's own."""
        for fact in record.get("facts", ()):
            if fact["fact"] == "AssignApplied":
                self._pending.discard(fact["job"])
                self.since = record["at"] if not self._pending else self.since

    def order(self, record: Mapping[str, Any]) -> None:
        """What this record orders."""
        self._pending |= _changed(record)


def held(records: Records) -> list[Held]:
    """The equal shares of a walk, each from when all jobs had it until the next was ordered."""
    found = []
    share: int | None = None
    standing = _Standing()
    for record in records:
        standing.hear(record)
        words = re.match(r"holds (\d+)% each", _reason(record))
        if (words or _reason(record) == "walked through all") and share is not None and standing.since is not None:
            found.append(Held(share, standing.since, record["at"]))
        if words:
            share, standing.since = int(words[1]), None if _changed(record) else record["at"]
        standing.order(record)
    return found


def shares(records: Records, jobs: Sequence[str], before: float = inf) -> list[int]:
    """What jobs were ordered to have last, before an instant, in percent."""
    found = dict.fromkeys(jobs, 0)
    for record in records:
        for change in (record.get("planned") or {}).get("changes", ()) if record["at"] < before else ():
            given = (change.get("allocation") or {}).get("shares")
            found[change["job"]] = round(100 * given[0][2]) if given else 0
    return [found[job] for job in jobs]


def measuring_s(records: Records) -> float:
    """Seconds in which all jobs ran as ordered and were looked at, until shares were settled."""
    total, standing = 0.0, _Standing()
    for record in records:
        standing.hear(record)
        is_over = "keeps" in _reason(record)
        if standing.since is not None and (_changed(record) or is_over):
            total += record["at"] - standing.since
            standing.since = None
        standing.order(record)
        if is_over:
            break
    return total


def rate(records: Records, job: str, since: float, until: float = inf) -> float:
    """Steps per second from one instant to another."""
    reports = [(at, fact) for at, fact in _facts(records, "ProgressReported") if since <= at <= until]
    points = [(at, fact["done"]) for at, fact in reports if fact["job"] == job]
    if len(points) < 2:
        return 0.0
    return float((points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0]))


def probed(records: Records) -> dict[str, float]:
    """Steps per second of jobs alone, as they were probed first: before anything was tried, with the whole device."""
    facts = [fact for record in records for fact in record.get("facts", ()) if fact.get("alone")]
    return {fact["job"]: fact["rate"] for fact in reversed(facts)}


def _facts(records: Records, kind: str) -> list[tuple[float, dict[str, Any]]]:
    return [(record["at"], fact) for record in records for fact in record.get("facts", ()) if fact["fact"] == kind]


def _reason(record: dict[str, Any]) -> str:
    return str((record.get("planned") or {}).get("reason", ""))


def _changed(record: dict[str, Any]) -> set[str]:
    return {change["job"] for change in (record.get("planned") or {}).get("changes", ())}
