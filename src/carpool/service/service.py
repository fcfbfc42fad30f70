"""Service facade: every command and query of API, dashboard and CLI, checked against the caller's role."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any, Literal

from carpool.backends.job_accounting import JobAccount
from carpool.core.constraints.priorities import weight_with_priority
from carpool.core.errors import CarpoolError, InputError
from carpool.core.messages import (
    Fact,
    JobCancelled,
    JobPaused,
    JobResumed,
    LimitsChanged,
    NodeDrained,
    NodeUndrained,
    PolicyChanged,
    WeightChanged,
)
from carpool.core.model import JobId, JobSpec, NodeId, Phase
from carpool.core.topology import Cluster
from carpool.jobs.feasibility import check_fit
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.runtime.executor.job_folder import JobFolder
from carpool.service.admission import IdempotencyKeys, JobNames, Quotas, fingerprint
from carpool.service.auth import Principal
from carpool.service.daemon.policy_guard import dry_run_policy
from carpool.service.daemon.read_model import ReadModel
from carpool.service.queries import present
from carpool.service.queries.event_log import Event
from carpool.service.queries.results import results_view
from carpool.service.queries.views import (
    DecisionView,
    DeviceView,
    JobPage,
    JobView,
    LogChunk,
    MeasurementView,
    NodeView,
    ResultsView,
    ServiceCounters,
    SpanView,
    StoryEventView,
    SummaryView,
    SweepView,
)

ArrayCommand = Literal["cancel", "pause", "resume"]

_COMMANDS: dict[ArrayCommand, tuple[Callable[[JobId], Fact], tuple[Phase, ...]]] = {
    "cancel": (JobCancelled, (Phase.BLOCKED, Phase.WAITING, Phase.RUNNING, Phase.PAUSED)),
    "pause": (JobPaused, (Phase.WAITING, Phase.RUNNING)),
    "resume": (JobResumed, (Phase.PAUSED,)),
}
_JobChange = JobCancelled | JobPaused | JobResumed | WeightChanged | LimitsChanged

_ENDINGS = {Phase.FINISHED: "has finished", Phase.FAILED: "has failed", Phase.CANCELLED: "was cancelled"}
_LOG_CHUNK = 1 << 18  # bytes
_MAX_POINTS = 2000  # of a curve


class NotFound(CarpoolError):
    """There is no such job, or the caller may not see it; the message does not reveal which."""


class Conflict(CarpoolError):
    """The job's phase does not allow the request."""


