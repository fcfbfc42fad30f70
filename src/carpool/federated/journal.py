"""Journal of a federation: a header and records as JSON lines, read by recovery, replay and reports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any, TextIO

from carpool.core.errors import JournalError
from carpool.core.typed_fields import InvalidField, decode_fields, decode_value, shown
from carpool.federated import messages
from carpool.federated.federation import Federation, Limits, Target, Task
from carpool.federated.messages import Fact, Order, Record, Refusal

SCHEMA = 1

_MESSAGES: dict[str, type] = {
    name: kind
    for name, kind in vars(messages).items()
    if isinstance(kind, type) and issubclass(kind, Fact | Order) and kind not in (Fact, Order)
}


def federation_to_json(federation: Federation) -> dict[str, Any]:
    """A federation as plain JSON values."""
    return asdict(federation)


def federation_from_json(value: dict[str, Any]) -> Federation:
    """The inverse of `federation_to_json`."""
    tasks = []
    for given in value["tasks"]:
        target = None if given.get("target") is None else decode_fields(Target, given["target"])
        limits = decode_fields(Limits, given.get("limits", {}))
        tasks.append(decode_fields(Task, {**given, "target": target, "limits": limits}))
    return decode_fields(Federation, {**value, "tasks": tuple(tasks)})


class JournalWriter:
    """Observer that appends records to a text stream; each is flushed before its orders are carried out."""

    def __init__(self, stream: TextIO, federation: Federation | None) -> None:
        self._stream = stream
        if federation is not None:
            self._write({"schema": SCHEMA, "federation": federation_to_json(federation)})

    def __call__(self, record: Record) -> None:
        self._write(record_to_json(record))

    def _write(self, value: dict[str, Any]) -> None:
        self._stream.write(json.dumps(value, separators=(",", ":")) + "\n")
        self._stream.flush()


def read_journal(lines: Iterable[str], where: str = "journal") -> tuple[Federation, Iterator[Record]]:
    """The federation of a journal and its records. A last line that was cut by a crash is left out."""
    numbered = enumerate(lines, 1)
    _, first = next(numbered, (0, ""))
    try:
        header = json.loads(first)
        if header["schema"] > SCHEMA:
            raise JournalError(f"{where} has schema {header['schema']}; this version reads up to {SCHEMA}")
        federation = federation_from_json(header["federation"])
    except (ValueError, KeyError, TypeError) as error:
        raise JournalError(f"{where} has no header: {shown(error)}") from error
    return federation, _records(numbered, where)


def _records(numbered: Iterator[tuple[int, str]], where: str) -> Iterator[Record]:
    for number, line in numbered:
        if not line.endswith("\n"):
            return
        try:
            yield record_from_json(json.loads(line))
        except (ValueError, KeyError, TypeError, InvalidField) as error:
            raise JournalError(f"{where}, line {number}: {shown(error)}") from error


def record_to_json(record: Record) -> dict[str, Any]:
    """A record as plain JSON values; empty parts are left out."""
    value: dict[str, Any] = {"at": record.at}
    for name, items in (("facts", record.facts), ("orders", record.orders)):
        if items:
            value[name] = [_to_json(item) for item in items]
    if record.refused:
        value["refused"] = list(record.refused)
    return value


def record_from_json(value: dict[str, Any]) -> Record:
    """The inverse of `record_to_json`."""
    return Record(
        decode_value(float, value["at"], "Record.at"),
        tuple([_from_json(item) for item in value.get("facts", ())]),
        tuple([_from_json(item) for item in value.get("orders", ())]),
        decode_value(tuple[Refusal, ...], value.get("refused", ()), "Record.refused"),
    )


def _to_json(message: Any) -> dict[str, Any]:
    return {"is": type(message).__name__, **{name: getattr(message, name) for name in message.__slots__}}


def _from_json(value: dict[str, Any]) -> Any:
    kind = _MESSAGES[value["is"]]
    return decode_fields(kind, {name: item for name, item in value.items() if name != "is"})
