"""View builders: scheduler state, job accounting, logs and metrics files to views."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from math import hypot, inf
from pathlib import Path

from carpool.backends.job_accounting import JobAccount
from carpool.core.constraints.priorities import priority_name
from carpool.core.estimates import Estimator
from carpool.core.messages import OutsidersSeen, Planned
from carpool.core.model import Allocation, DeviceId, Job, JobId, JobSpec, Phase
from carpool.core.occupancy import Occupancy
from carpool.core.scheduler import Scheduler
from carpool.jobs.program import Program
from carpool.service.queries.views import (
    ChangeView,
    DeviceShareView,
    DeviceView,
    ForeignProcessView,
    JobView,
    LogChunk,
    MeasurementView,
    NodeView,
    ResidentView,
    ResourceView,
    StoryEventView,
    TimeEstimate,
)

_WORD = re.compile(r"[\w.\-]+")  # what may be the name of a job
_EXIT_CODE = re.compile(r"ended with exit code (\d{1,3})\b")


@dataclass(frozen=True, slots=True)
class TimeBase:
    """The daemon's time, in seconds since its store was begun, as Unix time."""

    origin: float  # the Unix time of instant 0

    def unix(self, at: float) -> float:
        """An instant as Unix time."""
        return self.origin + at

    def instant(self, unix: float) -> float:
        """The inverse of `unix`."""
        return unix - self.origin


def holdings(allocation: Allocation | None, names: Mapping[int, str]) -> tuple[DeviceShareView, ...]:
    """What an allocation holds, device by device."""
    if allocation is None:
        return ()
    return tuple(
        DeviceShareView(device, names.get(device, str(device)), share.fraction, share.turn)
        for share in allocation.shares
        for device in share.devices
    )


def describe_program(program: Program | None) -> str:
    """A program in one line."""
    if program is None:
        return ""
    return program.entry or " ".join(program.command)


def redact_reason(reason: str, is_hidden: Callable[[JobId], bool]) -> str:
    """A policy's reason without the clauses that name a job which is somebody else's business.

    Policies join what they have to say of each job by semicolons, and name jobs as words.
    """
    return "; ".join(
        clause
        for clause in reason.split("; ")
        if not any(is_hidden(JobId(name)) for word in _WORD.findall(clause) for name in (word, word.rstrip(".-")))
    )


