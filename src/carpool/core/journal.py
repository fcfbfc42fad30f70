"""Journal format: records as JSON lines, read by recovery, replay, explain and reports.

The first line is a header with ``schema``; every further line is one `Record`. Equal records give equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, NamedTuple, TextIO, TypeVar

from carpool.core import messages
from carpool.core.errors import JournalError
from carpool.core.host_resources import HostResources
from carpool.core.messages import RUN, Change, Fact, JobSubmitted, Planned, Probe, Record
from carpool.core.model import Allocation, JobId, JobSpec, NodeId, Share
from carpool.core.topology import Bank, Cluster, Link, Node
from carpool.core.typed_fields import (
    MAX_INT,
    Amount,
    InvalidField,
    Measured,
    Range,
    Signed,
    decode_fields,
    decode_value,
    shortened,
    shown,
)

SCHEMA = 1

_Device = Annotated[int, Range(0, 1 << 24)]
_RUNS = tuple[tuple[_Device, _Device, float, Signed], ...]  # first, stop, fraction, turn

_T = TypeVar("_T")

_FACTS: dict[str, type[Fact]] = {
    name: kind
    for name, kind in vars(messages).items()
    if isinstance(kind, type) and issubclass(kind, Fact) and kind is not Fact
}


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of a journal."""

    version: str  # of carpool
    policy: str
    cluster: Cluster
    seed: int = 0


class JournalWriter:
    """Observer that appends records to a text stream, after a header if one is given."""

    def __init__(self, stream: TextIO, header: Header | None) -> None:
        self._stream = stream
        if header is not None:
            self._write({"schema": SCHEMA, **header_to_json(header)})

    def record(self, record: Record) -> None:
        self._write(record_to_json(record))

    def _write(self, line: dict[str, Any]) -> None:
        # ASCII only: an error text may hold lone surrogates or unusual line ends.
        self._stream.write(json.dumps(line, separators=(",", ":")) + "\n")


def read_journal(lines: Iterable[str]) -> tuple[Header, Iterator[Record]]:
    """The header, and the records lazily; JournalError with the line number on anything else."""
    numbered = enumerate(lines, start=1)
    _, first = next(numbered, (1, ""))
    head = _parse(1, first)
    schema = head.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA:
        raise JournalError(f"journal line 1: schema {schema!r} is not supported (this version reads 1 to {SCHEMA})")
    return _decode(1, header_from_json, head), (_decode(n, record_from_json, _parse(n, line)) for n, line in numbered)


def _parse(number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise JournalError(f"journal line {number} is not JSON ({error.msg}); it may be truncated") from None
    if not isinstance(value, dict):
        raise JournalError(f"journal line {number} is {type(value).__name__}, not an object")
    return value


def _decode(number: int, decode: Callable[[dict[str, Any]], _T], value: dict[str, Any]) -> _T:
    try:
        return decode(value)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise JournalError(f"journal line {number} is invalid: {type(error).__name__}: {error}") from None


def record_to_json(record: Record) -> dict[str, Any]:
    """A record as plain JSON values."""
    line: dict[str, Any] = {"at": record.at, "facts": [fact_to_json(fact) for fact in record.facts]}
    if record.planned is not None:
        line["planned"] = _planned_to_json(record.planned)
    if record.ignored:
        line["ignored"] = [fact_to_json(fact) for fact in record.ignored]
    return line


def record_from_json(line: dict[str, Any]) -> Record:
    """The inverse of `record_to_json`."""
    planned = line.get("planned")
    return Record(
        at=decode_value(Amount, line["at"], "Record.at"),
        facts=[fact_from_json(fact) for fact in line["facts"]],
        planned=None if planned is None else _planned_from_json(planned),
        ignored=[fact_from_json(fact) for fact in line.get("ignored", ())],
    )


class SkippedItem(NamedTuple):
    """A part of a record that cannot be used, and the job it is about."""

    job: JobId  # empty: unknown
    reason: str


UNUSABLE = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    OverflowError,
    RecursionError,
)  # raised for values


def salvage_record(line: Any) -> tuple[Record, list[SkippedItem]]:
    """What can be used of a record with invalid values; a plan is used whole or not at all."""
    skipped: list[SkippedItem] = []
    line = line if isinstance(line, dict) else {}
    at, listed = line.get("at"), line.get("facts")
    facts = []
    for fact in listed if isinstance(listed, list) else []:
        try:
            facts.append(fact_from_json(fact))
        except UNUSABLE as error:
            skipped.append(skipped_item(_job_in(fact), error))
    planned = None
    try:
        planned = None if line.get("planned") is None else _planned_from_json(line["planned"])
    except UNUSABLE as error:
        skipped.append(skipped_item("", error))
    is_time = isinstance(at, int | float) and 0 <= at <= MAX_INT
    if not is_time or not isinstance(listed, list):
        skipped.append(SkippedItem(JobId(""), f"it has no time or no facts: {shown(line)}"))
    return Record(at if is_time else 0.0, facts, planned), skipped


def skipped_item(job: str, error: Exception) -> SkippedItem:
    """A part that raised an error."""
    return SkippedItem(JobId(job), f"{type(error).__name__}: {shortened(str(error), 200)}")


def _job_in(fact: Any) -> str:
    found = fact.get("job", "") if isinstance(fact, dict) else ""
    spec = fact.get("spec") if isinstance(fact, dict) else None
    return str(spec.get("id", "")) if isinstance(spec, dict) else str(found)


def fact_to_json(fact: Fact) -> dict[str, Any]:
    """A fact as its name and its fields."""
    value: dict[str, Any] = {"fact": type(fact).__name__}
    for spot in fields(fact):
        item = getattr(fact, spot.name)
        value[spot.name] = spec_to_json(item) if isinstance(item, JobSpec) else item
    return value


