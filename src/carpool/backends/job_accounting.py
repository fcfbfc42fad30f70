"""Job accounting: phase, progress, allocations and outcome of each job, from journal records."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

from carpool.backends.metric_summary import MetricSummaries
from carpool.core.lifecycle import describe_update, requires_release, updated_spec
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
    ProgressReported,
    Record,
    ReleaseApplied,
    ResumabilityChanged,
    WeightChanged,
)
from carpool.core.model import Allocation, Job, JobId, JobSpec, NodeId, Phase
from carpool.core.topology import Cluster
from carpool.runtime.executor.reports import Evaluation, Outcome, Report, Sized, Told


@dataclass(frozen=True, slots=True)
class AllocationEntry:
    """One decision about a job: its allocation, when, and why."""

    at: float
    allocation: Allocation | None
    reason: str  # of the whole plan
    cause: str = ""  # the jobs whose end or start made it necessary or possible; empty: none known

    @property
    def summary(self) -> str:
        """The cause, else the first clause of the plan's reason."""
        return self.cause or self.reason.partition("; ")[0]


@dataclass(slots=True)
class JobAccount:
    """One job from its submission to its end."""

    spec: JobSpec
    submitted_at: float
    phase: Phase = Phase.WAITING
    ended_at: float | None = None
    held: Allocation | None = None
    held_since: float = 0.0
    held_s: float = 0.0  # time holding any device, up to `held_since`
    device_s: float = 0.0  # device-seconds, likewise
    done: float = 0.0  # steps, at `as_of`
    rate: float = 0.0
    as_of: float = 0.0
    loss: float | None = None
    own_batch: int = 0  # batch size of the training once it is loaded; 0: unknown
    error: str = ""
    warning: str = ""  # the newest of its executor
    restarts: int = 0  # after crashes and lost nodes
    outcome: Outcome | None = None
    metrics: MetricSummaries = field(default_factory=MetricSummaries)
    decisions: list[AllocationEntry] = field(default_factory=list)
    story: list[tuple[float, str]] = field(default_factory=list)  # messages of the executor

    @property
    def jct_s(self) -> float | None:
        return None if self.ended_at is None else self.ended_at - self.submitted_at

    @property
    def wait_s(self) -> float | None:
        return None if self.jct_s is None else max(0.0, self.jct_s - self.held_s)

    @property
    def is_stopped(self) -> bool:
        """Whether the rule of its sweep ended it, which is no failure."""
        return self.phase is Phase.CANCELLED and bool(self.error)

    @property
    def steps(self) -> int:
        """Steps done, from its progress or its last metrics."""
        return max(int(self.done), self.metrics.last_step)

    @property
    def last_metrics(self) -> Mapping[str, float]:
        """The metrics at its end, or the last ones so far."""
        return {**self.metrics.last, **({} if self.outcome is None else self.outcome.metrics)}

    def close(self, outcome: Outcome) -> None:
        """Add how it ended: its last steps were not reported as progress."""
        self.outcome, self.done = outcome, float(outcome.steps)
        self.metrics.add_loss(outcome.steps, outcome.loss)

    def hold(self, at: float, allocation: Allocation | None) -> None:
        if self.held is not None:
            self.held_s += at - self.held_since
            self.device_s += (at - self.held_since) * self.held.num_devices
        self.held, self.held_since = allocation, at


