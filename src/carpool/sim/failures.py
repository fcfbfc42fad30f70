"""Failure injection: node losses and job crashes from a file or at seeded random rates."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from random import Random
from typing import Protocol

from carpool.core.errors import InputError, UnknownName, cause
from carpool.core.messages import Fact, NodeJoined, NodeLost
from carpool.core.model import JobId
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster, Node
from carpool.sim.backend import SimulatedBackend
from carpool.sim.event_queue import FAILURES, EventCallback, EventQueue

EVENTS = ("node-lost", "node-back", "job-crash")


class Failures(Protocol):
    """A source of failures that adds them to the event queue."""

    def start(self, scheduler: Scheduler, machines: SimulatedBackend, timeline: EventQueue) -> None:
        """Schedule the first failures; later ones may follow from these."""


@dataclass(frozen=True, slots=True)
class FailureEvent:
    """One line of a failure file."""

    at_s: float
    event: str
    target: str  # a node's name, or a job's id


@dataclass(frozen=True, slots=True)
class ScheduledFailures:
    """Failures at given instants."""

    failures: Sequence[FailureEvent]

    def start(self, scheduler: Scheduler, machines: SimulatedBackend, timeline: EventQueue) -> None:
        nodes = {node.name: node for node in scheduler.cluster.nodes}
        for failure in self.failures:
            callback: EventCallback
            if failure.event == "job-crash":
                callback = partial(machines.crash, job=JobId(failure.target), error="injected crash")
            elif failure.event == "node-lost":
                callback = partial(_lose, machines, nodes[failure.target])
            else:
                callback = partial(_regain, failure.target)
            timeline.add(failure.at_s, FAILURES, callback)


@dataclass(frozen=True, slots=True)
class RandomFailures:
    """Random failures: nodes fail with a mean time between failures, jobs crash at a rate."""

    seed: int = 0
    node_mtbf_s: float = 0.0  # 0: nodes never fail
    node_repair_s: float = 600.0
    job_mtbf_s: float = 0.0  # per running job; 0: jobs never crash

    def start(self, scheduler: Scheduler, machines: SimulatedBackend, timeline: EventQueue) -> None:
        if self.node_mtbf_s:
            for node in scheduler.cluster.nodes:
                random = Random(f"{self.seed}/node/{node.name}")
                self._fail_later(0.0, node, random, machines, timeline)
        if self.job_mtbf_s:
            self._crash_later(0.0, Random(f"{self.seed}/jobs"), scheduler, machines, timeline)

    def _fail_later(
        self, at: float, node: Node, random: Random, machines: SimulatedBackend, timeline: EventQueue
    ) -> None:
        def fail(now: float) -> Fact:
            timeline.add(now + self.node_repair_s, FAILURES, repair)
            return _lose(machines, node, now)

        def repair(now: float) -> Fact:
            self._fail_later(now, node, random, machines, timeline)
            return NodeJoined(node.name)

        timeline.add(at + random.expovariate(1.0 / self.node_mtbf_s), FAILURES, fail)

    def _crash_later(
        self, at: float, random: Random, scheduler: Scheduler, machines: SimulatedBackend, timeline: EventQueue
    ) -> None:
        # Thinning: candidates come as if the cluster were full, and are kept with the odds that one was running.
        full = scheduler.cluster.num_devices

        def crash(now: float) -> Fact | None:
            self._crash_later(now, random, scheduler, machines, timeline)
            slot = random.randrange(full)
            busy = machines.busy()
            return machines.crash(now, busy[slot], "seeded crash") if slot < len(busy) else None

        timeline.add(at + random.expovariate(full / self.job_mtbf_s), FAILURES, crash)


def parse_failures(text: str, cluster: Cluster, seed: int = 0) -> list[Failures]:
    """Failures from a CSV file, or by rates: ``node_mtbf_s=86400:node_repair_s=600:job_mtbf_s=1e6``; empty: none."""
    if not text:
        return []
    if "=" not in text:
        return [read_failures(Path(text), cluster)]
    rates = {spot.name for spot in fields(RandomFailures)} - {"seed"}
    given: dict[str, float] = {}
    for setting in text.split(":"):
        key, _, value = setting.partition("=")
        if key not in rates:
            raise UnknownName("rate", key, rates, where=f"failures {text!r}")
        try:
            given[key] = float(value)
        except ValueError:
            raise InputError(f"{key} is {value!r}", where=f"failures {text!r}", way_out="Give seconds.") from None
        if not 0 < given[key] < float("inf"):
            raise InputError(f"{key} is {value}", where=f"failures {text!r}", way_out="Give seconds above 0.")
    return [RandomFailures(seed, **given)]


def read_failures(path: Path, cluster: Cluster) -> ScheduledFailures:
    """Failures from a CSV file with the header ``at_s,event,target``."""
    names = {node.name for node in cluster.nodes}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            missing = {"at_s", "event", "target"} - set(rows.fieldnames or ())
            if missing:
                raise InputError(
                    f"column {min(missing)!r} is missing",
                    where=f"{path}: row 1",
                    way_out="A failure file starts with the line at_s,event,target.",
                )
            failures = [_failure(row, f"{path}: row {rows.line_num}", names) for row in rows]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot be read: {cause(error)}", where=str(path), way_out="Give a UTF-8 CSV file.") from None
    return ScheduledFailures(failures)


def _failure(row: dict[str, str], where: str, nodes: set[str]) -> FailureEvent:
    try:
        at_s = float(row["at_s"])
    except (TypeError, ValueError):
        raise InputError(f"at_s is {row['at_s']!r}", where=where, way_out="Give seconds as a number.") from None
    if not 0 <= at_s < float("inf"):
        raise InputError(f"at_s is {row['at_s']}", where=where, way_out="Give seconds from 0 on.")
    for column in ("event", "target"):
        if not row[column]:
            raise InputError(f"{column} is empty", where=where, way_out="Give at_s,event,target in every row.")
    if row["event"] not in EVENTS:
        raise UnknownName("event", row["event"], EVENTS, where=where)
    if row["event"] != "job-crash" and row["target"] not in nodes:
        raise UnknownName("node", row["target"], nodes, where=where)
    return FailureEvent(at_s, row["event"], row["target"])


def _lose(machines: SimulatedBackend, node: Node, at: float) -> Fact:
    machines.roll_back(at, node.devices)
    return NodeLost(node.id)


def _regain(name: str, at: float) -> Fact:
    return NodeJoined(name)
