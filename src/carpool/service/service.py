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
from carpool.core.messages import Fact, JobCancelled, JobPaused, JobResumed, LimitsChanged, PolicyChanged, WeightChanged
from carpool.core.model import Job, JobId, JobSpec, Phase
from carpool.core.topology import Cluster
from carpool.jobs.feasibility import check_fit
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.runtime.executor.job_folder import JobFolder
from carpool.service.admission import IdempotencyKeys, JobNames, Quotas, fingerprint
from carpool.service.auth import Principal
from carpool.service.daemon.policy_guard import dry_run_policy
from carpool.service.daemon.read_model import ReadModel
from carpool.service.queries.event_log import Event
from carpool.service.queries.present import (
    change_views,
    describe_program,
    device_views,
    expected_end,
    job_story,
    job_view,
    node_views,
    read_curve,
    read_log,
    redact_reason,
)
from carpool.service.queries.views import (
    DecisionView,
    DeviceView,
    JobPage,
    JobView,
    LogChunk,
    MeasurementView,
    NodeView,
    ServiceCounters,
    SpanView,
    StoryEventView,
    SummaryView,
)

ArrayCommand = Literal["cancel", "pause", "resume"]

_WISHES: dict[ArrayCommand, tuple[Callable[[JobId], Fact], tuple[Phase, ...]]] = {
    "cancel": (JobCancelled, (Phase.BLOCKED, Phase.WAITING, Phase.RUNNING, Phase.PAUSED)),
    "pause": (JobPaused, (Phase.WAITING, Phase.RUNNING)),
    "resume": (JobResumed, (Phase.PAUSED,)),
}


def array_commands(members: Sequence[JobId], jobs: Mapping[JobId, Job], word: ArrayCommand) -> dict[JobId, Fact]:
    """The wish for each member that it can be granted for, the last first: cancelling one lets no other in."""
    make, phases = _WISHES[word]
    able = [name for name in members if name in jobs and jobs[name].phase in phases]
    return {name: make(name) for name in reversed(able)}


_Wish = JobCancelled | JobPaused | JobResumed | WeightChanged | LimitsChanged

_LONGEST_PIECE = 1 << 18  # bytes of a log that are given at once
_MOST_POINTS = 2000  # of a curve


class NotFound(CarpoolError):
    """There is no such job, or it is somebody else's business: nobody is told which."""


class Conflict(CarpoolError):
    """What was asked cannot be done to this job as it stands."""