class JobAccounting:
    """An observer of the scheduler that keeps an account of every job, in order of submission."""

    def __init__(self, cluster: Cluster) -> None:
        self.accounts: dict[JobId, JobAccount] = {}
        self._cluster = cluster
        self.reason = ""  # of the newest decision
        self.at = 0.0

    def record(self, record: Record) -> None:
        self.at = record.at
        if record.planned is None or not record.planned.changes:
            for fact in record.facts:
                self._take(record.at, fact)
            return
        ended = self._device_holders([getattr(fact, "job", None) for fact in record.facts])
        for fact in record.facts:
            self._take(record.at, fact)
        self.reason = record.planned.reason
        causes = self._causes(record.planned.changes, ended)
        for change in record.planned.changes:
            if change.job not in self.accounts:
                continue
            account = self.accounts[change.job]
            account.hold(record.at, change.allocation)
            account.phase = Phase.WAITING if change.allocation is None else Phase.RUNNING
            account.rate = 0.0 if change.allocation is None else account.rate
            account.decisions.append(
                AllocationEntry(record.at, change.allocation, record.planned.reason, causes[change.job])
            )

    def _device_holders(self, jobs: Iterable[JobId | None]) -> dict[int, JobId]:
        """Devices of jobs that facts are about, with these jobs."""
        known = [self.accounts[job] for job in jobs if job in self.accounts]
        return {device: each.spec.id for each in known if each.held is not None for device in each.held.devices()}

    def _causes(self, changes: Sequence[Change], before: Mapping[int, JobId]) -> dict[JobId, str]:
        """For each change of a plan, the other jobs that gave up or took its devices at that instant."""
        taken: dict[int, JobId] = {}
        released: dict[int, JobId] = {}
        for job, allocation, _ in changes:
            if allocation is None:
                released |= self._device_holders([job])
            else:
                held = set(self._device_holders([job]))
                taken |= {device: job for device in allocation.devices() if device not in held}
        freed = {device: job for device, job in before.items() if self.accounts[job].held is None}
        return {change.job: self._cause(change, taken, released, freed) for change in changes}

    def _cause(
        self, change: Change, taken: Mapping[int, JobId], released: Mapping[int, JobId], freed: Mapping[int, JobId]
    ) -> str:
        """Such as ``b finished``, ``a is preempted`` or, of a job that loses devices, ``c starts there``."""
        account = self.accounts.get(change.job)
        before = set() if account is None or account.held is None else set(account.held.devices())
        after = set() if change.allocation is None else set(change.allocation.devices())
        starting = _names_on(taken, before - after)
        if starting:
            return f"{starting} {'starts' if ' ' not in starting else 'start'} there"
        ended = {device: f"{job} {_ENDINGS.get(self.accounts[job].phase, 'stopped')}" for device, job in freed.items()}
        preempted = {device: f"{job} is preempted" for device, job in released.items() if job != change.job}
        return _names_on({**ended, **preempted}, after - before)

    def take(self, at: float, report: Report) -> None:
        match report:
            case Told(job=job, words=words, is_warning=is_warning):
                self.tell(at, job, words)
                if is_warning and job in self.accounts:
                    self.accounts[job].warning = words
            case Sized(job=job, batch_size=batch_size) if job in self.accounts:
                self.accounts[job].own_batch = batch_size
            case Evaluation(job=job, step=step, metrics=metrics) if job in self.accounts:
                self.accounts[job].metrics.add(step, metrics)
            case Outcome():
                self.close(report)

    def tell(self, at: float, job: JobId, words: str) -> None:
        if job in self.accounts:
            self.accounts[job].story.append((at, words))

    def close(self, outcome: Outcome) -> None:
        account = self.accounts.get(outcome.job)
        if account is not None:
            account.close(outcome)

    def owner(self, job: JobId) -> str:
        """The user of a job; empty, so that only admins see it, where its submission is not in the journal."""
        account = self.accounts.get(job)
        return "" if account is None else account.spec.user

    def adopt(self, job: Job, begins_at: float) -> None:
        """Open an account for a job whose submission may be older than the records to come."""
        account = JobAccount(job.spec, job.submitted_at, job.phase, done=job.done, rate=job.rate, as_of=job.as_of)
        if job.since < begins_at:
            account.hold(job.since, job.desired)
        self.accounts[job.id] = account

    def _take(self, at: float, fact: Fact) -> None:
        if getattr(fact, "job", None) not in self.accounts and not isinstance(
            fact, JobSubmitted | NodeJoined | NodeLost
        ):
            return  # submitted before the journal begins
        match fact:
            case JobSubmitted(spec=spec):
                phase = Phase.BLOCKED if spec.after else Phase.WAITING
                self.accounts.pop(spec.id, None)  # adopted: now its position in the order of submission is known
                self.accounts[spec.id] = JobAccount(spec, at, phase, as_of=at)
            case AssignApplied(job=job, done=done) | ReleaseApplied(job=job, done=done):
                account = self.accounts[job]
                account.done, account.as_of = done, at
            case ProgressReported(job=job, done=done, rate=rate, loss=loss):
                account = self.accounts[job]
                rate = rate if account.held is not None else 0.0  # the report was sent before it was released
                account.done, account.rate, account.as_of = done, rate, at
                account.loss = account.loss if loss is None else loss
                account.metrics.add_loss(done, loss)
            case WeightChanged(job=job) | LimitsChanged(job=job) | ResumabilityChanged(job=job):
                account = self.accounts[job]
                account.spec = updated_spec(account.spec, fact)
                self.tell(at, job, describe_update(fact))
                if requires_release(fact, account.held):
                    self._take_off(at, account)
            case DeadlineMissed(job=job):
                self.tell(at, job, "missed its deadline; it continues")
            case JobFinished(job=job):
                self._end(at, job, Phase.FINISHED)
            case JobCancelled(job=job, reason=reason):
                self._end(at, job, Phase.CANCELLED)
                self.accounts[job].error = reason
            case JobFailed(job=job, error=error):
                self._end(at, job, Phase.FAILED)
                self.accounts[job].error = error
            case JobPaused(job=job, reason=reason):
                self._take_off(at, self.accounts[job])
                self.tell(at, job, reason or "paused by the user")
            case JobResumed(job=job, reason=reason):
                self.tell(at, job, reason or "resumed by the user")
            case JobCrashed(job=job, error=error, done=done):
                self._lose_devices(at, self.accounts[job], f"crashed; {done:.6g} steps are saved: {error}")
            case NodeJoined(name=name, banks=banks, replaces=replaces):
                self._cluster = self._cluster.with_join(name, banks, replaces=replaces)
            case NodeLost(node=node):
                self._lose_node(at, node)

    def _lose_node(self, at: float, node: NodeId) -> None:
        lost = set(self._cluster.nodes[node].devices) if node < len(self._cluster.nodes) else set()
        for account in self.accounts.values():
            if account.held is not None and not lost.isdisjoint(account.held.devices()):
                self._lose_devices(at, account, f"lost its devices: node {self._cluster.nodes[node].name} was lost")

    def _lose_devices(self, at: float, account: JobAccount, words: str) -> None:
        self.tell(at, account.spec.id, words)
        account.restarts += 1
        self._take_off(at, account)

    def _take_off(self, at: float, account: JobAccount) -> None:
        account.hold(at, None)
        account.phase, account.rate = Phase.WAITING, 0.0

    def _end(self, at: float, job: JobId, phase: Phase) -> None:
        account = self.accounts[job]
        account.hold(at, None)
        account.phase, account.ended_at, account.rate = phase, at, 0.0


_ENDINGS = {phase: str(phase) for phase in Phase if phase.is_over}


def _names_on(names: Mapping[int, str], devices: Collection[int]) -> str:
    """The names at these devices, each once."""
    found = dict.fromkeys([names[device] for device in sorted(devices) if device in names])
    return " and ".join(filter(None, [", ".join([*found][:-1]), *[*found][-1:]]))


Json = dict[str, object]


def allocation_json(given: AllocationEntry, batch_size: int, names: Mapping[int, str]) -> Json:
    """A decision as JSON; no devices means that the job was released."""
    held = given.allocation
    fractions = [] if held is None else [share.fraction for share in held.shares for _ in share.devices]
    return {
        "at_s": given.at,
        "devices": [] if held is None else [names.get(device, str(device)) for device in held.devices()],
        "fractions": fractions,
        "batch_size": (batch_size if held is None else held.batch_size or batch_size) or None,
        "parts": [] if held is None else list(held.parts),
        "reason": given.reason,
    }


def finite_or_none(value: float | None) -> float | None:
    """A number for JSON, which has no NaN and no infinity."""
    return value if value is not None and isfinite(value) else None
