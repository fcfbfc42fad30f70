"""Coordinator of a federation: folds facts of devices, closes cycles, aggregates rounds and starts the next cycle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import numpy as np

from carpool.core.errors import CarpoolError
from carpool.core.estimates import DeclaredEstimator, Estimator
from carpool.federated.aggregation import Contribution, contribution_weights
from carpool.federated.cycle_plan import CyclePlanner, DeviceState
from carpool.federated.federation import DeviceName, Federation, Task, TaskName
from carpool.federated.messages import (
    Aggregate,
    CloseCycle,
    DeviceJoined,
    DeviceLost,
    EndTask,
    Evaluated,
    Fact,
    Order,
    Outcome,
    Record,
    Refusal,
    RepeatRound,
    StartWork,
    TaskResult,
    Work,
    WorkReported,
)

_EPSILON_S = 1e-9


@dataclass(slots=True)
class TaskState:
    """Progress of a task."""

    task: Task
    rounds: int = 0  # done
    failed_rounds: int = 0  # in a row
    last_refusal: Refusal | None = None
    end_reason: str = ""
    failed: bool = False
    is_evaluation_due: bool = False  # its weights must be evaluated before the next cycle
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Cycle:
    """An open cycle."""

    number: int
    started_at: float
    orders: dict[DeviceName, StartWork] = field(default_factory=dict)
    pending: set[DeviceName] = field(default_factory=set)
    accepted: dict[TaskName, dict[DeviceName, Contribution]] = field(default_factory=dict)
    reported: set[DeviceName] = field(default_factory=set)


class Coordinator:
    """Facts in, orders out. It has no clock: time is the `at` of each call; `wake_at` is when it must be called.

    The coordinator never holds the updates themselves: it gets their measurements and the outcome of their checks, and
    orders which ones to aggregate. Recovery folds records and does not plan again.
    """

    def __init__(
        self,
        federation: Federation,
        estimator: Estimator | None = None,
        observers: Sequence[Callable[[Record], object]] = (),
    ) -> None:
        self.federation = federation
        self.at = 0.0
        self.tasks = {task.name: TaskState(task) for task in federation.tasks}
        self.devices: dict[DeviceName, DeviceState] = {}
        self.cycle: Cycle | None = None
        self.num_cycles = 0
        self._planner = CyclePlanner(federation, estimator or DeclaredEstimator())
        self._observers = tuple(observers)
        self._folds: dict[type, Callable[[Any], list[Refusal]]] = {
            DeviceJoined: self._on_joined,
            DeviceLost: self._on_lost,
            WorkReported: self._on_report,
            Evaluated: self._on_evaluated,
        }

    @property
    def is_over(self) -> bool:
        return all(state.end_reason for state in self.tasks.values())

    @property
    def wake_at(self) -> float | None:
        """When the open cycle must be closed even if nothing happens."""
        if self.cycle is None or not self.federation.deadline_s:
            return None
        return self.cycle.started_at + self.federation.deadline_s + self.federation.grace_s

    def handle(self, at: float, facts: Sequence[Fact]) -> list[Order]:
        """Fold the facts of one instant, then decide; returns the orders."""
        if at < self.at:
            raise CarpoolError(f"facts of {at} s were handled after facts of {self.at} s; time must not decrease")
        self.at = at
        refused = [refusal for fact in facts for refusal in self._fold(fact)]
        orders: list[Order] = []
        for decide in (self._repeat, self._close, self._end_tasks, self._open):
            made = decide()
            self._adopt(made)
            orders += made
        if facts or orders:
            record = Record(at, tuple(facts), tuple(orders), tuple(refused))
            for observe in self._observers:
                observe(record)
        return orders

    def recover(self, records: Iterable[Record]) -> None:
        """Fold records without deciding again. The edge then reports its devices as lost, and as joined when ready."""
        for record in records:
            self.at = record.at
            for fact in record.facts:
                self._fold(fact)
            self._adopt(record.orders)

    def _fold(self, fact: Fact) -> list[Refusal]:
        refused = self._folds[type(fact)](fact)
        for refusal in refused:
            if refusal.task in self.tasks:
                self.tasks[refusal.task].last_refusal = refusal
        return refused

    def _on_joined(self, fact: DeviceJoined) -> list[Refusal]:
        volumes = {TaskName(task): samples for task, samples in fact.volumes.items()}
        known = self.devices.get(fact.device)
        if known is None or (known.kind, known.volumes, known.cores) != (fact.kind, volumes, fact.cores):
            sample_s = {TaskName(task): seconds for task, seconds in fact.sample_s.items() if seconds > 0.0}
            state = DeviceState(fact.device, fact.kind, volumes, fact.cores, sample_s=sample_s)
            state.come_back(fact.load_s)
            self.devices[fact.device] = state
        else:
            known.come_back(fact.load_s)
        return []

    def _on_lost(self, fact: DeviceLost) -> list[Refusal]:
        if fact.device in self.devices:
            self.devices[fact.device].is_present = False
        if self.cycle is not None:
            self.cycle.pending.discard(fact.device)
        return []

    def _on_evaluated(self, fact: Evaluated) -> list[Refusal]:
        state = self.tasks.get(fact.task)
        if state is not None and fact.rounds == state.rounds:
            state.metrics = dict(fact.metrics)
            state.is_evaluation_due = False
        return []

    def _on_report(self, fact: WorkReported) -> list[Refusal]:
        outcome = self._outcome_of_report(fact)
        if outcome is not Outcome.ACCEPTED:
            return [Refusal(fact.device, result.task, result.round, outcome) for result in fact.results]
        cycle = self.cycle
        assert cycle is not None
        cycle.pending.discard(fact.device)
        cycle.reported.add(fact.device)
        device, order = self.devices[fact.device], cycle.orders[fact.device]
        ordered = {work.task: work for work in order.work}
        used: list[TaskResult] = []
        refused = []
        for result in fact.results:
            outcome = self._outcome_of_result(device, ordered, used, result)
            if outcome is Outcome.ACCEPTED:
                used.append(result)
                steps = result.steps / ordered[result.task].runs_begun(result.samples)
                contribution = Contribution(device.volumes.get(result.task, 0), result.samples, steps)
                cycle.accepted.setdefault(result.task, {})[fact.device] = contribution
                device.done[result.task] = device.done.get(result.task, 0) + result.samples
            else:
                refused.append(Refusal(fact.device, result.task, result.round, outcome, result.detail))
        is_whole = len(used) == len(ordered) and all(ordered[each.task].samples == each.samples for each in used)
        device.learn(used, self.at - cycle.started_at, order, is_whole=is_whole)
        return refused

    def _outcome_of_report(self, fact: WorkReported) -> Outcome:
        if fact.device not in self.devices:
            return Outcome.NOT_ORDERED
        if self.cycle is None or fact.cycle != self.cycle.number:
            return Outcome.STALE if fact.cycle <= self.num_cycles else Outcome.NOT_ORDERED
        if fact.device not in self.cycle.orders:
            return Outcome.NOT_ORDERED
        return Outcome.DUPLICATE if fact.device in self.cycle.reported else Outcome.ACCEPTED

    def _outcome_of_result(
        self,
        device: DeviceState,
        ordered: Mapping[TaskName, Work],
        used: Sequence[TaskResult],
        result: TaskResult,
    ) -> Outcome:
        """Whether a result answers what was ordered; if so, the outcome of the checks of its content."""
        work = ordered.get(result.task)
        if work is None or work.round != result.round:
            return Outcome.NOT_ORDERED
        if any(each.task == result.task for each in used):
            return Outcome.DUPLICATE
        outcome = Outcome(result.outcome) if result.outcome in set(Outcome) else Outcome.FAILED
        if outcome is not Outcome.ACCEPTED:
            return outcome
        if not (result.steps and result.samples):
            return Outcome.NO_WORK
        volume = device.volumes.get(result.task, 0)
        if self.tasks[result.task].task.whole_epochs:
            work = work._replace(batch_size=volume)
        fits = result.samples <= work.samples and work.can_take(result.steps, result.samples, volume)
        return Outcome.ACCEPTED if fits else Outcome.INFLATED

    def _close(self) -> list[Order]:
        """Close the cycle when all devices have reported or are lost, or at its deadline."""
        cycle, wake_at = self.cycle, self.wake_at
        if cycle is None or (cycle.pending and (wake_at is None or self.at < wake_at - _EPSILON_S)):
            return []
        missing = tuple(sorted(cycle.orders.keys() - cycle.reported))
        tasks = sorted({work.task for order in cycle.orders.values() for work in order.work})
        ends = [self._end_of_round(name, cycle.accepted.get(name, {})) for name in tasks]
        return [CloseCycle(cycle.number, missing), *ends]

    def _end_of_round(self, name: TaskName, accepted: Mapping[DeviceName, Contribution]) -> Order:
        state = self.tasks[name]
        if len(accepted) < state.task.min_updates:
            reason = f"{len(accepted)} updates accepted, {state.task.min_updates} needed"
            return RepeatRound(name, state.rounds, reason)
        devices = tuple(sorted(accepted))
        weights = contribution_weights(state.task, [accepted[device] for device in devices])
        return Aggregate(name, state.rounds, devices, weights)

    def _end_tasks(self) -> list[Order]:
        ended: list[Order] = []
        for name, state in self.tasks.items():
            task = state.task
            if state.end_reason or (self.cycle is not None) or state.is_evaluation_due:
                continue
            target = task.target
            if (
                target is not None
                and state.rounds
                and target.is_reached(state.metrics.get(target.metric, _never(task)))
            ):
                ended.append(EndTask(name, f"{target.metric} {state.metrics[target.metric]:g} reached"))
            elif state.rounds >= task.rounds:
                ended.append(EndTask(name, f"{task.rounds} rounds done"))
            elif state.failed_rounds >= task.max_failed_rounds:
                ended.append(EndTask(name, _why_failed(state), failed=True))
        return ended

    def _open(self) -> list[Order]:
        active = {name: (state.task, state.rounds) for name, state in self.tasks.items() if not state.end_reason}
        if self.cycle is not None or any(self.tasks[name].is_evaluation_due for name in active):
            return []
        present = [self.devices[name] for name in sorted(self.devices) if self.devices[name].is_present]
        if not active or len(present) < self.federation.min_devices:
            return []
        plans = self._planner.plan(active, self._chosen(present))
        number, deadline_s = self.num_cycles + 1, self.federation.deadline_s
        return [
            StartWork(name, number, plan.work, deadline_s, plan.seconds, plan.in_turn) for name, plan in plans.items()
        ]

    def _chosen(self, present: Sequence[DeviceState]) -> Sequence[DeviceState]:
        """The devices that take part in the next cycle, drawn without replacement."""
        count = max(self.federation.min_devices, ceil(self.federation.participation * len(present)))
        if count >= len(present):
            return present
        random = np.random.default_rng((self.federation.seed, self.num_cycles))
        return [present[place] for place in sorted(random.choice(len(present), count, replace=False))]

    def _repeat(self) -> list[Order]:
        """Repeat the orders of devices that were lost and came back while the cycle is open."""
        cycle = self.cycle
        if cycle is None or len(cycle.pending) + len(cycle.reported) == len(cycle.orders):
            return []
        late_s, deadline_s = self.at - cycle.started_at, self.federation.deadline_s
        if deadline_s and late_s >= deadline_s:
            return []
        away = sorted(cycle.orders.keys() - cycle.pending - cycle.reported)
        orders = [cycle.orders[name] for name in away if self.devices[name].is_present]
        return [replace(order, deadline_s=max(deadline_s - late_s, 0.0)) for order in orders]

    def _adopt(self, orders: Iterable[Order]) -> None:
        for order in orders:
            match order:
                case StartWork():
                    self._adopt_work(order)
                case CloseCycle():
                    self.cycle = None
                case Aggregate(task=name):
                    state = self.tasks[name]
                    state.rounds, state.failed_rounds = order.round + 1, 0
                    state.is_evaluation_due = state.task.target is not None
                case RepeatRound(task=name):
                    self.tasks[name].failed_rounds += 1
                case EndTask(task=name):
                    self.tasks[name].end_reason, self.tasks[name].failed = order.reason, order.failed

    def _adopt_work(self, order: StartWork) -> None:
        if self.cycle is None:
            self.cycle = Cycle(order.cycle, self.at)
            self.num_cycles = order.cycle
        self.devices[order.device].adopt(order.work)
        self.cycle.orders.setdefault(order.device, order)
        self.cycle.pending.add(order.device)


def _why_failed(state: TaskState) -> str:
    """Why a task ends after too many failed rounds, with the last update that was refused."""
    why, last = f"{state.failed_rounds} rounds in a row without enough updates", state.last_refusal
    if last is None:
        return why
    return f"{why}; the last refused, of {last.device}: {last.outcome}{f' ({last.detail})' if last.detail else ''}"


def _never(task: Task) -> float:
    """A value that does not reach the task's target."""
    assert task.target is not None
    return float("-inf") if task.target.above else float("inf")