class SchedulerService:
    """Answers people: each sees what their role lets them see, and touches what it lets them touch."""

    def __init__(
        self,
        premises: ReadModel,
        notes: Mapping[JobId, Mapping[str, Any]] | None = None,
        allowances: Quotas | None = None,
    ) -> None:
        self._in = premises
        self._allowances = allowances or Quotas()
        self._names = JobNames(premises.scheduler.has_seen)
        self._keys = IdempotencyKeys(notes or {})

    # -------------------------------------------------------------------------------------------------------- wishes
    async def submit(self, who: Principal, jobs: Sequence[ListedJob], key: str = "") -> tuple[JobId, ...]:
        """Accept jobs, all or none, and return when they can no longer be lost; the names they have from now on.

        A name that is taken gets a number. The same key with the same jobs is the same wish: it is granted once.
        """
        who.check_submits()
        check_fit(jobs, self._in.scheduler.cluster)
        body = fingerprint(jobs) if key else ""
        if key and (before := self._keys.granted(who.name, key, body)) is not None:
            await self._in.loop.flush()
            return before
        self._allowances.of(who.name).check(who.name, self._active(who.name), jobs)
        named = self.as_submitted(who, jobs)
        names = tuple(job.spec.id for job in named)
        if key:
            granting = self._in.loop.submit(named, {"user": who.name, "key": key, "body": body})
            await self._keys.keep(who.name, key, body, names, granting)
        else:
            await self._in.loop.submit(named)
        return names

    async def cancel(self, who: Principal, job: str) -> None:
        """Withdraw a job."""
        await self._wish(who, JobCancelled(JobId(job)), "be cancelled")

    async def pause(self, who: Principal, job: str) -> None:
        """Take a job off its devices until `resume`."""
        await self._wish(who, JobPaused(JobId(job)), "be paused", unless=(Phase.PAUSED, Phase.BLOCKED))

    async def resume(self, who: Principal, job: str) -> None:
        """Put a paused job back into the queue."""
        others = tuple(phase for phase in Phase if phase is not Phase.PAUSED)
        await self._wish(who, JobResumed(JobId(job)), "be resumed", unless=others)

    async def wish_array(self, who: Principal, array: str, word: ArrayCommand) -> tuple[JobId, ...]:
        """Cancel, pause or resume all jobs of a sweep that can be, together; their names, in order of submission."""
        who.check_submits()
        accounts = self._in.accounting.accounts.values()
        members = [each.spec.id for each in accounts if each.spec.array == array and who.may_touch(each.spec.user)]
        if not array or not members:
            raise NotFound(f"there is no array {array!r}")
        wishes = array_commands(members, self._in.scheduler.jobs, word)
        await self._in.loop.apply(*wishes.values())
        return tuple(reversed(wishes))

    async def reweigh(self, who: Principal, job: str, weight: float) -> None:
        """Let a job count more or less from now on; the factors of its owner and its priority stay."""
        spec = self._account(who, job).spec
        factor = self._allowances.of(spec.user).weight
        wish = WeightChanged(JobId(job), weight_with_priority(weight, spec.priority) * factor)
        await self._wish(who, wish, "be given another weight")

    async def limit(self, who: Principal, job: str, min_devices: int, max_devices: int) -> None:
        """Let a job hold another number of devices from now on; InputError where it cannot."""
        account = self._account(who, job)
        spec = replace(account.spec, devices=min_devices, min_devices=min_devices, max_devices=max_devices)
        program = self._in.programs.get(account.spec.id, Program())
        if program.command and min_devices != max_devices:
            raise InputError(
                f"job {job!r} runs a command, which cannot be resized", way_out="Give one number for both."
            )
        if program.exact and max_devices > program.shards:
            raise InputError(f"job {job!r} has {program.shards} shards", way_out="Allow no more devices than that.")
        check_fit([ListedJob(spec, program)], self.cluster)
        if spec.narrowest > account.spec.narrowest:  # whoever has too much may always ask for less
            others = (each for each in self._active(spec.user) if each.id != spec.id)
            self._allowances.of(spec.user).check(spec.user, others, [ListedJob(spec, program)])
        await self._wish(who, LimitsChanged(JobId(job), min_devices, max_devices), "be given another range")

    async def change_policy(self, who: Principal, text: str) -> None:
        """Let another policy decide from now on; InputError where there is none, or it fails at its first decision."""
        who.check_governs()
        scheduler = self._in.scheduler
        dry_run_policy(scheduler, self._in.estimates, max(self._in.now(), scheduler.at), text)
        await self._in.loop.apply(PolicyChanged(text))

    async def _wish(self, who: Principal, fact: _Wish, what: str, *, unless: Collection[Phase] = ()) -> None:
        account = self._account(who, fact.job)
        who.check_submits()
        if not who.may_touch(account.spec.user):
            raise NotFound(f"there is no job {fact.job!r} that {who.name!r} may change")
        phase = self._phase(account)
        if phase.is_over or phase in unless:
            raise Conflict(f"job {fact.job!r} is {phase}, so it cannot {what}")
        await self._in.loop.apply(fact)

    def as_submitted(self, who: Principal, jobs: Sequence[ListedJob]) -> list[ListedJob]:
        """Jobs as they would be accepted: with names that are free, their owner, and what they count for."""
        allowance = self._allowances.of(who.name)
        return [allowance.weigh(job) for job in self._names.rename(jobs, who.name)]

    def _active(self, user: str) -> Iterator[JobSpec]:
        """What somebody has that is not over."""
        return (job.spec for job in self._in.scheduler.jobs.values() if job.spec.user == user)

    # ---------------------------------------------------------------------------------------------------------- jobs
    def jobs(
        self,
        who: Principal,
        *,
        phases: Collection[Phase] = (),
        user: str = "",
        contains: str = "",
        newest_first: bool = True,
        offset: int = 0,
        limit: int = 100,
    ) -> JobPage:
        """Jobs that match, in order of submission."""
        accounts = self._in.accounting.accounts
        found: Collection[JobAccount] = accounts.values()
        if not who.may_see(user):  # without a name: everybody's
            user = user or who.name
            found = found if who.may_see(user) else ()
        if user:
            found = [account for account in found if account.spec.user == user]
        if contains:
            found = [account for account in found if contains in account.spec.id]
        if phases:
            found = [account for account in found if self._phase(account) in phases]
        ordered = reversed(tuple(found)) if newest_first else iter(found)
        page = islice(ordered, offset, offset + limit)
        told = self._told(who)
        return JobPage(tuple(self._shown(account, told) for account in page), len(found), offset)

    def job(self, who: Principal, job: str) -> JobView:
        """One job."""
        return self._shown(self._account(who, job), self._told(who))

    def story(self, who: Principal, job: str) -> list[StoryEventView]:
        """What happened to a job, in words."""
        return job_story(self._account(who, job), self._in.calendar, self._in.names, self._told(who))

    def why(self, who: Principal, job: str) -> str:
        """Why a job waits, or holds what it holds, as the policy sees it."""
        account = self._account(who, job)
        found = self._in.scheduler.jobs.get(account.spec.id)
        if found is None:
            return f"is {account.phase}" + (f": {account.error}" if account.error else "")
        fault = self.policy_fault(who)
        since = f"; {self.policy} decides since {fault}" if fault else ""
        return self._in.scheduler.why(found) + since

    async def measurements(self, who: Principal, job: str, *, most: int = _MOST_POINTS) -> list[MeasurementView]:
        """A job's curve: what it has reported, thinned to so many points; read aside, since it may be long."""
        return await asyncio.to_thread(read_curve, self.folder(who, job) / "metrics.jsonl", self._in.calendar, most)

    def log(self, who: Principal, job: str, start: int = 0, *, most: int = _LONGEST_PIECE) -> LogChunk:
        """A stretch of a job's log; a negative start counts from its end."""
        account = self._account(who, job)
        return read_log(self.folder(who, job) / "log", start, most, is_over=account.phase.is_over)

    def folder(self, who: Principal, job: str) -> Path:
        """Where a job's checkpoints and figures are."""
        return JobFolder(self._in.state, self._account(who, job).spec.id).path

    # ------------------------------------------------------------------------------------------------------- the rest
    def now(self) -> float:
        """The daemon's time, as Unix time."""
        return self._in.calendar.unix(self._in.now())

    def devices(self, who: Principal) -> list[DeviceView]:
        """Every device and who holds it."""
        return device_views(self._in.scheduler, self._in.names, who.may_see)

    def nodes(self, who: Principal) -> list[NodeView]:
        """Every machine, and what is left of it."""
        return node_views(self._in.scheduler.snapshot().occupancy, self.devices(who))

    def timeline(self, who: Principal, since: float, until: float, job: str = "") -> list[SpanView]:
        """Who held which device between two instants, in Unix time; with a job, only what that one held."""
        calendar, ledger = self._in.calendar, self._in.accounting
        return [
            SpanView(
                span.device,
                span.job if who.may_see(ledger.owner(span.job)) else "",
                span.fraction,
                calendar.unix(span.since),
                None if span.until is None else calendar.unix(span.until),
            )
            for span in self._in.allocations.between(calendar.instant(since), calendar.instant(until))
            if not job or span.job == job
        ]

    def decisions(self, who: Principal, *, before: int | None = None, limit: int = 100) -> list[DecisionView]:
        """The newest plans that changed something, newest first."""
        owner, told, found = self._in.accounting.owner, self._told(who), []
        decided = reversed(self._in.events.decisions)
        for decision in islice((each for each in decided if before is None or each.number < before), limit):
            visible = {change.job for change in decision.planned.changes if who.may_see(owner(change.job))}
            lines = change_views(decision.planned, self._in.names, visible)
            reason = told(decision.planned.reason) if visible else ""
            found.append(DecisionView(decision.number, self._in.calendar.unix(decision.at), reason, lines))
        return found

    @property
    def cluster(self) -> Cluster:
        """All there is."""
        return self._in.scheduler.cluster

    def standing(self) -> list[ListedJob]:
        """Jobs that wait or run, in order of submission."""
        programs, jobs = self._in.programs, self._in.scheduler.jobs.values()
        return [
            ListedJob(job.spec, programs[job.id])
            for job in jobs
            if job.phase is not Phase.PAUSED and job.id in programs
        ]

    def left(self, jobs: Iterable[ListedJob]) -> dict[JobId, float]:
        """The steps that are left of each of these jobs, where that is known."""
        at, there = self._in.now(), self._in.scheduler.jobs
        found = {spec.id: self._in.estimates.remaining(there[spec.id], at).mean for spec, _ in jobs}
        return {job: steps for job, steps in found.items() if 0.0 < steps < inf}

    @property
    def policy(self) -> str:
        """The policy that decides, as it was written."""
        return self._in.policy()

    def policy_fault(self, who: Principal) -> str:
        """What the policy before did wrong, where that is why this one decides; else empty."""
        fault = self._in.scheduler.policy_fault
        return self._told(who)(fault) or ("the policy before failed" if fault else "")

    def summary(self, who: Principal) -> SummaryView:
        """The whole in a few figures."""
        devices = self.devices(who)
        accounts = self._in.accounting.accounts.values()
        phases = Counter(self._phase(account) for account in accounts if who.may_see(account.spec.user))
        return SummaryView(
            self.now(),
            self._in.version,
            self._in.policy(),
            {phase: phases.get(phase, 0) for phase in Phase},
            len(devices),
            sum(device.is_lost for device in devices),
            sum(min(1.0, sum(each.fraction for each in device.residents)) for device in devices),
            self.policy_fault(who),
        )

    async def events(self, who: Principal, after: int | None = None) -> AsyncIterator[Event]:
        """What happens, as far as it is theirs to see, behind an event's number or from now on."""
        async with aclosing(self.news(who, after)) as batches:
            async for batch in batches:
                for event in batch:
                    yield event

    async def news(self, who: Principal, after: int | None = None) -> AsyncGenerator[list[Event], None]:
        """The same, as many events at once as there are."""
        sees_all = who.may_see("")
        async with aclosing(self._in.events.feed.batches(after)) as batches:
            async for batch in batches:
                seen = [event for event in batch if not event.job or who.may_see(event.owner)]
                yield (
                    seen
                    if sees_all
                    else [replace(event, data={}) if event.kind == "decision" else event for event in seen]
                )

    def vitals(self) -> ServiceCounters:
        """What only counts, and is nobody's secret."""
        jobs = self._in.scheduler.jobs.values()
        return ServiceCounters(
            self._in.events.count,
            self._in.events.feed.count,
            self._in.events.feed.listeners,
            sum(self._in.accounting.accounts[job.id].rate for job in jobs if job.desired is not None),
        )

    # --------------------------------------------------------------------------------------------------------- inside
    def _account(self, who: Principal, job: str) -> JobAccount:
        account = self._in.accounting.accounts.get(JobId(job))
        if account is None or not who.may_see(account.spec.user):
            raise NotFound(f"there is no job {job!r}")
        return account

    def _phase(self, account: JobAccount) -> Phase:
        """Where a job stands; the scheduler knows best of those that are not over."""
        job = self._in.scheduler.jobs.get(account.spec.id)
        return account.phase if job is None else job.phase

    def _told(self, who: Principal) -> Callable[[str], str]:
        """What somebody is told of a policy's reasons: nothing about jobs that are not theirs to see."""
        if who.may_see(""):
            return str
        has_seen, owner = self._in.scheduler.has_seen, self._in.accounting.owner

        def is_hidden(job: JobId) -> bool:
            return has_seen(job) and not who.may_see(owner(job))

        return lambda reason: redact_reason(reason, is_hidden)

    def _shown(self, account: JobAccount, told: Callable[[str], str]) -> JobView:
        at, name = self._in.now(), account.spec.id
        job = self._in.scheduler.jobs.get(name)
        return job_view(
            account,
            phase=self._phase(account),
            told=told,
            at=at,
            calendar=self._in.calendar,
            names=self._in.names,
            what=describe_program(self._in.programs.get(name)),
            total=self._in.total_steps(name),
            ends_in=None if job is None else expected_end(job, at, self._in.estimates),
        )
