"""Run metrics as a streaming fold over records, live or from a journal."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, nan
from typing import Any

from carpool.core.lifecycle import requires_release
from carpool.core.messages import (
    Change,
    JobCancelled,
    JobCrashed,
    JobFailed,
    JobFinished,
    JobPaused,
    JobSubmitted,
    LimitsChanged,
    NodeDrained,
    NodeJoined,
    NodeLost,
    NodeUndrained,
    Record,
    WeightChanged,
)
from carpool.core.model import Allocation, JobId
from carpool.core.topology import Cluster


class Oversubscription:
    """Integrates oversubscription over all devices: ∫ max(0, Σ fractions − 1) dt."""

    def __init__(self) -> None:
        self.excess_s = 0.0  # device-seconds, up to the last change of each device
        self._loads: dict[int, tuple[float, float]] = {}  # Σ fractions, since

    def change(self, at: float, before: Allocation | None, after: Allocation | None) -> None:
        if before is not None:
            self._add(at, before, -1.0)
        if after is not None:
            self._add(at, after, 1.0)

    def _add(self, at: float, allocation: Allocation, sign: float) -> None:
        for devices, fraction, _ in allocation.shares:
            for device in devices:
                load, since = self._loads.get(device, (0.0, at))
                if load > 1.0:
                    self.excess_s += (load - 1.0) * (at - since)
                self._loads[device] = (load + sign * fraction, at)


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run; NaN where no job finished."""

    jobs: int  # submitted
    finished: int
    avg_jct_s: float  # end − submit
    p50_jct_s: float  # nearest rank
    p99_jct_s: float
    avg_wait_s: float  # jct − time holding a device
    makespan_s: float  # last end − first submit
    weighted_jct_s: float  # Σ w·jct / Σ w
    utilisation: float  # Σ held device-seconds / (devices × makespan); shares count by their fractions, a device once
    preemptions: int  # involuntary losses of all devices
    resizes: int  # changes of the devices that a running job holds, or of their number


class JobTimeline:
    """One job between submission and its end."""

    __slots__ = ("held", "held_s", "since", "spec_weight", "submitted_at")

    def __init__(self, submitted_at: float, weight: float) -> None:
        self.submitted_at = submitted_at
        self.spec_weight = weight
        self.held: Allocation | None = None
        self.since = 0.0  # start of the current allocation
        self.held_s = 0.0  # time holding any device, up to `since`

    def hold(self, at: float, allocation: Allocation | None) -> float:
        """Replace what the job holds; returns the device-seconds of what it held."""
        held = self.held
        device_s = 0.0
        if held is not None:
            elapsed = at - self.since
            self.held_s += elapsed
            device_s = elapsed * held.num_held
        self.held = allocation
        self.since = at
        return device_s


