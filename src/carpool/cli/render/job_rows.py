"""Table rows for the daemon's jobs and foreign processes; standard library only, so ``ps`` starts fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from carpool.core.units import format_param, format_params, format_ranges

HEADINGS = ("job", "user", "phase", "devices", "step", "loss", "steps/s", "left")
NODE_HEADINGS = ("node", "devices", "held", "state")
_MAX_VALUES = 3  # of a parameter of several jobs
FOREIGN_HEADINGS = ("device", "pid", "user", "program", "memory", "")


def node_state(node: Mapping[str, Any]) -> str:
    """The state of a node in a word or two."""
    return "drained" if node["is_drained"] else "lost" if node["is_lost"] else "in use" if node["held"] else "idle"


def node_row(node: Mapping[str, Any]) -> tuple[str, ...]:
    """Cells of a node, one for each of NODE_HEADINGS."""
    devices = ", ".join(f"{count} {kind}" for kind, count in node["kinds"].items())
    return (node["name"], devices, f"{node['held']:g}", node_state(node))


def foreign_row(process: Mapping[str, Any]) -> tuple[str, ...]:
    """Cells of a process that is not a job, one for each of FOREIGN_HEADINGS."""
    memory = process["memory_bytes"]
    return (
        process["device"],
        str(process["pid"]),
        process["user"],
        process["program"],
        f"{memory / (1 << 30):.1f} GiB" if memory else "",
        "device not scheduled" if process["keeps_free"] else "",
    )


def fold_sweeps(jobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Fold jobs of a sweep that are in the same phase and not running into one row, such as ``mlp[3-9]``."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for job in jobs:
        is_alone = not job["array"] or job["phase"] == "running"
        key = (job["id"],) if is_alone else (job["array"], job["user"], job["phase"])
        groups.setdefault(key, []).append(job)
    rows = []
    for members in groups.values():
        row = dict(members[0])
        if len(members) > 1:
            members = sorted(members, key=_number)
            numbers, params = list(map(_number, members)), _merged_params(members)
            row.update(
                id=f"{row['array']}[{format_ranges(numbers)}]", steps=0, total_steps=None, loss=None, params=params
            )
        rows.append(row)
    return rows


def _number(job: Mapping[str, Any]) -> int:
    """The number of a job in its sweep."""
    return int(job["id"].rpartition("-")[2])


def _merged_params(members: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The values of several jobs, by parameter: ``0.1,0.01,…``."""
    merged = {}
    for name in members[0].get("params", {}):
        values = list(dict.fromkeys(format_param(member["params"].get(name, "")) for member in members))
        merged[name] = ",".join([*values[:_MAX_VALUES], *(["…"] if len(values) > _MAX_VALUES else [])])
    return merged


def age_column(jobs: Sequence[Mapping[str, Any]], now: float) -> list[str]:
    """The time since each job was submitted."""
    return [span(max(0.0, now - job["submitted_at"])) for job in jobs]


def extra_columns(jobs: Sequence[Mapping[str, Any]], now: float) -> dict[str, list[str]]:
    """Columns for parameters, priority and time to deadline, each only if a job has one."""
    columns: dict[str, list[str]] = {}
    if any(job.get("params") for job in jobs):
        columns["parameters"] = [format_params(job.get("params", {}).items()) for job in jobs]
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
    """Cells of a job, one for each of HEADINGS."""
    total, loss, left = job["total_steps"], job["loss"], job["ends_in"]
    step = f"{job['steps']:.0f}" + (f"/{total:.0f}" if total else "")
    return (
        job["id"],
        job["user"],
        job["phase"],
        ",".join(map(_device, job["holds"])),
        step if job["steps"] or total else "",
        "" if loss is None else f"{loss:.4f}",
        f"{job['steps_per_s']:.1f}" if job["steps_per_s"] else "",
        _time_left(job) if left is None else f"{span(left['mean_s'])} ± {span(left['std_s'])}",
    )


def _time_left(job: Mapping[str, Any]) -> str:
    """What to show for an unknown time left: '?' for a running job, else nothing."""
    return "?" if job["phase"] == "running" else ""


def _device(share: Mapping[str, Any]) -> str:
    return str(share["name"]) + ("" if share["fraction"] == 1.0 else f"@{share['fraction']:.0%}")


def span(seconds: float) -> str:
    """Format a duration in its largest unit of which it has at least two."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def short(name: str, limit: int = 24) -> str:
    """Shorten a name in the middle: a sweep's number is at its end."""
    if len(name) <= limit:
        return name
    end = (limit - 1) // 2
    return f"{name[: limit - 1 - end]}…{name[-end:]}"


def as_columns(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with aligned columns and headings in capitals."""
    table = [tuple(heading.upper() for heading in headings), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
