"""Record log: writes one log line for every decision, fault and change of the cluster."""

from __future__ import annotations

import logging

from carpool.core.messages import (
    Fact,
    JobCancelled,
    JobCrashed,
    JobFailed,
    JobFinished,
    JobSubmitted,
    NodeJoined,
    NodeLost,
    OutsidersSeen,
    Planned,
    PolicyChanged,
    Record,
)
from carpool.logs import log_event

_log = logging.getLogger(__name__)


class RecordLog:
    """An observer of the scheduler that logs records; programs, arguments and environments never appear."""

    def record(self, record: Record) -> None:
        if not _log.isEnabledFor(logging.ERROR):
            return
        for fact in record.facts:
            _log_fact(record.at, fact)
        if record.planned is not None and record.planned.changes and _log.isEnabledFor(logging.INFO):
            _log_plan(record.at, record.planned)


def _log_plan(at: float, planned: Planned) -> None:
    changes = {
        change.job: [] if change.allocation is None else list(change.allocation.devices()) for change in planned.changes
    }
    log_event(_log, "plan", at_s=round(at, 3), reason=planned.reason, changes=changes)


def _log_fact(at: float, fact: Fact) -> None:
    at = round(at, 3)
    match fact:
        case JobSubmitted(spec=spec):
            log_event(_log, "job_submitted", at_s=at, job=spec.id, user=spec.user, devices=spec.devices)
        case JobFinished(job=job):
            log_event(_log, "job_finished", at_s=at, job=job)
        case JobCancelled(job=job):
            log_event(_log, "job_cancelled", at_s=at, job=job)
        case JobFailed(job=job, error=error):
            log_event(_log, "job_failed", at_s=at, job=job, error=error)
        case JobCrashed(job=job, error=error, done=done):
            log_event(_log, "job_crashed", level=logging.WARNING, at_s=at, job=job, done=done, error=error)
        case PolicyChanged(policy=policy, fault=fault):
            level = logging.ERROR if fault else logging.INFO
            log_event(_log, "policy_changed", level=level, at_s=at, policy=policy, fault=fault)
        case NodeLost(node=node):
            log_event(_log, "node_lost", level=logging.WARNING, at_s=at, node=int(node))
        case NodeJoined(name=name):
            log_event(_log, "node_joined", at_s=at, node=name)
        case OutsidersSeen(device=device, processes=processes):
            log_event(_log, "foreign_processes", at_s=at, device=int(device), processes=len(processes))
