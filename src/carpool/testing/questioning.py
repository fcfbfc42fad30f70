"""A policy under questioning: every plan is asked for twice and looked at before anybody acts on it."""

from __future__ import annotations

import copy
import json
from typing import Any

from carpool.core.estimates import Estimator
from carpool.core.messages import RUN
from carpool.core.model import Job, Phase
from carpool.core.policy import Plan, Policy, Snapshot

_CLASS_SIDE = ("cadence", "max_virtual", "shares_devices", "keeps_running_order")


class Questioned(Policy):
    """Stands in for a policy and asserts what is promised of each of its plans."""

    def __init__(self, policy: Policy) -> None:
        self.inner = policy
        self.num_plans = 0
        self._pristine = copy.deepcopy(policy)
        for name in _CLASS_SIDE:
            setattr(self, name, getattr(policy, name))

    def plan(self, view: Snapshot) -> Plan:
        """The inner policy's plan, after checking that a fresh copy of the policy makes the same one."""
        self.num_plans += 1
        before = _state(view)
        plan = self.inner.plan(view)
        assert _state(view) == before, "a policy must not change what it looks at; it works on a Draft"
        again = copy.deepcopy(self._pristine).plan(view)
        assert plan == again, (
            "the same view must give the same plan: this policy remembers something (use Plan.note), or asks a clock "
            f"or chance.\nfirst: {plan}\nagain: {again}"
        )
        check_plan(view, plan)
        return plan

    def waiting_key(self, job: Job, estimates: Estimator) -> Any:
        """As the inner policy says."""
        return self._same(self.inner.waiting_key(job, estimates), self.inner.waiting_key(job, estimates), job)

    def running_key(self, job: Job, estimates: Estimator) -> Any:
        """As the inner policy says."""
        return self._same(self.inner.running_key(job, estimates), self.inner.running_key(job, estimates), job)

    def _same(self, key: Any, again: Any, job: Job) -> Any:
        assert key == again, f"the key of {job.id} must stay the same while its record does: {key} and {again}"
        return key


def check_plan(view: Snapshot, plan: Plan) -> None:
    """Assert that a plan is one the scheduler can act on and a person can understand."""
    changed = [change.job for change in plan.changes]
    assert len(set(changed)) == len(changed), f"a plan changes each job once: {changed}"
    for change in plan.changes:
        job = view.jobs.get(change.job)
        assert job is not None, f"{change.job!r} is over, or was never submitted"
        assert job.phase in (Phase.WAITING, Phase.RUNNING), f"{job.id!r} is {job.phase}: a plan leaves it alone"
        if change.allocation is None:
            assert job.desired is not None, f"{job.id!r} holds nothing that could be released"
            continue
        assert change.allocation != job.desired or change.purpose != RUN, f"{job.id!r} is given what it holds already"
        width = change.allocation.num_devices
        assert job.spec.narrowest <= width <= job.spec.widest, f"{job.id!r} does not take {width} devices"
        kinds = {kind for kind, _ in view.cluster.groups_of(change.allocation)}
        assert not job.spec.kinds or kinds <= set(job.spec.kinds), f"{job.id!r} does not run on {sorted(kinds)}"
    if plan.changes:
        check_reason(plan.reason)
    assert plan.wake_at is None or plan.wake_at > view.at, f"wake_at {plan.wake_at} is not after {view.at}"
    assert json.loads(json.dumps(plan.note)) == plan.note, (
        f"a note must come back from JSON as it went in (lists, not tuples; text keys): {plan.note!r}"
    )


def check_reason(reason: str) -> None:
    """Assert that a reason is a sentence for people: one line of at least three words."""
    assert reason == reason.strip(), f"a reason neither begins nor ends with space: {reason!r}"
    assert reason.isprintable(), f"a reason is one line of plain text: {reason!r}"
    assert len(reason.split()) >= 3, f"a reason is a sentence for people, not {reason!r}"
    assert " object at 0x" not in reason, f"a reason names things, not their addresses: {reason!r}"


def _state(view: Snapshot) -> tuple[object, ...]:
    """Everything a policy could have changed, by value."""
    occupancy = view.occupancy
    masks = [occupancy.free_mask(node.id) for node in occupancy.cluster.nodes]
    residents = [occupancy.residents(device) for device in range(occupancy.cluster.num_devices)]
    kept = copy.deepcopy(view.note)
    return view.at, dict(view.jobs), list(view.waiting), list(view.roster), masks, residents, kept