class SchedulerService:
    """Executes commands and queries on behalf of a principal, within what its role allows."""

    def __init__(
        self,
        model: ReadModel,
        notes: Mapping[JobId, Mapping[str, Any]] | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        self._model = model
        self._quotas = quotas or Quotas()
        self._names = JobNames(model.scheduler.has_seen)
        self._keys = IdempotencyKeys(notes or {})

    async def submit(self, principal: Principal, jobs: Sequence[ListedJob], key: str = "") -> tuple[JobId, ...]:
        """Accept all jobs or none; return their final names once they are durable.

        A name that is taken gets a number. A repeated request with the same idempotency key submits nothing.
        """
        principal.check_may_submit()
        check_fit(jobs, self.cluster)
        user, body = principal.name, fingerprint(jobs) if key else ""
        if key and (before := self._keys.find(user, key, body)) is not None:
            await self._model.loop.flush()
            return before
        self._quotas.of(user).check(user, self._active(user), jobs)
        accepted = self.as_submitted(principal, jobs)
        names = tuple(job.spec.id for job in accepted)
        if key:
            submitting = self._model.loop.submit(accepted, {"user": user, "key": key, "body": body})
            await self._keys.submit(user, key, body, names, submitting)
        else:
            await self._model.loop.submit(accepted)
        return names

    async def cancel(self, principal: Principal, job: str) -> None:
        await self._change(principal, JobCancelled(JobId(job)), "be cancelled")

    async def pause(self, principal: Principal, job: str) -> None:
        await self._change(principal, JobPaused(JobId(job)), "be paused", unless=(Phase.PAUSED, Phase.BLOCKED))

    async def resume(self, principal: Principal, job: str) -> None:
        others = tuple(phase for phase in Phase if phase is not Phase.PAUSED)
        await self._change(principal, JobResumed(JobId(job)), "be resumed", unless=others)

    async def change_array(self, principal: Principal, array: str, command: ArrayCommand) -> tuple[JobId, ...]:
        """Cancel, pause or resume those jobs of an array whose phase allows it; return their names."""
        principal.check_may_submit()
        specs = (account.spec for account in self._model.accounting.accounts.values())
        members = [spec.id for spec in specs if spec.array == array and principal.may_change(spec.user)]
        if not array or not members:
            raise NotFound(f"there is no array {array!r}")
        make, phases = _COMMANDS[command]
        jobs = self._model.scheduler.jobs
        changed = [name for name in members if name in jobs and jobs[name].phase in phases]
        # Last first: cancelling a running job must not start another one that is about to be cancelled.
        await self._model.loop.apply(*(make(name) for name in reversed(changed)))
        return tuple(changed)

    async def set_weight(self, principal: Principal, job: str, weight: float) -> None:
        """Change a job's weight; the factors of its priority and of its owner's quota still apply."""
        spec = self._account(principal, job).spec
        factor = self._quotas.of(spec.user).weight
        change = WeightChanged(JobId(job), weight_with_priority(weight, spec.priority) * factor)
        await self._change(principal, change, "change its weight")

    async def set_limits(self, principal: Principal, job: str, min_devices: int, max_devices: int) -> None:
        account = self._account(principal, job)
        spec = replace(account.spec, devices=min_devices, min_devices=min_devices, max_devices=max_devices)
        program = self._model.programs.get(account.spec.id, Program())
        if program.command and min_devices != max_devices:
            raise InputError(
                f"job {job!r} runs a command, which cannot be resized",
                way_out="Set min_devices and max_devices to the same number.",
            )
        if program.exact and max_devices > program.shards:
            raise InputError(
                f"max_devices is {max_devices}; job {job!r} has {program.shards} shards",
                way_out=f"Set max_devices to at most {program.shards}.",
            )
        check_fit([ListedJob(spec, program)], self.cluster)
        if spec.narrowest > account.spec.narrowest:  # lowering is allowed even above the quota
            others = (each for each in self._active(spec.user) if each.id != spec.id)
            self._quotas.of(spec.user).check(spec.user, others, [ListedJob(spec, program)])
        await self._change(principal, LimitsChanged(JobId(job), min_devices, max_devices), "change its device limits")

    async def change_policy(self, principal: Principal, text: str) -> None:
        principal.check_is_admin()
        scheduler = self._model.scheduler
        dry_run_policy(scheduler, self._model.estimates, max(self._model.now(), scheduler.at), text)
        await self._model.loop.apply(PolicyChanged(text))

    async def _change(
        self, principal: Principal, fact: _JobChange, what: str, *, unless: Collection[Phase] = ()
    ) -> None:
        account = self._account(principal, fact.job)
        principal.check_may_submit()
        if not principal.may_change(account.spec.user):
            raise NotFound(f"there is no job {fact.job!r} that {principal.name!r} may change")
        phase = self._phase(account)
        if phase.is_over or phase in unless:
            raise Conflict(f"job {fact.job!r} is {phase}; it cannot {what}")
        await self._model.loop.apply(fact)

    def as_submitted(self, principal: Principal, jobs: Sequence[ListedJob]) -> list[ListedJob]:
        """Return the jobs with the names, owner and weights that `submit` would give them."""
        quota = self._quotas.of(principal.name)
        return [quota.scale_weight(job) for job in self._names.assign(jobs, principal.name)]

    def _active(self, user: str) -> Iterator[JobSpec]:
        return (job.spec for job in self._model.scheduler.jobs.values() if job.spec.user == user)

    def jobs(
        self,
        principal: Principal,
        *,
        phases: Collection[Phase] = (),
        user: str = "",
        contains: str = "",
        newest_first: bool = True,
        offset: int = 0,
        limit: int = 100,
    ) -> JobPage:
        found: Collection[JobAccount] = self._model.accounting.accounts.values()
        if not principal.may_see(user):  # an empty user means all users
            user = user or principal.name
            found = found if principal.may_see(user) else ()
        if user:
            found = [account for account in found if account.spec.user == user]
        if contains:
            found = [account for account in found if contains in account.spec.id]
        if phases:
            found = [account for account in found if self._phase(account) in phases]
        ordered = reversed(tuple(found)) if newest_first else iter(found)
        page = islice(ordered, offset, offset + limit)
        redact = self._redactor(principal)
        return JobPage(tuple(self._view(account, redact) for account in page), len(found), offset)

    def sweeps(self, principal: Principal) -> list[SweepView]:
        """Return the sweeps the caller may see, newest first."""
        found: dict[tuple[str, str], list[JobAccount]] = {}
        for account in self._model.accounting.accounts.values():
            if account.spec.array and principal.may_see(account.spec.user):
                found.setdefault((account.spec.array, account.spec.user), []).append(account)
        return [
            SweepView(
                *key,
                len(members),
                sum(account.phase.is_over for account in members),
                self._model.calendar.unix(members[0].submitted_at),
            )
            for key, members in reversed(found.items())
        ]

    def results(self, principal: Principal, sweep: str, metric: str = "", mode: str = "") -> ResultsView:
        """Return hyper-parameters and metrics of a sweep's jobs, best first."""
        members = [
            account
            for account in self._model.accounting.accounts.values()
            if sweep and account.spec.array == sweep and principal.may_see(account.spec.user)
        ]
        if not members:
            raise NotFound(f"there is no sweep {sweep!r}")
        return results_view(sweep, members, self._model.now(), metric, mode)

    def job(self, principal: Principal, job: str) -> JobView:
        return self._view(self._account(principal, job), self._redactor(principal))

    def story(self, principal: Principal, job: str) -> list[StoryEventView]:
        account = self._account(principal, job)
        program = self._model.programs.get(account.spec.id, Program())
        redact = self._redactor(principal)
        return present.job_story(account, self._model.calendar, self._model.names, redact, program.time_limit_s)

    def why(self, principal: Principal, job: str, *, verbose: bool = False) -> str:
        """Say why a job waits or holds its devices, and what would change it; `verbose` adds the policy's figures."""
        account = self._account(principal, job)
        found = self._model.scheduler.jobs.get(account.spec.id)
        if found is None:
            ending = _ENDINGS.get(self._phase(account), f"is {account.phase}")
            return f"{ending}: {account.error}" if account.error else ending
        fault = self.policy_fault(principal)
        fallback = f"; the fallback policy {self.policy} decides, because {fault}" if fault else ""
        words = self._model.scheduler.why(found, self._model.names, verbose=verbose)
        words = present.redact_names(words, self._hidden_jobs(principal))
        reported = present.last_message_off_devices(account)
        added = [each for each in dict.fromkeys([reported, account.warning]) if each and each not in words]
        return "; ".join([words, *added]) + fallback

    async def measurements(self, principal: Principal, job: str, *, most: int = _MAX_POINTS) -> list[MeasurementView]:
        """Return a job's loss, rate and metrics over time; the file is read in a thread, because it may be long."""
        path = self._folder(self._account(principal, job)) / "metrics.jsonl"
        return await asyncio.to_thread(present.read_curve, path, self._model.calendar, most)

    def log(self, principal: Principal, job: str, start: int = 0, *, most: int = _LOG_CHUNK) -> LogChunk:
        """Return a part of a job's log; a negative start counts from its end."""
        account = self._account(principal, job)
        return present.read_log(self._folder(account) / "log", start, most, is_over=account.phase.is_over)

    def _folder(self, account: JobAccount) -> Path:
        return JobFolder(self._model.state, account.spec.id).path

    @property
    def disk_full(self) -> str:
        """Why no jobs are accepted; empty where they are."""
        return self._model.loop.disk_full

    @property
    def began_at(self) -> float:
        """When the daemon of this state first started, as Unix time."""
        return self._model.calendar.unix(0.0)

    def now(self) -> float:
        """The daemon's time, as Unix time."""
        return self._model.calendar.unix(self._model.now())

    @property
    def cluster(self) -> Cluster:
        return self._model.scheduler.cluster

    def devices(self, principal: Principal) -> list[DeviceView]:
        return present.device_views(self._model.scheduler, self._model.names, principal.may_see)

    def nodes(self, principal: Principal) -> list[NodeView]:
        scheduler = self._model.scheduler
        return present.node_views(scheduler.snapshot().occupancy, scheduler.drained, self.devices(principal))

    async def drain(self, principal: Principal, node: str) -> None:
        """Release all jobs of a node and assign it no others until it is undrained."""
        principal.check_is_admin()
        await self._model.loop.apply(NodeDrained(self._node(node)))

    async def undrain(self, principal: Principal, node: str) -> None:
        """Use a drained node again."""
        principal.check_is_admin()
        number = self._node(node)
        if number not in self._model.scheduler.drained:
            raise Conflict(f"node {node!r} is not drained")
        await self._model.loop.apply(NodeUndrained(node))

    def _node(self, name: str) -> NodeId:
        nodes = self.cluster.nodes
        found = next((node.id for node in nodes if node.name == name), None)
        if found is None:
            raise NotFound(f"there is no node {name!r}; nodes: {', '.join(node.name for node in nodes)}")
        return found

    def timeline(self, principal: Principal, since: float, until: float, job: str = "") -> list[SpanView]:
        """Return the allocations between two Unix times, of all jobs or of one."""
        time_base, accounting = self._model.calendar, self._model.accounting
        return [
            SpanView(
                span.device,
                span.job if principal.may_see(accounting.owner(span.job)) else "",
                span.fraction,
                time_base.unix(span.since),
                None if span.until is None else time_base.unix(span.until),
            )
            for span in self._model.allocations.between(time_base.instant(since), time_base.instant(until))
            if not job or span.job == job
        ]

    def decisions(self, principal: Principal, *, before: int | None = None, limit: int = 100) -> list[DecisionView]:
        """Return the newest plans that changed an allocation, newest first."""
        owner, redact, views = self._model.accounting.owner, self._redactor(principal), []
        newest = reversed(self._model.events.decisions)
        for decision in islice((each for each in newest if before is None or each.number < before), limit):
            visible = {change.job for change in decision.planned.changes if principal.may_see(owner(change.job))}
            changes = present.change_views(decision.planned, self._model.names, visible)
            reason = redact(decision.planned.reason) if visible else ""
            views.append(DecisionView(decision.number, self._model.calendar.unix(decision.at), reason, changes))
        return views

    def queued_jobs(self) -> list[ListedJob]:
        """Return the jobs that wait or run, in order of submission."""
        programs, jobs = self._model.programs, self._model.scheduler.jobs.values()
        return [
            ListedJob(job.spec, programs[job.id])
            for job in jobs
            if job.phase is not Phase.PAUSED and job.id in programs
        ]

    def remaining_steps(self, jobs: Iterable[ListedJob]) -> dict[JobId, float]:
        """Return the remaining steps of each of these jobs, where known."""
        at, known = self._model.now(), self._model.scheduler.jobs
        found = {spec.id: self._model.estimates.remaining(known[spec.id], at).mean for spec, _ in jobs}
        return {job: steps for job, steps in found.items() if 0.0 < steps < inf}

    @property
    def policy(self) -> str:
        return self._model.policy()

    def policy_fault(self, principal: Principal) -> str:
        """Why the fallback policy replaced the configured one; empty when it did not."""
        fault = self._model.scheduler.policy_fault
        return self._redactor(principal)(fault) or ("the previous policy failed" if fault else "")

    def summary(self, principal: Principal) -> SummaryView:
        devices = self.devices(principal)
        accounts = self._model.accounting.accounts.values()
        phases = Counter(self._phase(account) for account in accounts if principal.may_see(account.spec.user))
        return SummaryView(
            self.now(),
            self._model.version,
            self.policy,
            {phase: phases.get(phase, 0) for phase in Phase},
            len(devices),
            sum(device.is_lost for device in devices),
            sum(device.held for device in devices),
            self.policy_fault(principal),
        )

    async def events(self, principal: Principal, after: int | None = None) -> AsyncIterator[Event]:
        """Yield visible events with a number above `after` and then new ones; only new ones when it is None."""
        async with aclosing(self.event_batches(principal, after)) as batches:
            async for batch in batches:
                for event in batch:
                    yield event

    async def event_batches(self, principal: Principal, after: int | None = None) -> AsyncGenerator[list[Event], None]:
        """Like `events`, but yield all available events at once."""
        sees_all = principal.may_see("")
        async with aclosing(self._model.events.feed.batches(after)) as batches:
            async for batch in batches:
                visible = [event for event in batch if not event.job or principal.may_see(event.owner)]
                if not sees_all:  # a decision's reason may name hidden jobs
                    visible = [replace(event, data={}) if event.kind == "decision" else event for event in visible]
                yield visible

    def counters(self) -> ServiceCounters:
        log, accounts = self._model.events, self._model.accounting.accounts
        running = [job.id for job in self._model.scheduler.jobs.values() if job.desired is not None]
        rate = sum(accounts[job].rate for job in running)
        return ServiceCounters(log.num_decisions, log.feed.count, log.feed.listeners, rate)

    def _account(self, principal: Principal, job: str) -> JobAccount:
        account = self._model.accounting.accounts.get(JobId(job))
        if account is None or not principal.may_see(account.spec.user):
            raise NotFound(f"there is no job {job!r}")
        return account

    def _phase(self, account: JobAccount) -> Phase:
        job = self._model.scheduler.jobs.get(account.spec.id)
        return account.phase if job is None else job.phase

    def _redactor(self, principal: Principal) -> Callable[[str], str]:
        if principal.may_see(""):
            return str
        return lambda reason: present.redact_reason(reason, self._hidden_jobs(principal))

    def _hidden_jobs(self, principal: Principal) -> Callable[[JobId], bool]:
        """Return a function that tells whether a word is the name of a job that the caller may not see."""
        has_seen, owner = self._model.scheduler.has_seen, self._model.accounting.owner
        return lambda job: has_seen(job) and not principal.may_see(owner(job))

    def _view(self, account: JobAccount, redact: Callable[[str], str]) -> JobView:
        at, name = self._model.now(), account.spec.id
        job = self._model.scheduler.jobs.get(name)
        return present.job_view(
            account,
            phase=self._phase(account),
            redact=redact,
            at=at,
            time_base=self._model.calendar,
            names=self._model.names,
            what=present.describe_program(self._model.programs.get(name)),
            total=self._model.total_steps(name),
            ends_in=None if job is None else present.seconds_left(job, at, self._model.estimates),
            quota_weight=self._quotas.of(account.spec.user).weight,
        )
