"""Protocol between an executor and its client: options, orders, reports and inventory as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from carpool.core.journal import allocation_from_json, allocation_to_json, fact_from_json, fact_to_json
from carpool.core.messages import RUN, Assign, Order, Probe, Release
from carpool.core.model import JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.program import Program
from carpool.runtime.executor.reports import Evaluation, Facts, Gone, Outcome, Report, Sized, Told

_REPORTS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Sized, Told, Evaluation, Outcome, Gone)}


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """How patient an executor is."""

    mirror_s: float = 2.0  # between mirrors of a running job
    hang_s: float = 10.0  # without a sign of life, after which a worker is killed
    max_wait_s: float = 1.0  # that a job waits for its turn on a device, whatever its turn is
    quantum_s: float = 0.02  # that a job computes before it asks for another turn
    turn_steps: int = 1  # that it makes at least with one turn, however long they take
    heirs: int = 2  # of those who take turns on a GPU, so many have their next step queued behind the one that computes
    grace_s: float = 5.0  # between a polite word and a kill
    tick_s: float = 0.1  # how often the clock is looked at
    heartbeat_s: float = 0.5
    updates: str = "chosen"  # who updates the parameters of a job on several devices: chosen, all, first or even
    reducer: str = "shared"  # how contributions of several devices meet: shared (memory) or group (gloo's messages)
    splits: bool = True  # steps that do not fit into memory even alone may become micro-steps
    mps: bool = True  # jobs that share a GPU compute at the same time, where NVIDIA's service is there
    warm: int = 0  # processes kept ready on each GPU for jobs to come; each takes up a CUDA context there
    is_closed: bool = False  # only jobs that are known already will come: where none waits, no process is kept ready
    memory_cap: int = 0  # bytes of each device for the jobs on it, which take turns under it; 0: all there is
    speculates: bool = True  # under a cap: the next job comes in while another computes, and who computed last stays
    leaves_early: bool = True  # under a cap: a job that has to make room does so at the end of its turn, unasked
    on_orphan: str = "exit"  # when nobody is at the other end any more: exit, or wait for somebody else
    orphan_s: float = 86400.0  # that it waits, all jobs standing still, before it keeps their states on disk and ends
    handover_s: float = 60.0  # that jobs go on without anybody who said that another one would come
    environment: Mapping[str, str] = field(default_factory=dict)  # for the executor and all it starts


def json_line(value: Mapping[str, Any]) -> bytes:
    """A value as a line; ASCII, because error texts may hold anything."""
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
    """The inverse of `report_to_json`."""
    kind = value.pop("report")
    if kind == "Facts":
        return Facts(tuple(fact_from_json(fact) for fact in value["facts"]))
    report: Report = _REPORTS[kind](**value)
    return report


def program_from_json(value: dict[str, Any]) -> Program:
    """A program from the fields that ``asdict`` made of it."""
    return Program.from_json(value)


def devices_from_json(values: Sequence[dict[str, Any]]) -> list[LocalDevice]:
    """Devices from the fields that ``asdict`` made of them."""
    return [LocalDevice(**{**value, "cores": tuple(value["cores"])}) for value in values]


def options_from_json(value: dict[str, Any]) -> ExecutorOptions:
    """Options from the fields that ``asdict`` made of them."""
    return ExecutorOptions(**value)


@dataclass(frozen=True, slots=True)
class HeldJobStatus:
    """One job that was introduced."""

    generation: int  # of the newest order that it has heard of
    steps: int  # done
    is_still: bool  # no worker of it computes
    is_over: bool  # its end has been reported


@dataclass(frozen=True, slots=True)
class Inventory:
    """Which executor it is, where, and how its jobs stand."""

    pid: int
    life: int  # the epoch in which it was first claimed: another life, other numbers on its reports
    devices: tuple[LocalDevice, ...]
    jobs: Mapping[JobId, HeldJobStatus]


def inventory_to_json(inventory: Inventory) -> dict[str, Any]:
    """An inventory as plain JSON values."""
    return asdict(inventory)


def inventory_from_json(value: Mapping[str, Any]) -> Inventory:
    """The inverse of `inventory_to_json`."""
    jobs = {JobId(job): HeldJobStatus(**standing) for job, standing in value["jobs"].items()}
    return Inventory(value["pid"], value["life"], tuple(devices_from_json(value["devices"])), jobs)
