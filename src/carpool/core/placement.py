"""Placement rules over free devices: consolidated best fit, pooled, emptiest nodes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from carpool.core.errors import UnknownName
from carpool.core.model import Kind
from carpool.core.occupancy import Occupancy
from carpool.core.topology import Node

Runs = tuple[range, ...]
_STARTS = 16  # first nodes that `linked` tries
PlacementRule = Callable[[Occupancy, Kind, int], Runs | None]


def consolidated(free: Occupancy, kind: Kind, count: int) -> Runs | None:
    """Best fit: the node with the fewest free devices that still fits, lowest number on ties.

    A job larger than a node takes whole free nodes and best fit for the rest.
    """
    size = free.cluster.node_size[kind]
    if count <= size:
        node = fullest_fitting(free, kind, count)
        return None if node is None else (*lowest(free, node, kind, count),)
    whole, rest = divmod(count, size)
    empty = free.nodes_by_free(kind).get(size, 0)
    if empty.bit_count() < whole:
        return None
    nodes = [free.cluster.nodes[index] for index in lowest_bits(empty, whole)]
    runs = [run for node in nodes for run in lowest(free, node, kind, size)]
    if rest:
        used = sum(1 << node.id for node in nodes)
        last = fullest_fitting(free, kind, rest, without=used)
        if last is None:
            return None
        runs.extend(lowest(free, last, kind, rest))
    return merge_runs(runs)


def pooled(free: Occupancy, kind: Kind, count: int) -> Runs | None:
    """Any free devices, lowest numbers first."""
    if free.free_devices.get(kind, 0) < count:
        return None
    return _gather(free, kind, count, _ascending(free, kind))


def emptiest(free: Occupancy, kind: Kind, count: int) -> Runs | None:
    """From the nodes with the most free devices first, so that as few nodes as possible are used."""
    if free.free_devices.get(kind, 0) < count:
        return None
    return _gather(free, kind, count, _emptiest_first(free, kind))


def linked(free: Occupancy, kind: Kind, count: int, max_nodes: int = 0) -> list[Runs]:
    """Candidate allocations on nodes with fast links between them, each built from a different first node.

    The next node is always the one with the fastest links to all nodes chosen so far; among equals, the emptiest.
    """
    there = {node.id: available for node, available in _emptiest_first(free, kind)}
    found: dict[Runs, None] = {}
    for first in list(there)[:_STARTS]:
        chosen, left = [first], count - there[first]
        while left > 0 and len(chosen) != max_nodes:
            others = [node for node in there if node not in chosen]
            if not others:
                break
            chosen.append(max(others, key=lambda node: (_slowest(free, chosen, node), min(left, there[node]), -node)))
            left -= there[chosen[-1]]
        if left <= 0:
            nodes = iter([(free.cluster.nodes[node], there[node]) for node in chosen])
            found[_gather(free, kind, count, nodes)] = None
    return list(found)


def _slowest(free: Occupancy, chosen: Sequence[int], node: int) -> float:
    """Bytes per second of the slowest link from a node to the chosen ones; 0: unknown."""
    paths = [free.cluster.link_between(node, other) for other in chosen]
    return min([0.0 if path is None else path.bytes_per_s for path in paths])


PLACEMENT_RULES: dict[str, PlacementRule] = {"consolidated": consolidated, "pooled": pooled, "emptiest": emptiest}


def placement_rule(name: str) -> PlacementRule:
    """The placement rule of that name."""
    try:
        return PLACEMENT_RULES[name]
    except KeyError:
        raise UnknownName("placement", name, PLACEMENT_RULES) from None


def place(
    free: Occupancy, kinds: Sequence[Kind], count: int, rule: PlacementRule = consolidated, max_nodes: int | None = None
) -> Runs | None:
    """`count` devices of the first of `kinds` that has them, on at most `max_nodes` nodes.

    0 is any number of nodes, None the limit of the cluster.
    """
    max_nodes = free.cluster.max_nodes if max_nodes is None else max_nodes
    for kind in kinds:
        if kind in free.free_devices:
            runs = rule(free, kind, count)
            if runs is not None and max_nodes:
                runs = _within_nodes(free, kind, count, runs, max_nodes)
            if runs is not None:
                return runs
    return None


def _within_nodes(free: Occupancy, kind: Kind, count: int, runs: Runs, most: int) -> Runs | None:
    """The runs, or others on as many nodes as a job may use; None if there are none."""
    if _num_nodes(free, runs) <= most:
        return runs
    fewest = emptiest(free, kind, count)
    return fewest if fewest is not None and _num_nodes(free, fewest) <= most else None


def _num_nodes(free: Occupancy, runs: Runs) -> int:
    spans = [(free.cluster.node_of(run.start).id, free.cluster.node_of(run.stop - 1).id) for run in runs]
    return len({node for first, last in spans for node in range(first, last + 1)})


def fullest_fitting(free: Occupancy, kind: Kind, count: int, without: int = 0) -> Node | None:
    """The node with the fewest free devices of a kind that are at least `count`."""
    by_free = free.nodes_by_free(kind)
    tightest = 0
    for level, nodes in by_free.items():
        if level >= count and (level < tightest or not tightest) and (not without or nodes & ~without):
            tightest = level
    if not tightest:
        return None
    nodes = by_free[tightest] & ~without if without else by_free[tightest]
    return free.cluster.nodes[(nodes & -nodes).bit_length() - 1]


def lowest(free: Occupancy, node: Node, kind: Kind, count: int) -> list[range]:
    """The node's `count` lowest free devices of a kind, as runs; they must be there."""
    mask = free.free_mask(node.id)
    if count == 1 and len(node.banks) == 1:
        first = node.devices.start + (mask & -mask).bit_length() - 1
        return [range(first, first + 1)]
    if len(node.banks) > 1:
        mask &= sum(
            ((1 << len(bank.devices)) - 1) << (bank.devices.start - node.devices.start)
            for bank in node.banks
            if bank.kind == kind
        )
    runs: list[range] = []
    first = node.devices.start
    while count:
        skip = (mask & -mask).bit_length() - 1
        mask >>= skip
        first += skip
        ones = (~mask & (mask + 1)).bit_length() - 1  # length of the run of ones at the bottom
        length = ones if ones < count else count
        runs.append(range(first, first + length))
        count -= length
        mask >>= ones
        first += ones
    return runs


