"""Halving control: follows the trials of sweeps with successive halving, and holds, resumes and stops them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from carpool.backends.metric_summary import LOSS
from carpool.core.messages import (
    Fact,
    JobCancelled,
    JobFailed,
    JobFinished,
    JobPaused,
    JobResumed,
    JobSubmitted,
    ProgressReported,
    Record,
    ResumabilityChanged,
)
from carpool.core.model import HalvingRule, Job, JobId, JobSpec, Phase
from carpool.policies.halving import Action, Trial, TrialState, Verdict, decide, rung_at
from carpool.runtime.executor.reports import Evaluation, Report, Sized

_Array = tuple[str, str]  # user and name
_MAX_NAMED = 8  # metrics in a message
Measured = Callable[[JobId], Sequence[tuple[int, Mapping[str, float]]]]  # a job's metrics by step


@dataclass(slots=True)
class _TrackedTrial:
    """The state of a trial, from the facts and reports so far."""

    spec: JobSpec
    can_hold: bool  # it keeps its work while it is paused
    state: TrialState = TrialState.ACTIVE
    values: dict[int, float] = field(default_factory=dict)
    passed: int = -1
    total_steps: int | None = None

    @property
    def array(self) -> _Array:
        return self.spec.user, self.spec.array

    @property
    def rung(self) -> int:
        return max(self.values, default=-1)

    def as_trial(self) -> Trial:
        return Trial(self.spec.id, self.state, self.values, self.passed, self.can_hold)


class HalvingControl:
    """Observes records and reports, and turns verdicts of `policies.halving` into facts for the scheduler."""

    def __init__(
        self, measured: Measured = lambda job: (), tell: Callable[[JobId, str], None] = lambda job, words: None
    ) -> None:
        self._measured = measured
        self._tell = tell  # adds a line to a job's story
        self._is_live = False
        self._warned: set[_Array] = set()
        self._trials: dict[JobId, _TrackedTrial] = {}
        self._arrays: dict[_Array, list[_TrackedTrial]] = {}
        self._changed: dict[_Array, HalvingRule] = {}  # sweeps with a decision due

    def record(self, record: Record) -> None:
        for fact in record.facts:
            if isinstance(fact, JobSubmitted):
                if fact.spec.halving is not None:
                    self._add(fact.spec)
            elif (trial := self._trials.get(getattr(fact, "job", JobId("")))) is not None:
                self._on_fact(trial, fact)

    def take(self, report: Report) -> None:
        if isinstance(report, Sized) and (trial := self._trials.get(report.job)) is not None:
            trial.total_steps = report.total_steps
        elif isinstance(report, Evaluation) and (trial := self._trials.get(report.job)) is not None:
            self._observe(trial, report.step, report.metrics)

    def adopt(self, job: Job) -> None:
        """Follow a job that was submitted before the first stored record."""
        if job.spec.halving is None:
            return
        trial = self._add(job.spec)
        for step, metrics in self._measured(job.id):
            self._observe(trial, step, metrics)
        if job.phase is Phase.PAUSED and trial.values:
            trial.state = TrialState.HELD

    def end_replay(self) -> None:
        """Let trials that run after a restart continue; held ones stay held."""
        for trial in self._trials.values():
            if trial.state is TrialState.ACTIVE:
                trial.passed = trial.rung
            self._mark(trial)
        self._is_live = True

    def follow_up(self) -> list[Fact]:
        """Facts that follow from what has been observed since the last call."""
        changed, self._changed = self._changed, {}
        facts: list[Fact] = []
        for array, rule in changed.items():
            for verdict in decide(rule, [trial.as_trial() for trial in self._arrays[array]]):
                facts += self._carried_out(verdict)
        return facts

    def _carried_out(self, verdict: Verdict) -> list[Fact]:
        trial = self._trials[verdict.job]
        match verdict.action:
            case Action.STOP:
                return [JobCancelled(verdict.job, verdict.reason)]
            case Action.HOLD:
                return [JobPaused(verdict.job, verdict.reason)]
            case Action.CONTINUE:
                trial.passed = verdict.rung
                return [JobResumed(verdict.job, verdict.reason)] if trial.state is TrialState.HELD else []

    def _add(self, spec: JobSpec) -> _TrackedTrial:
        trial = _TrackedTrial(spec, can_hold=spec.resumable)
        known = self._trials.get(spec.id)
        if known is not None:  # adopted, but its submission is in the journal after all
            self._arrays[known.array].remove(known)
        self._trials[spec.id] = trial
        self._arrays.setdefault(trial.array, []).append(trial)
        return trial

    def _on_fact(self, trial: _TrackedTrial, fact: Fact) -> None:
        match fact:
            case JobFinished() | JobFailed() | JobCancelled():
                trial.state = TrialState.OVER
                self._mark(trial)
            case ResumabilityChanged(resumable=resumable):
                trial.can_hold = resumable
            case JobPaused(reason=reason) if reason:
                trial.state = TrialState.HELD
            case JobResumed():
                if trial.state is TrialState.HELD:  # by a verdict, or by its user
                    trial.state, trial.passed = TrialState.ACTIVE, trial.rung
            case ProgressReported(done=done, loss=loss) if loss is not None:
                self._observe(trial, int(done), {LOSS: loss})

    def _observe(self, trial: _TrackedTrial, step: int, metrics: Mapping[str, float]) -> None:
        rule = trial.spec.halving
        if rule is None or rule.metric not in metrics:
            self._warn_of_missing(trial, step, metrics)
            return
        rung = rung_at(rule, step, trial.total_steps)
        for number in range(trial.rung + 1, rung + 1):
            trial.values[number] = metrics[rule.metric]
            self._mark(trial)

    def _warn_of_missing(self, trial: _TrackedTrial, step: int, metrics: Mapping[str, float]) -> None:
        """Warn once per sweep if a rung passes without the metric: none of its trials would ever stop."""
        rule = trial.spec.halving
        if not self._is_live or rule is None or trial.values or rule.metric == LOSS or trial.array in self._warned:
            return
        if step >= rule.min_steps:
            self._warned.add(trial.array)
            known = ", ".join(sorted(metrics)[:_MAX_NAMED]) or "none"
            self._tell(
                trial.spec.id, f"halving needs metric {rule.metric!r} at step {rule.min_steps}; reported: {known}"
            )

    def _mark(self, trial: _TrackedTrial) -> None:
        if trial.spec.halving is not None:
            self._changed[trial.array] = trial.spec.halving