class Metrics:
    """Observer that keeps a few numbers for each job that is over.

    Without `sharing` of devices, oversubscription is not tracked.
    """

    def __init__(self, cluster: Cluster, *, sharing: bool = True) -> None:
        self._cluster = cluster
        self._oversubscription = Oversubscription() if sharing else None
        self._open: dict[JobId, JobTimeline] = {}
        self.jct_s = array("d")  # of finished jobs, in order of their end
        self.wait_s = array("d")
        self.weights = array("d")
        self.num_submitted = 0
        self.preemptions = 0
        self.resizes = 0
        self.device_s = 0.0
        self.first_submit_s = nan
        self.last_end_s = nan
        self._folds: dict[type, Callable[[float, Any], None]] = {
            JobSubmitted: self._on_submitted,
            JobFinished: self._on_finished,
            JobFailed: self._on_ended,
            JobCancelled: self._on_ended,
            JobPaused: self._on_taken_off,
            JobCrashed: self._on_taken_off,
            NodeJoined: self._on_node_joined,
            NodeLost: self._on_node_lost,
            NodeDrained: self._on_node_lost,
            NodeUndrained: lambda at, fact: None,
            WeightChanged: self._on_weight_changed,
            LimitsChanged: self._on_limits_changed,
        }

    def record(self, record: Record) -> None:
        at = record.at
        folds = self._folds
        for fact in record.facts:
            fold = folds.get(type(fact))
            if fold is not None:
                fold(at, fact)
        if record.planned is not None:
            self._on_changes(at, record.planned.changes)

    def summary(self) -> Summary:
        finished = len(self.jct_s)
        ordered = sorted(self.jct_s)
        span = self.last_end_s - self.first_submit_s
        weight = sum(self.weights)
        available = self._cluster.num_devices * span
        # Assigned beyond the capacity of the devices.
        excess_s = self._oversubscription.excess_s if self._oversubscription is not None else 0.0
        return Summary(
            jobs=self.num_submitted,
            finished=finished,
            avg_jct_s=sum(ordered) / finished if finished else nan,
            p50_jct_s=nearest_rank(ordered, 0.50),
            p99_jct_s=nearest_rank(ordered, 0.99),
            avg_wait_s=sum(self.wait_s) / finished if finished else nan,
            makespan_s=span,
            weighted_jct_s=sum([w * jct for w, jct in zip(self.weights, self.jct_s, strict=True)]) / weight
            if weight
            else nan,
            utilisation=(self.device_s - excess_s) / available if available > 0 else nan,
            preemptions=self.preemptions,
            resizes=self.resizes,
        )

    def _on_submitted(self, at: float, fact: JobSubmitted) -> None:
        if not self.num_submitted:
            self.first_submit_s = at
        self.num_submitted += 1
        self._open[fact.spec.id] = JobTimeline(at, fact.spec.weight)

    def _on_finished(self, at: float, fact: JobFinished) -> None:
        timeline = self._close(at, fact.job)
        jct_s = at - timeline.submitted_at
        self.jct_s.append(jct_s)
        self.wait_s.append(jct_s - timeline.held_s)
        self.weights.append(timeline.spec_weight)

    def _on_ended(self, at: float, fact: JobFailed | JobCancelled) -> None:
        self._close(at, fact.job)

    def _close(self, at: float, job: JobId) -> JobTimeline:
        timeline = self._open.pop(job)
        self._hold(at, timeline, None)
        self.last_end_s = at
        return timeline

    def _on_taken_off(self, at: float, fact: JobPaused | JobCrashed) -> None:
        timeline = self._open[fact.job]
        self.preemptions += isinstance(fact, JobCrashed)
        self._hold(at, timeline, None)

    def _on_weight_changed(self, at: float, fact: WeightChanged) -> None:
        if fact.job in self._open:
            self._open[fact.job].spec_weight = fact.weight

    def _on_limits_changed(self, at: float, fact: LimitsChanged) -> None:
        timeline = self._open.get(fact.job)
        if timeline is not None and requires_release(fact, timeline.held):
            self._hold(at, timeline, None)

    def _on_node_joined(self, at: float, fact: NodeJoined) -> None:
        self._cluster = self._cluster.with_join(fact.name, fact.banks, replaces=fact.replaces)

    def _on_node_lost(self, at: float, fact: NodeLost) -> None:
        devices = self._cluster.nodes[fact.node].devices
        for timeline in self._open.values():
            if timeline.held is not None and _touches(timeline.held, devices):
                self.preemptions += 1
                self._hold(at, timeline, None)

    def _on_changes(self, at: float, changes: Sequence[Change]) -> None:
        for change in changes:
            timeline = self._open[change.job]
            if timeline.held is not None:
                if change.allocation is None:
                    self.preemptions += 1
                elif not timeline.held.same_devices(change.allocation):
                    self.resizes += 1
            self._hold(at, timeline, change.allocation)

    def _hold(self, at: float, timeline: JobTimeline, allocation: Allocation | None) -> None:
        if self._oversubscription is not None:
            self._oversubscription.change(at, timeline.held, allocation)
        self.device_s += timeline.hold(at, allocation)


def nearest_rank(ordered: Sequence[float], fraction: float) -> float:
    """The smallest value that at least `fraction` of the values do not exceed; NaN if there are no values."""
    if not ordered:
        return nan
    return ordered[max(0, ceil(fraction * len(ordered)) - 1)]


def _touches(allocation: Allocation, devices: range) -> bool:
    return any(share.devices.start < devices.stop and devices.start < share.devices.stop for share in allocation.shares)
