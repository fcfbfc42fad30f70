"""Table rows for the daemon's jobs and foreign processes; standard library only, so ``ps`` starts fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEADINGS = ("job", "user", "phase", "devices", "step", "loss", "steps/s", "left")
OUTSIDER_HEADINGS = ("device", "pid", "user", "program", "memory", "")


def outsider_row(outsider: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of a process that is nobody's job, one for each of OUTSIDER_HEADINGS."""
    memory = outsider["memory_bytes"]
    return (
        outsider["device"],
        str(outsider["pid"]),
        outsider["user"],
        outsider["program"],
        f"{memory / (1 << 30):.1f} GiB" if memory else "",
        "kept free for it" if outsider["keeps_free"] else "",
    )


def fold_sweeps(jobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Jobs of one sweep that stand alike and do not run as one, such as ``mlp[3-9]``; the others as they are."""
    found: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for job in jobs:
        is_alone = not job["array"] or job["phase"] == "running"
        key = (job["id"],) if is_alone else (job["array"], job["user"], job["phase"])
        found.setdefault(key, []).append(job)
    rows = []
    for members in found.values():
        row = dict(members[0])
        if len(members) > 1:
            numbers = sorted(int(member["id"].rpartition("-")[2]) for member in members)
            row.update(id=f"{row['array']}[{_runs(numbers)}]", steps=0, total_steps=None, loss=None)
        rows.append(row)
    return rows


def _runs(numbers: Sequence[int]) -> str:
    """Numbers in ascending order as runs: ``1-3,7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def priority_columns(jobs: Sequence[Mapping[str, Any]], now: float) -> dict[str, list[str]]:
    """Columns of priorities and of times to deadlines, where any of the jobs has some."""
    columns: dict[str, list[str]] = {}
    if any(job["priority"] != "normal" for job in jobs):
        columns["priority"] = [job["priority"] for job in jobs]
    if any(job["deadline"] is not None for job in jobs):
        columns["deadline"] = [_to_deadline(job, now) for job in jobs]
    return columns


def _to_deadline(job: Mapping[str, Any], now: float) -> str:
    if job["deadline"] is None:
        return ""
    if job["is_late"]:
        return "missed"
    return "met" if job["ended_at"] is not None else f"in {span(max(0.0, job['deadline'] - now))}"


def job_row(job: Mapping[str, Any]) -> tuple[str, ...]:
    """A job's cells, one for each of HEADINGS."""
    total, loss, left = job["total_steps"], job["loss"], job["ends_in"]
    step = f"{job['steps']:.0f}" + (f"/{total:.0f}" if total else "")
    return (
        job["id"],
        job["user"],
        job["phase"],
        ",".join(map(_holding, job["holds"])),
        step if job["steps"] or total else "",
        "" if loss is None else f"{loss:.4f}",
        f"{job['steps_per_s']:.1f}" if job["steps_per_s"] else "",
        "" if left is None else f"{span(left['mean_s'])} ± {span(left['std_s'])}",
    )


def _holding(hold: Mapping[str, Any]) -> str:
    return str(hold["name"]) + ("" if hold["fraction"] == 1.0 else f"@{hold['fraction']:.0%}")


def span(seconds: float) -> str:
    """A length of time in the largest unit that fits."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def short(name: str, most: int = 24) -> str:
    """A name for a table that has to fit on a screen: its beginning and its end, where numbers of sweeps stand."""
    if len(name) <= most:
        return name
    end = (most - 1) // 2
    return f"{name[: most - 1 - end]}…{name[-end:]}"


def as_columns(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: columns as wide as what is in them."""
    table = [tuple(heading.upper() for heading in headings), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
