"""Validation of facts and plans: reject invalid ones before any state changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from carpool.core.errors import CarpoolError, InputError
from carpool.core.journal import changes_to_json
from carpool.core.messages import Change, Fact, JobSubmitted, LimitsChanged, NodeJoined, ProgressReported, WeightChanged
from carpool.core.model import Job, JobId, Phase
from carpool.core.policy import Plan, Policy


def validate_facts(facts: Sequence[Fact], taken: Sequence[Container[JobId]], has_node: Callable[[str], bool]) -> None:
    """InputError for a duplicate job name, an empty node, or an impossible weight or device range."""
    new: set[JobId] = set()
    for fact in facts:
        if type(fact) is JobSubmitted:
            name = fact.spec.id
            if name in new or any(name in names for names in taken):
                raise InputError(f"job {name!r} exists already", way_out="Choose another name.")
            if len(facts) > 1:
                new.add(name)
        elif type(fact) is NodeJoined and not fact.banks and not has_node(fact.name):
            raise InputError(f"new node {fact.name!r} has no devices", way_out="Give its banks.")
        elif type(fact) is WeightChanged and not (isfinite(fact.weight) and fact.weight > 0.0):
            where = f"job {fact.job!r}"
            raise InputError(f"weight is {fact.weight:g}", where=where, way_out="Give a number above 0.")
        elif type(fact) is LimitsChanged and not 1 <= fact.min_devices <= fact.max_devices:
            raise InputError(
                f"device limits are {fact.min_devices} to {fact.max_devices}",
                where=f"job {fact.job!r}",
                way_out="Give a minimum of at least 1, and a maximum not below it.",
            )


_LEAST_RATE, _MOST_RATE = 1e-9, 1e9  # units per second that a policy can compute with, and seconds of a step
_MOST_SIGNAL = 1e30  # absolute value of a loss, or of a noise scale


def plausible(fact: ProgressReported) -> ProgressReported:
    """The report without implausible figures, so that a job cannot disturb the plans for others with them."""
    rate = fact.rate if fact.rate == 0.0 or _LEAST_RATE <= fact.rate <= _MOST_RATE else 0.0
    loss, noise = _signal(fact.loss), _signal(fact.noise)
    step_s, sync_s = _duration(fact.step_s), _duration(fact.sync_s)
    if (rate, loss, noise, step_s, sync_s) == (fact.rate, fact.loss, fact.noise, fact.step_s, fact.sync_s):
        return fact
    return replace(fact, rate=rate, loss=loss, noise=noise, step_s=step_s, sync_s=sync_s)


def _signal(value: float | None) -> float | None:
    return value if value is not None and -_MOST_SIGNAL <= value <= _MOST_SIGNAL else None


def _duration(value: float | None) -> float | None:
    return value if value is not None and (value == 0.0 or _LEAST_RATE <= value <= _MOST_RATE) else None


def validate_answer(policy: Policy, at: float, plan: Plan, jobs: Mapping[JobId, Job], *, strictly: bool) -> None:
    """CarpoolError for a plan whose `wake_at` is not in the future, or that shares devices undeclared.

    With `strictly`, also for what is not a plan or cannot be written to the journal.
    """
    if strictly and plan is not Plan.NOTHING:
        _validate_json(policy, plan)
        validate_plan(policy, jobs, plan.changes)
    if plan.wake_at is not None and not plan.wake_at > at:
        raise CarpoolError(f"policy {policy!r} returned wake_at {plan.wake_at} s at {at} s; it must be later")
    if plan is not Plan.NOTHING and not policy.may_share:
        _validate_fractions(policy, jobs, plan.changes)


def _validate_json(policy: Policy, plan: Any) -> None:
    reason, changes = getattr(plan, "reason", None), getattr(plan, "changes", None)
    if not isinstance(reason, str) or not isinstance(changes, tuple | list):
        raise CarpoolError(f"policy {policy!r} returned {plan!r}, not a Plan with changes and a reason")
    try:
        json.dumps((changes_to_json(changes), plan.wake_at, plan.note))
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CarpoolError(f"policy {policy!r} returned a plan that cannot be written as JSON: {error}") from error


def _validate_fractions(policy: Policy, jobs: Mapping[JobId, Job], changes: Sequence[Change]) -> None:
    """A policy that shares devices must declare it: backends look for neighbours only then."""
    for job, allocation, _ in changes:
        if allocation is not None and allocation.fractions not in {(1.0,), jobs[job].lane}:
            raise CarpoolError(
                f"policy {policy!r} assigns {allocation.shares[0].fraction:g} of a device but does not set "
                "shares_devices = True"
            )


def validate_plan(policy: Policy, jobs: Mapping[JobId, Job], changes: Sequence[Change]) -> None:
    """CarpoolError or Overbooked for an invalid plan that was not drafted."""
    seen: set[JobId] = set()
    for change in changes:
        job = jobs.get(change.job)
        if job is None or job.phase not in (Phase.WAITING, Phase.RUNNING):
            raise CarpoolError(f"policy {policy!r} changed job {change.job!r}, which is not waiting or running")
        if change.job in seen:
            raise CarpoolError(f"policy {policy!r} changed job {change.job!r} twice in one plan")
        seen.add(change.job)
        if change.allocation is not None:
            job.check_lane(change.allocation)