def job_view(
    account: JobAccount,
    *,
    phase: Phase,
    told: Callable[[str], str],
    at: float,
    calendar: TimeBase,
    names: Mapping[int, str],
    what: str = "",
    total: float | None = None,
    ends_in: TimeEstimate | None = None,
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
        priority=priority_name(spec.priority),
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


def expected_end(job: Job, at: float, estimates: Estimator) -> TimeEstimate | None:
    """Seconds a running job still needs where it is: remaining work over its rate; their relative spreads add up."""
    if job.observed is None or job.rate <= 0.0:
        return None
    left = estimates.remaining(job, at)
    if not 0.0 <= left.mean < inf:
        return None
    mean = left.mean / job.rate
    return TimeEstimate(mean, hypot(left.std / job.rate, 0.05 * mean))


def job_story(
    account: JobAccount, calendar: TimeBase, names: Mapping[int, str], told: Callable[[str], str]
) -> list[StoryEventView]:
    """A job's story from its account, oldest first; `told` is what somebody is told of a policy's reason."""
    story = [*_moments(account, names, told), *account.story, *_ending(account)]
    return [StoryEventView(calendar.unix(at), words) for at, words in sorted(story, key=lambda each: each[0])]


def _asked_for(spec: JobSpec) -> str:
    return f"{spec.devices} device{'' if spec.devices == 1 else 's'}"


def _moments(account: JobAccount, names: Mapping[int, str], told: Callable[[str], str]) -> Iterator[tuple[float, str]]:
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


def _ending(account: JobAccount) -> Iterator[tuple[float, str]]:
    if account.ended_at is not None:
        how = {Phase.FAILED: f"failed: {account.error}", Phase.CANCELLED: "was cancelled by its user"}
        yield account.ended_at, how.get(account.phase, str(account.phase))


def change_views(planned: Planned, names: Mapping[int, str], visible: set[JobId]) -> tuple[ChangeView, ...]:
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


def device_views(scheduler: Scheduler, names: Mapping[int, str], may_see: Callable[[str], bool]) -> list[DeviceView]:
    """Every device and who holds it; jobs of people who may not be seen have no name."""
    residents: dict[int, list[ResidentView]] = {}
    for job in scheduler.jobs.values():
        name = job.id if may_see(job.spec.user) else ""
        for share in () if job.desired is None else job.desired.shares:
            for device in share.devices:
                resident = ResidentView(name, share.fraction, share.turn, job.spec.memory_bytes)
                residents.setdefault(device, []).append(resident)
    lost = scheduler.snapshot().occupancy.lost
    return [
        DeviceView(
            device,
            names.get(device, str(device)),
            node.name,
            bank.kind,
            bank.memory_bytes,
            node.id in lost,
            tuple(residents.get(device, ())),
            _outsiders(scheduler.outsiders.get(DeviceId(device)), names),
        )
        for node in scheduler.cluster.nodes
        for bank in node.banks
        for device in bank.devices
    ]


def _outsiders(seen: OutsidersSeen | None, names: Mapping[int, str]) -> tuple[ForeignProcessView, ...]:
    if seen is None:
        return ()
    device = names.get(seen.device, str(seen.device))
    return tuple(ForeignProcessView(device, *each, seen.keeps_free) for each in seen.processes)


def node_views(occupancy: Occupancy, devices: Iterable[DeviceView]) -> list[NodeView]:
    """The machines that devices are on, in their order."""
    by_node: dict[str, list[DeviceView]] = {}
    for device in devices:
        by_node.setdefault(device.node, []).append(device)
    return [
        NodeView(
            node.name,
            node.id in occupancy.lost,
            len(node.devices),
            dict(Counter(device.kind for device in by_node[node.name])),
            sum(min(1.0, sum(each.fraction for each in device.residents)) for device in by_node[node.name]),
            ResourceView(*node.resources),
            ResourceView(*occupancy.host_usage.taken(node.id)),
            tuple(each for device in by_node[node.name] for each in device.outsiders),
        )
        for node in occupancy.cluster.nodes
    ]


def read_log(path: Path, start: int, most: int, *, is_over: bool) -> LogChunk:
    """A stretch of a log; a negative start counts from its end. Characters are not torn apart while more may come."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size + start) if start < 0 else min(start, size)
            file.seek(start)
            found = file.read(most)
    except FileNotFoundError:
        size, start, found = 0, 0, b""
    if not is_over or start + len(found) < size:
        found = whole_characters(found)
    end = start + len(found)
    return LogChunk(found.decode("utf-8", "replace"), start, end, is_over and end >= size)


def read_curve(path: Path, calendar: TimeBase, most: int) -> list[MeasurementView]:
    """What a training has reported, thinned to so many points; the last is always there.

    Only lines that are shown are parsed. One that a crash has torn is left out.
    """
    try:
        with path.open("rb") as file:
            count = sum(line.endswith(b"\n") for line in file)  # the last may still be being written
            every = max(1, -(-count // most))
            file.seek(0)
            chosen = islice(file, (count - 1) % every, count, every) if count else ()
            return [found for line in chosen if (found := _measurement(line, calendar)) is not None]
    except FileNotFoundError:
        return []


def whole_characters(text: bytes) -> bytes:
    """A stretch of UTF-8 without the beginning of a character that is not all there."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte >= 0xC0:  # the first byte of several
            return text[:-back] if back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else text
        if byte < 0x80:
            return text
    return text


def _measurement(line: bytes, calendar: TimeBase) -> MeasurementView | None:
    """One line of a curve; None where it is none."""
    try:
        row = json.loads(line)
        metrics = dict(row.get("metrics") or {})
        at, rate = calendar.unix(row["at_s"]), row.get("steps_per_s")
        return MeasurementView(at, row["step"], row.get("loss"), rate, metrics)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
