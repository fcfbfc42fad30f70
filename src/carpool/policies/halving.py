"""Successive halving of a sweep: which trials continue past a rung, wait there, or stop.

The asynchronous form (ASHA; Li et al., A System for Massively Parallel Hyperparameter Tuning, MLSys 2020): a trial that
reaches a rung continues if it is among the best 1/eta of all trials that have reached it so far; otherwise it waits,
because later ones may be worse. Once no further trial can reach the rung, the best 1/eta, at least one, continue and
the others stop. A trial that cannot wait without losing its progress continues or stops at once.

Unlike in ASHA, at most 1/eta of the trials that have reached a rung may continue while it is still open. Otherwise, in
a sweep sorted from worst to best, every trial would continue. In total at most 2/eta continue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from typing import NamedTuple

from carpool.core.model import HalvingRule, JobId


class TrialState(StrEnum):
    """Whether a trial may go on, is held, or is over."""

    ACTIVE = "active"  # waits for devices or runs; it may reach further rungs
    HELD = "held"  # paused at its highest rung
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Trial:
    """What is known about one trial."""

    job: JobId
    state: TrialState = TrialState.ACTIVE
    values: Mapping[int, float] = field(default_factory=dict)  # the metric at each rung it has reached
    passed: int = -1  # the highest rung that it was allowed to continue past
    can_hold: bool = True  # it resumes where it was paused

    @property
    def rung(self) -> int:
        """The highest rung that it has reached; -1: none."""
        return max(self.values, default=-1)


class Action(StrEnum):
    """What happens to a trial at a rung."""

    CONTINUE = "continue"  # a held trial is resumed
    HOLD = "hold"
    STOP = "stop"


_WORDS = {Action.CONTINUE: "continues past", Action.HOLD: "waits at", Action.STOP: "stopped at"}


class Verdict(NamedTuple):
    """A decision about a trial at its highest rung."""

    job: JobId
    action: Action
    rung: int
    reason: str


def rung_steps(rule: HalvingRule, rung: int) -> int:
    """The steps of a rung."""
    return int(rule.min_steps * rule.eta**rung)


def rung_at(rule: HalvingRule, step: float, total: float | None = None) -> int:
    """The highest rung at or below a step, -1 for none; the last step of a training, `total`, is never a rung."""
    rung = -1
    while rung_steps(rule, rung + 1) <= step and (total is None or rung_steps(rule, rung + 1) < total):
        rung += 1
    return rung


def decide(rule: HalvingRule, trials: Sequence[Trial]) -> list[Verdict]:
    """Verdicts on trials at rungs that they have not passed; none for trials that keep waiting."""
    over = {trial.job for trial in trials if trial.state is TrialState.OVER}
    verdicts: list[Verdict] = []
    for rung in range(max((trial.rung for trial in trials), default=-1) + 1):
        is_open = any(trial.job not in over and trial.rung < rung for trial in trials)
        found = _decide_rung(rule, rung, trials, over, is_open=is_open)
        over.update(verdict.job for verdict in found if verdict.action is Action.STOP)
        verdicts += found
    return verdicts


def _decide_rung(
    rule: HalvingRule, rung: int, trials: Sequence[Trial], over: set[JobId], *, is_open: bool
) -> list[Verdict]:
    """Verdicts at one rung; `is_open`: further trials may reach it."""
    ranked = sorted((trial for trial in trials if rung in trial.values), key=lambda trial: _rank(rule, trial, rung))
    count = len(ranked) // rule.eta if is_open else max(1, len(ranked) // rule.eta)
    free = count - sum(max(trial.passed, trial.rung - 1) >= rung for trial in ranked) if is_open else count
    verdicts = []
    for place, trial in enumerate(ranked, start=1):
        if trial.job in over or trial.rung != rung or trial.passed >= rung:
            continue
        is_among_best = place <= count and isfinite(trial.values[rung]) and (free > 0 or not trial.can_hold)
        free -= is_among_best
        action = _action(trial, len(ranked), rule, is_among_best=is_among_best, is_open=is_open)
        if action is not None:
            standing = f"{rule.metric} {trial.values[rung]:.4g} is number {place} of {len(ranked)}"
            shown = f"the best {count} continue" + (" so far" if is_open else "")
            reason = f"{_WORDS[action]} rung {rung + 1} (step {rung_steps(rule, rung)}): {standing}, {shown}"
            verdicts.append(Verdict(trial.job, action, rung, reason))
    return verdicts


def _rank(rule: HalvingRule, trial: Trial, rung: int) -> float:
    value = trial.values[rung]
    if not isfinite(value):
        return float("inf")
    return -value if rule.is_max else value


def _action(trial: Trial, reached: int, rule: HalvingRule, *, is_among_best: bool, is_open: bool) -> Action | None:
    """What happens to a trial; None: it keeps waiting."""
    if is_among_best:
        return Action.CONTINUE
    if not is_open:
        return Action.STOP
    if trial.state is TrialState.HELD:
        return None
    if trial.can_hold:
        return Action.HOLD
    return Action.STOP if reached >= rule.eta else Action.CONTINUE