def lowest_bits(mask: int, count: int) -> Iterator[int]:
    """Positions of the `count` lowest set bits."""
    for _ in range(count):
        bit = mask & -mask
        yield bit.bit_length() - 1
        mask ^= bit


def merge_runs(runs: list[range]) -> Runs:
    """Neighbouring runs as one, in ascending order."""
    out: list[range] = []
    for run in sorted(runs, key=lambda run: run.start):
        if out and out[-1].stop == run.start:
            out[-1] = range(out[-1].start, run.stop)
        else:
            out.append(run)
    return tuple(out)


def _gather(free: Occupancy, kind: Kind, count: int, nodes: Iterator[tuple[Node, int]]) -> Runs:
    runs: list[range] = []
    for node, available in nodes:
        part = min(available, count)
        runs.extend(lowest(free, node, kind, part))
        count -= part
        if not count:
            break
    return merge_runs(runs)


def _ascending(free: Occupancy, kind: Kind) -> Iterator[tuple[Node, int]]:
    """Nodes with free devices of a kind in ascending number, with how many."""
    by_free = free.nodes_by_free(kind)
    if len(by_free) == 1:
        ((level, nodes),) = by_free.items()
        for index in lowest_bits(nodes, nodes.bit_count()):
            yield free.cluster.nodes[index], level
        return
    rest = dict(by_free)
    while rest:
        level = min(rest, key=lambda level: rest[level] & -rest[level])
        bit = rest[level] & -rest[level]
        yield free.cluster.nodes[bit.bit_length() - 1], level
        rest[level] ^= bit
        if not rest[level]:
            del rest[level]


def _emptiest_first(free: Occupancy, kind: Kind) -> Iterator[tuple[Node, int]]:
    by_free = free.nodes_by_free(kind)
    for level in sorted(by_free, reverse=True):
        for index in lowest_bits(by_free[level], by_free[level].bit_count()):
            yield free.cluster.nodes[index], level
