"""Protocol between an executor and its client: options, orders, reports and inventory as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from carpool.core.journal import allocation_from_json, allocation_to_json, fact_from_json, fact_to_json
from carpool.core.messages import RUN, Assign, Order, Probe, Release
from carpool.core.model import JobId
from carpool.core.typed_fields import decode_fields
from carpool.jobs.devices import LocalDevice
from carpool.runtime.executor.reports import (
    Evaluation,
    Facts,
    Gone,
    HandedOver,
    InvalidReport,
    Outcome,
    Report,
    Sized,
    Told,
)

_INVALID = (ValueError, KeyError, TypeError)
_REPORTS: dict[str, type[Any]] = {
    report.__name__: report for report in (Sized, Told, Evaluation, Outcome, HandedOver, Gone)
}


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """Intervals, timeouts and sharing options of an executor."""

    mirror_s: float = 2.0  # between mirrors of a running job
    copies_mirrors: bool = False  # to disk, for the scheduler of another machine to fetch
    hang_s: float = 10.0  # a worker that is silent for this long is killed; one of its threads sends heartbeats
    max_wait_s: float = 1.0  # for a turn on a time-sliced device, whatever the priority of the turn
    quantum_s: float = 0.02  # target duration of a turn
    turn_steps: int = 1  # at least this many steps per turn, however long they take
    heirs: int = 2  # grants queued behind the running one on a time-sliced GPU
    grace_s: float = 5.0  # between a request to exit and a kill
    tick_s: float = 0.1
    heartbeat_s: float = 0.5
    updates: str = "chosen"  # which device updates the parameters: chosen, all, first or even
    reducer: str = "shared"  # how gradients are combined: shared (memory) or group (a gloo process group)
    splits: bool = True  # split steps that do not fit into memory into micro-batches
    mps: bool = True  # jobs that share a GPU compute at the same time, if MPS is available
    warm: int = 0  # prewarmed processes per GPU (CLI and daemon: 1); each holds a CUDA context
    is_closed: bool = False  # no further jobs will be added: prewarm only while a job waits
    memory_cap: int = 0  # bytes of each device for its jobs, which are time-sliced under it; 0: no cap
    speculates: bool = True  # under a cap: swap the next job in ahead of its turn, keep the last ones
    leaves_early: bool = True  # under a cap: order a job to swap out before its turn has ended
    on_orphan: str = "exit"  # without a client: exit, or wait for the next one
    orphan_s: float = 86400.0  # wait for a client, with all jobs suspended, before saving their states and exiting
    handover_s: float = 60.0  # after a client that announced a successor has left, jobs continue for this long
    job_marker: str = ""  # file that names the job being handled, for the next client; empty: none
    log_bytes: int = 1 << 26  # of a job's log that are always kept; it is trimmed at twice this size. 0: no limit
    environment: Mapping[str, str] = field(default_factory=dict)  # of the executor and all its processes
    pass_env: Sequence[str] = field(default_factory=list)  # further variables of the daemon that its jobs get


def json_line(value: Mapping[str, Any]) -> bytes:
    """A value as one line; ASCII, because error texts may contain anything."""
    return json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n"


def order_to_json(order: Order) -> dict[str, Any]:
    """An order as plain JSON values."""
    value: dict[str, Any] = {"job": order.job, "generation": order.generation}
    if isinstance(order, Assign):
        value["allocation"] = allocation_to_json(order.allocation)
        if isinstance(order.purpose, Probe):
            value["probe_steps"] = order.purpose.steps
    return value


def order_from_json(value: Mapping[str, Any]) -> Order:
    """The inverse of `order_to_json`."""
    job = JobId(value["job"])
    if "allocation" not in value:
        return Release(job, value["generation"])
    purpose = Probe(value["probe_steps"]) if "probe_steps" in value else RUN
    return Assign(job, allocation_from_json(value["allocation"]), value["generation"], purpose)


def report_to_json(report: Report) -> dict[str, Any]:
    """A report as plain JSON values."""
    if isinstance(report, Facts):
        return {"report": "Facts", "facts": [fact_to_json(fact) for fact in report.facts]}
    return {"report": type(report).__name__, **asdict(report)}


def report_from_json(value: dict[str, Any]) -> Report:
    """The inverse of `report_to_json`; InvalidField for a value out of range."""
    name = value.pop("report")
    if name == "Facts":
        return Facts(tuple(fact_from_json(fact) for fact in value["facts"]))
    report: Report = decode_fields(_REPORTS[name], value)
    return report


def checked_report_from_json(value: dict[str, Any]) -> Report:
    """A report from an executor; one with a value out of range becomes an error that fails its job."""
    if value.get("report") != "Facts":
        try:
            return report_from_json(dict(value))
        except _INVALID as error:
            return Facts((), (_invalid(value, error),))
    facts, invalid = [], []
    for each in value["facts"]:
        try:
            facts.append(fact_from_json(each))
        except _INVALID as error:
            invalid.append(_invalid(each, error))
    return Facts(tuple(facts), tuple(invalid))


def _invalid(value: Mapping[str, Any], error: Exception) -> InvalidReport:
    return InvalidReport(JobId(str(value.get("job", ""))), f"its executor reported an invalid value: {error}")


def devices_from_json(values: Sequence[dict[str, Any]]) -> list[LocalDevice]:
    """The inverse of ``asdict`` for devices."""
    return [LocalDevice(**{**value, "cores": tuple(value["cores"])}) for value in values]


@dataclass(frozen=True, slots=True)
class HeldJobStatus:
    """Status of a job that an executor holds."""

    generation: int  # of its newest order
    steps: int  # done
    is_still: bool  # no worker of it computes
    is_over: bool  # its end has been reported


@dataclass(frozen=True, slots=True)
class Inventory:
    """Identity, devices and jobs of an executor, sent to a client that claims it."""

    pid: int
    life: int  # epoch of its first claim; identifies the executor and the numbering of its reports
    devices: tuple[LocalDevice, ...]
    jobs: Mapping[JobId, HeldJobStatus]


def inventory_from_json(value: Mapping[str, Any]) -> Inventory:
    """The inverse of ``asdict`` for an inventory."""
    jobs = {JobId(job): HeldJobStatus(**status) for job, status in value["jobs"].items()}
    return Inventory(value["pid"], value["life"], tuple(devices_from_json(value["devices"])), jobs)