def fact_from_json(value: dict[str, Any]) -> Fact:
    """The inverse of `fact_to_json`; InvalidField for a value out of range."""
    kind = _FACTS[value["fact"]]
    if kind is JobSubmitted:
        return JobSubmitted(spec_from_json(value["spec"]))
    return decode_fields(kind, {name: item for name, item in value.items() if name != "fact"})


def spec_to_json(spec: JobSpec) -> dict[str, Any]:
    """A spec without the fields that have their default values."""
    value: dict[str, Any] = {}
    for spot in fields(spec):
        item = getattr(spec, spot.name)
        if spot.default is MISSING or item != spot.default:
            value[spot.name] = item
    return value


def spec_from_json(value: dict[str, Any]) -> JobSpec:
    """The inverse of `spec_to_json`."""
    return decode_fields(JobSpec, value)


def allocation_to_json(allocation: Allocation) -> dict[str, Any]:
    """An allocation as runs of [first, stop, fraction, turn]; fields with default values are left out."""
    value: dict[str, Any] = {
        "shares": [[s.devices.start, s.devices.stop, s.fraction, s.turn] for s in allocation.shares]
    }
    if allocation.batch_size:
        value["batch_size"] = allocation.batch_size
    if allocation.parts:
        value["parts"] = allocation.parts
    return value


def allocation_from_json(value: dict[str, Any]) -> Allocation:
    """The inverse of `allocation_to_json`."""
    runs = decode_value(_RUNS, value["shares"], "Allocation.shares")
    shares = tuple([Share(range(first, stop), fraction, turn) for first, stop, fraction, turn in runs])
    if "batch_size" not in value and "parts" not in value:
        return Allocation(shares)
    batch_size = decode_value(int, value.get("batch_size", 0), "Allocation.batch_size")
    return Allocation(shares, batch_size, decode_value(tuple[int, ...], value.get("parts", ()), "Allocation.parts"))


def changes_to_json(changes: Iterable[Change]) -> list[dict[str, Any]]:
    """Changes of a plan; fields with default values are left out."""
    found = []
    for change in changes:
        item: dict[str, Any] = {"job": change.job}
        if change.allocation is not None:
            item["allocation"] = allocation_to_json(change.allocation)
        if isinstance(change.purpose, Probe):
            item["probe_steps"] = change.purpose.steps
        found.append(item)
    return found


def _planned_to_json(planned: Planned) -> dict[str, Any]:
    value: dict[str, Any] = {
        "reason": planned.reason,
        "changes": changes_to_json(planned.changes),
        "believed": planned.believed,
    }
    if planned.wake_at is not None:
        value["wake_at"] = planned.wake_at
    if planned.note is not None:
        value["note"] = planned.note
    if planned.guessed:
        value["guessed"] = planned.guessed
    return value


def _planned_from_json(value: dict[str, Any]) -> Planned:
    changes = tuple(
        Change(
            decode_value(JobId, item["job"], "Change.job"),
            allocation_from_json(item["allocation"]) if "allocation" in item else None,
            Probe(decode_value(int, item["probe_steps"], "Change.probe_steps")) if "probe_steps" in item else RUN,
        )
        for item in value["changes"]
    )
    believed = decode_value(tuple[Measured, ...], value["believed"], "Planned.believed")
    if len(believed) != len(changes):
        raise InvalidField("Planned", "believed", f"has {len(believed)} items for {len(changes)} changes")
    return Planned(
        decode_value(str, value["reason"], "Planned.reason"),
        changes,
        believed,
        decode_value(Amount | None, value.get("wake_at"), "Planned.wake_at"),
        value.get("note"),
        decode_value(tuple[JobId, ...], value.get("guessed", ()), "Planned.guessed"),
    )


def header_to_json(header: Header) -> dict[str, Any]:
    """A header as plain JSON values; like nodes are written once with a count."""
    groups: list[dict[str, Any]] = []
    for node in header.cluster.nodes:
        banks = [[bank.kind, len(bank.devices), bank.memory_bytes] for bank in node.banks]
        shape = {"banks": banks, "supplies": list(node.resources), "named": node.name == f"n{node.id}"}
        if groups and shape["named"] and all(groups[-1][key] == value for key, value in shape.items()):
            groups[-1]["nodes"] += 1
        else:
            groups.append({"nodes": 1, "name": node.name, **shape})
    for group in groups:
        del group["named"]
        if not any(group["supplies"]):
            del group["supplies"]
    return {
        "version": header.version,
        "policy": header.policy,
        "seed": header.seed,
        "cluster": groups,
        "links": [[*link.ends, link.bytes_per_s, link.latency_s] for link in header.cluster.links],
        **({"max_nodes": header.cluster.max_nodes} if header.cluster.max_nodes else {}),
    }


def header_from_json(value: dict[str, Any]) -> Header:
    """The inverse of `header_to_json`."""
    nodes: list[Node] = []
    first = 0
    for group in value["cluster"]:
        for copy in range(group["nodes"]):
            banks = []
            for kind, size, memory_bytes in group["banks"]:
                banks.append(Bank(kind, range(first, first + size), memory_bytes))
                first += size
            name = group["name"] if copy == 0 else f"n{len(nodes)}"
            nodes.append(Node(NodeId(len(nodes)), name, tuple(banks), HostResources(*group.get("supplies", ()))))
    links = tuple(Link((a, b), speed, latency) for a, b, speed, latency in value.get("links", ()))
    cluster = Cluster(tuple(nodes), links, value.get("max_nodes", 0))
    return Header(value["version"], value["policy"], cluster, value.get("seed", 0))
