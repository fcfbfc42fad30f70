"""Cluster specifications: ``64x8xV100``, ``2x4xV100,4x4xP100``, or a TOML file with nodes and links."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from carpool.core.errors import InputError, UnknownName, cause
from carpool.core.host_resources import HostResources
from carpool.core.model import Kind, NodeId
from carpool.core.topology import Bank, Cluster, Link, Node
from carpool.core.units import parse_bytes

_GROUP = re.compile(r"(\d+)x(\d+)x([A-Za-z][\w.\-]*)")
_GRAMMAR = "Write NODESxDEVICESxKIND, such as 64x8xV100 or 2x4xV100,4x4xP100, or name a TOML file."
_MOST_DEVICES = 10_000_000


def parse_cluster(text: str) -> Cluster:
    """The cluster described by a text or a TOML file."""
    if text.endswith(".toml"):
        return read_cluster(Path(text))
    groups: list[tuple[int, int, str]] = []
    for part in text.split(","):
        match = _GROUP.fullmatch(part.strip())
        if match is None:
            raise InputError(f"{part!r} in cluster {text!r} is not NODESxDEVICESxKIND", way_out=_GRAMMAR)
        num_nodes, size = int(match[1]), int(match[2])
        if not num_nodes or not size:
            raise InputError(
                f"{part!r} in cluster {text!r} has no devices", way_out="Give at least 1 node of 1 device."
            )
        groups.append((num_nodes, size, match[3]))
    if sum(nodes * size for nodes, size, _ in groups) > _MOST_DEVICES:
        raise InputError(f"cluster {text!r} has more than {_MOST_DEVICES} devices", way_out="Use a smaller cluster.")
    return Cluster.build(groups)


def read_cluster(path: Path) -> Cluster:
    """A cluster from a TOML file of [[node]] and [[link]] tables.

    A node has name, count, devices, kind and memory of each, and cpus, ram and disk of all.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {cause(error)}", where=str(path), way_out=_GRAMMAR) from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"is not TOML: {error}", where=str(path), way_out="Fix that line.") from None
    _known(data, {"node", "link"}, str(path))
    nodes: list[Node] = []
    for index, table in enumerate(_tables(data, "node", str(path))):
        _add_nodes(nodes, table, f"{path}: node {index + 1}")
    if not nodes:
        raise InputError("has no [[node]]", where=str(path), way_out='Add one: [[node]] devices = 8 kind = "V100".')
    names = [node.name for node in nodes]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"two nodes are named {twice!r}", where=str(path), way_out="Give every node a different name.")
    links = tuple(
        _link(table, names, f"{path}: link {index + 1}") for index, table in enumerate(_tables(data, "link", str(path)))
    )
    return Cluster(tuple(nodes), links)


def _add_nodes(nodes: list[Node], table: dict[str, Any], where: str) -> None:
    _known(table, {"name", "count", "devices", "kind", "memory", "bank", "cpus", "ram", "disk"}, where)
    count = _whole(table, "count", where, default=1)
    banks = _tables(table, "bank", where) if "bank" in table else [table]
    if count * sum(_whole(bank, "devices", where) for bank in banks) > _MOST_DEVICES:
        raise InputError(f"has more than {_MOST_DEVICES} devices", where=where, way_out="Use a smaller cluster.")
    supplies = HostResources(
        _whole(table, "cpus", where, default=1) if "cpus" in table else 0,
        parse_bytes(table.get("ram", 0), f"{where}: ram"),
        parse_bytes(table.get("disk", 0), f"{where}: disk"),
    )
    for copy in range(count):
        name = table.get("name", f"n{len(nodes)}")
        name = name if count == 1 else f"{name}-{copy}" if "name" in table else name
        built: list[Bank] = []
        first = nodes[-1].devices.stop if nodes else 0
        for bank in banks:
            if bank is not table:
                _known(bank, {"devices", "kind", "memory"}, where)
            size = _whole(bank, "devices", where)
            kind = bank.get("kind")
            if not isinstance(kind, str) or not kind:
                raise InputError(f"kind is {kind!r}", where=where, way_out='Name one, such as kind = "V100".')
            memory_bytes = parse_bytes(bank.get("memory", 0), f"{where}: memory")
            built.append(Bank(Kind(kind), range(first, first + size), memory_bytes))
            first += size
        nodes.append(Node(NodeId(len(nodes)), str(name), tuple(built), supplies))


def _link(table: dict[str, Any], names: list[str], where: str) -> Link:
    _known(table, {"ends", "bytes_per_s", "latency_s"}, where)
    ends = table.get("ends")
    if not isinstance(ends, list) or len(ends) != 2:
        raise InputError(f"ends is {ends!r}", where=where, way_out='Name two, such as ends = ["n0", "n1"].')
    for end in ends:
        if end not in names:
            raise UnknownName("node", str(end), names, where=where)
    speed, latency = table.get("bytes_per_s"), table.get("latency_s", 0.0)
    if not isinstance(speed, int | float) or not 0 < speed < float("inf"):
        raise InputError(f"bytes_per_s is {speed!r}", where=where, way_out="Give a number above 0.")
    if not isinstance(latency, int | float) or not 0 <= latency < float("inf"):
        raise InputError(f"latency_s is {latency!r}", where=where, way_out="Give seconds of at least 0.")
    return Link((str(ends[0]), str(ends[1])), float(speed), float(latency))


def _tables(table: dict[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    rows = table.get(key, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows) or (key == "bank" and not rows):
        raise InputError(f"{key} is {rows!r}", where=where, way_out=f"Write it as [[{key}]] tables.")
    return rows


def _whole(table: dict[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = table.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{key} is {value!r}", where=where, way_out="Give a whole number of at least 1.")
    return value


def _known(table: dict[str, Any], keys: set[str], where: str) -> None:
    for key in table:
        if key not in keys:
            raise UnknownName("key", key, keys, where=where)
