"""From the daemon's books to what people are shown: pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import hypot, inf

from carpool.backends.ledger import Account
from carpool.core.estimates import Estimator
from carpool.core.messages import Planned
from carpool.core.model import Allocation, Job, JobId, JobSpec, Phase
from carpool.core.ranking import priority_word
from carpool.runtime.program import Program
from carpool.service.views import ChangeView, Expected, Holding, JobView, MomentView

_WORD = re.compile(r"[\w.\-]+")  # what may be the name of a job
_EXIT_CODE = re.compile(r"ended with exit code (\d{1,3})\b")


@dataclass(frozen=True, slots=True)
class Calendar:
    """The daemon's time, in seconds since its store was begun, as Unix time."""

    origin: float  # the Unix time of instant 0

    def unix(self, at: float) -> float:
        """An instant as Unix time."""
        return self.origin + at

    def instant(self, unix: float) -> float:
        """The inverse of `unix`."""
        return unix - self.origin


def holdings(allocation: Allocation | None, names: Mapping[int, str]) -> tuple[Holding, ...]:
    """What an allocation holds, device by device."""
    if allocation is None:
        return ()
    return tuple(
        Holding(device, names.get(device, str(device)), share.fraction, share.turn)
        for share in allocation.shares
        for device in share.devices
    )


def what_runs(program: Program | None) -> str:
    """A program in one line."""
    if program is None:
        return ""
    return program.entry or " ".join(program.command)


def discreet(reason: str, is_hidden: Callable[[JobId], bool]) -> str:
    """A policy's reason without the clauses that name a job which is somebody else's business.

    Policies join what they have to say of each job by semicolons, and name jobs as words.
    """
    return "; ".join(
        clause
        for clause in reason.split("; ")
        if not any(is_hidden(JobId(name)) for word in _WORD.findall(clause) for name in (word, word.rstrip(".-")))
    )


def show_job(
    account: Account,
    *,
    phase: Phase,
    told: Callable[[str], str],
    at: float,
    calendar: Calendar,
    names: Mapping[int, str],
    what: str = "",
    total: float | None = None,
    ends_in: Expected | None = None,
) -> JobView:
    """An account as somebody sees it at an instant; `told` is what they are told of a policy's reason."""
    spec, outcome = account.spec, account.outcome
    until = at if account.ended_at is None else account.ended_at
    held_s = account.held_s + (at - account.held_since if account.held is not None else 0.0)
    first = next((given.at for given in account.decisions if given.allocation is not None), None)
    return JobView(
        id=spec.id,
        user=spec.user,
        phase=phase,
        what=what,
        weight=spec.weight,
        devices=spec.devices,
        min_devices=spec.narrowest,
        max_devices=spec.widest,
        exact=spec.exact,
        after=spec.after,
        submitted_at=calendar.unix(account.submitted_at),
        started_at=None if first is None else calendar.unix(first),
        ended_at=None if account.ended_at is None else calendar.unix(account.ended_at),
        waited_s=max(0.0, until - account.submitted_at - held_s),
        holds=holdings(account.held, names),
        batch_size=account.held.batch_size if account.held is not None else spec.batch_size,
        steps=account.done + account.rate * max(0.0, at - account.as_of),
        total_steps=total,
        steps_per_s=account.rate,
        loss=account.loss if outcome is None else outcome.loss,
        metrics={} if outcome is None else outcome.metrics,
        ends_in=ends_in,
        reason=told(account.decisions[-1].reason) if account.decisions else "",
        error=account.error,
        exit_code=exit_code(phase, account.error),
        digest=None if outcome is None else outcome.digest,
        cpus=spec.cpus,
        ram_bytes=spec.ram_bytes,
        disk_bytes=spec.disk_bytes,
        priority=priority_word(spec.priority),
        array=spec.array,
        at_most=spec.at_most,
        deadline=calendar.unix(account.submitted_at + spec.deadline_s) if spec.deadline_s else None,
        is_late=0.0 < spec.deadline_s < until - account.submitted_at,
    )


def exit_code(phase: Phase, error: str) -> int | None:
    """What a shell would be told of a job that is over; whoever runs a command says its code in words."""
    if not phase.is_over:
        return None
    said = _EXIT_CODE.search(error)
    return int(said[1]) if said else 0 if phase is Phase.FINISHED else 1


def expected_end(job: Job, at: float, estimates: Estimator) -> Expected | None:
    """Seconds a running job still needs where it is: remaining work over its rate; their relative spreads add up."""
    if job.observed is None or job.rate <= 0.0:
        return None
    left = estimates.remaining(job, at)
    if not 0.0 <= left.mean < inf:
        return None
    mean = left.mean / job.rate
    return Expected(mean, hypot(left.std / job.rate, 0.05 * mean))


def tell(
    account: Account, calendar: Calendar, names: Mapping[int, str], told: Callable[[str], str]
) -> list[MomentView]:
    """A job's story from its account, oldest first; `told` is what somebody is told of a policy's reason."""
    story = [*_moments(account, names, told), *account.story, *_ending(account)]
    return [MomentView(calendar.unix(at), words) for at, words in sorted(story, key=lambda each: each[0])]


def _asked_for(spec: JobSpec) -> str:
    return f"{spec.devices} device{'' if spec.devices == 1 else 's'}"


def _moments(account: Account, names: Mapping[int, str], told: Callable[[str], str]) -> Iterator[tuple[float, str]]:
    yield account.submitted_at, f"was submitted: asks for {_asked_for(account.spec)}"
    for given in account.decisions:
        if given.allocation is None:
            words = "is taken off its devices"
        else:
            got = ", ".join(
                each.name + ("" if each.fraction == 1.0 else f" at {each.fraction:.0%}")
                for each in holdings(given.allocation, names)
            )
            words = f"gets {got}"
        reason = told(given.reason)
        yield given.at, f"{words}: {reason}" if reason else words


def _ending(account: Account) -> Iterator[tuple[float, str]]:
    if account.ended_at is not None:
        how = {Phase.FAILED: f"failed: {account.error}", Phase.CANCELLED: "was cancelled by its user"}
        yield account.ended_at, how.get(account.phase, str(account.phase))


def show_changes(planned: Planned, names: Mapping[int, str], visible: set[JobId]) -> tuple[ChangeView, ...]:
    """The lines of a plan; jobs that are somebody else's business have no name."""
    return tuple(
        ChangeView(
            change.job if change.job in visible else "",
            holdings(change.allocation, names),
            0 if change.allocation is None else change.allocation.batch_size,
            0.0 if change.job in planned.guessed else believed,
        )
        for change, believed in zip(planned.changes, planned.believed, strict=True)
    )
