"""Job history in sentences, derived from the journal: requests, decisions, expectations and measurements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from carpool.core.constraints.priorities import priority_name, weight_with_priority
from carpool.core.host_resources import HostResources
from carpool.core.lifecycle import describe_update
from carpool.core.messages import (
    AssignApplied,
    Change,
    DeadlineMissed,
    Fact,
    JobCancelled,
    JobCrashed,
    JobFailed,
    JobFinished,
    JobPaused,
    JobResumed,
    JobSubmitted,
    LimitsChanged,
    NodeJoined,
    NodeLost,
    Planned,
    ProgressReported,
    Record,
    ReleaseApplied,
    ResumabilityChanged,
    WeightChanged,
)
from carpool.core.model import Allocation, JobId, JobSpec
from carpool.core.topology import Cluster
from carpool.core.units import format_bytes, format_params

_RETRIES = JobSpec(JobId("")).retries  # by default
_LEAVE = (NodeLost, JobCrashed, JobPaused, JobFinished, JobFailed, JobCancelled)  # after these it holds nothing


class HistoryLabels(NamedTuple):
    """Names of work units and devices in a history, and what its job's specification does not have."""

    work: str = "units of work"
    devices: Mapping[int, str] = MappingProxyType({})  # by number; unless all have a name, numbers are shown
    time_limit_s: float = 0.0  # 0: none

    @property
    def unit(self) -> str:
        return self.work.partition(" ")[0]


DEFAULT_LABELS = HistoryLabels()


def job_history(
    records: Iterable[Record], job: JobId, cluster: Cluster | None = None, words: HistoryLabels = DEFAULT_LABELS
) -> Iterator[tuple[float, str]]:
    """(instant, sentence) for every event of the job, in order; node losses too if a cluster is given."""
    held: Allocation | None = None
    for record in records:
        for fact in record.facts:
            sentence = _of_fact(fact, job, words)
            if isinstance(fact, NodeJoined) and cluster is not None:
                resources = HostResources(*fact.supplies)
                cluster = cluster.with_join(fact.name, fact.banks, resources, fact.replaces)
            elif isinstance(fact, NodeLost) and cluster is not None and held is not None:
                sentence = _of_loss(cluster, fact, held)
            if sentence:
                held = None if isinstance(fact, _LEAVE) else held
                yield record.at, sentence
        if record.planned is not None:
            for index, change in enumerate(record.planned.changes):
                if change.job == job:
                    held = change.allocation
                    yield record.at, _of_change(record.planned, index, change, words)
        for fact in record.ignored:
            if getattr(fact, "job", None) == job:
                yield record.at, f"a late {type(fact).__name__} was ignored"


def _of_fact(fact: Fact, job: JobId, words: HistoryLabels) -> str:
    if isinstance(fact, JobSubmitted):
        return _of_submission(fact.spec, words) if fact.spec.id == job else ""
    if getattr(fact, "job", None) != job:
        return ""
    match fact:
        case JobFinished():
            return "finished"
        case JobFailed(error=error):
            return f"failed: {error}"
        case JobCrashed(error=error, done=done):
            return f"crashed; {done:.6g} {words.work} are saved: {error}"
        case JobCancelled(reason=reason):
            return reason or "was cancelled by the user"
        case JobPaused(reason=reason):
            return reason or "was paused by the user"
        case JobResumed(reason=reason):
            return reason or "was resumed by the user"
        case DeadlineMissed():
            return "missed its deadline; it keeps running"
        case WeightChanged() | LimitsChanged() | ResumabilityChanged():
            return describe_update(fact)
        case AssignApplied(generation=generation, done=done):
            return f"runs (generation {generation}) from {done:.6g} {words.work}"
        case ReleaseApplied(done=done):
            return f"released its devices after {done:.6g} {words.work}"
        case ProgressReported(done=done, rate=rate, loss=loss):
            return f"has done {done:.6g} {words.unit} at {rate:.4g}/s" + ("" if loss is None else f", loss {loss:.4g}")
    return ""


def _of_loss(cluster: Cluster, fact: NodeLost, held: Allocation) -> str:
    node = cluster.nodes[fact.node]
    return f"lost its devices: node {node.name} was lost" if set(node.devices) & set(held.devices()) else ""


def _of_submission(spec: JobSpec, words: HistoryLabels) -> str:
    work = "of unknown length" if spec.work is None else f"of {spec.work:.6g} {words.work}"
    model = f" ({spec.model})" if spec.model else ""
    return f"was submitted: {describe_request(spec, words.time_limit_s)}, {work}{model}"


def describe_request(spec: JobSpec, time_limit_s: float = 0.0) -> str:
    """What a job asks for: devices and their limits, and all that differs from the defaults."""
    limits = f" ({spec.narrowest} to {spec.widest})" if spec.narrowest < spec.widest else ""
    weight = spec.weight / weight_with_priority(1.0, spec.priority)
    asked = [f"{spec.devices} device{'s' if spec.devices != 1 else ''}{limits}"]
    asked += [f"weight {weight:g}"] if weight != 1.0 else []
    asked += [f"priority {priority_name(spec.priority)}"] if spec.priority else []
    asked += [f"to finish within {spec.deadline_s:.6g} s"] if spec.deadline_s else []
    asked += [f"at most {time_limit_s:.6g} s of running (time_limit)"] if time_limit_s else []
    asked += [f"after {', '.join(spec.after)}"] if spec.after else []
    asked += [f"{spec.cpus} cores per device"] if spec.cpus else []
    sizes = (spec.memory_bytes, "device memory"), (spec.ram_bytes, "RAM per device"), (spec.disk_bytes, "disk")
    asked += [f"{format_bytes(size)} {what}" for size, what in sizes if size]
    asked += [f"{spec.retries} retries"] if spec.retries != _RETRIES else []
    asked += [format_params(spec.params)] if spec.params else []
    return ", ".join(asked)


def _of_change(planned: Planned, index: int, change: Change, words: HistoryLabels) -> str:
    if change.allocation is None:
        return f"is preempted: {planned.reason}"
    fractions = {share.fraction for share in change.allocation.shares}
    part = "" if fractions == {1.0} else f" at {'/'.join(f'{fraction:.0%}' for fraction in sorted(fractions))}"
    held = _named(change.allocation, words.devices)
    rate = f"{planned.believed[index]:.4g} {words.unit}/s expected"
    rate = "rate not known yet" if change.job in planned.guessed else rate
    return f"gets {held}{part}, {rate}: {planned.reason}"


def _named(allocation: Allocation, names: Mapping[int, str]) -> str:
    if all(device in names for device in allocation.devices()):
        return ", ".join(names[device] for device in allocation.devices())
    runs = [share.devices for share in allocation.shares]
    numbers = ", ".join(f"{r.start}" if len(r) == 1 else f"{r.start}–{r.stop - 1}" for r in runs)
    return f"device{'s' if allocation.num_devices != 1 else ''} {numbers}"
