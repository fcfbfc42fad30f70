"""A job's story, told from the journal: what was asked, decided, believed and measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from carpool.core.amending import told
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
    WeightChanged,
)
from carpool.core.model import Allocation, JobId, JobSpec
from carpool.core.ranking import priority_word
from carpool.core.supplies import Supplies
from carpool.core.topology import Cluster

_LEAVE = (NodeLost, JobCrashed, JobPaused, JobFinished, JobFailed, JobCancelled)  # after these it holds nothing


def story(records: Iterable[Record], job: JobId, cluster: Cluster | None = None) -> Iterator[tuple[float, str]]:
    """(instant, sentence) for everything that concerned the job, in order; with a cluster, losses of nodes too."""
    held: Allocation | None = None
    for record in records:
        for fact in record.facts:
            words = _of_fact(fact, job)
            if isinstance(fact, NodeJoined) and cluster is not None:
                cluster = _with_node(cluster, fact)
            elif isinstance(fact, NodeLost) and cluster is not None and held is not None:
                words = _of_loss(cluster, fact, held)
            if words:
                held = None if isinstance(fact, _LEAVE) else held
                yield record.at, words
        if record.planned is not None:
            for index, change in enumerate(record.planned.changes):
                if change.job == job:
                    held = change.allocation
                    yield record.at, _of_change(record.planned, index, change)
        for fact in record.ignored:
            if getattr(fact, "job", None) == job:
                yield record.at, f"a late {type(fact).__name__} was ignored"


def _of_fact(fact: Fact, job: JobId) -> str:
    if isinstance(fact, JobSubmitted):
        return _of_submission(fact.spec) if fact.spec.id == job else ""
    if getattr(fact, "job", None) != job:
        return ""
    match fact:
        case JobFinished():
            return "finished"
        case JobFailed(error=error):
            return f"failed: {error}"
        case JobCrashed(error=error, done=done):
            return f"crashed with {done:.6g} units of work kept: {error}"
        case JobCancelled():
            return "was cancelled by its user"
        case JobPaused():
            return "was paused by its user"
        case JobResumed():
            return "was resumed by its user"
        case DeadlineMissed():
            return "missed its deadline, and goes on"
        case WeightChanged() | LimitsChanged():
            return told(fact)
        case AssignApplied(generation=generation, done=done):
            return f"runs under generation {generation} from {done:.6g} units of work on"
        case ReleaseApplied(done=done):
            return f"left its devices with {done:.6g} units of work done"
        case ProgressReported(done=done, rate=rate, loss=loss):
            return f"has done {done:.6g} units at {rate:.4g}/s" + ("" if loss is None else f", loss {loss:.4g}")
    return ""


def _with_node(cluster: Cluster, fact: NodeJoined) -> Cluster:
    known = any(node.name == fact.name for node in cluster.nodes)
    return cluster if known else cluster.joined(fact.name, fact.banks, Supplies(*fact.supplies))


def _of_loss(cluster: Cluster, fact: NodeLost, held: Allocation) -> str:
    node = cluster.nodes[fact.node]
    return f"is taken off its devices: node {node.name} was lost" if set(node.devices) & set(held.devices()) else ""


def _of_submission(spec: JobSpec) -> str:
    work = "of unknown length" if spec.work is None else f"of {spec.work:.6g} units of work"
    model = f" ({spec.model})" if spec.model else ""
    asked = [f"{spec.devices} device{'s' if spec.devices != 1 else ''}"]
    asked += [f"priority {priority_word(spec.priority)}"] if spec.priority else []
    asked += [f"to finish within {spec.deadline_s:.6g} s"] if spec.deadline_s else []
    return f"was submitted: {', '.join(asked)}, {work}{model}"


def _of_change(planned: Planned, index: int, change: Change) -> str:
    if change.allocation is None:
        return f"is taken off its devices: {planned.reason}"
    runs = ", ".join(
        f"{s.devices.start}" if len(s.devices) == 1 else f"{s.devices.start}–{s.devices.stop - 1}"
        for s in change.allocation.shares
    )
    fractions = {share.fraction for share in change.allocation.shares}
    part = "" if fractions == {1.0} else f" at {'/'.join(f'{fraction:.0%}' for fraction in sorted(fractions))}"
    return f"gets devices {runs}{part}, {planned.believed[index]:.4g} units/s expected: {planned.reason}"
