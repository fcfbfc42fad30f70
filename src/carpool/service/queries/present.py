"""View builders: turn scheduler state, job accounting, log and metrics files into views."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from math import hypot, inf
from pathlib import Path

from carpool.backends.job_accounting import JobAccount
from carpool.core.constraints.priorities import priority_name, weight_with_priority
from carpool.core.estimates import Estimator
from carpool.core.job_history import describe_request
from carpool.core.messages import OutsidersSeen, Planned
from carpool.core.model import Allocation, DeviceId, Job, JobId, Phase
from carpool.core.occupancy import Occupancy
from carpool.core.scheduler import Scheduler
from carpool.core.typed_fields import Amount, Measured, decode_value
from carpool.jobs.program import Program
from carpool.jobs.untrusted_file import next_data, open_untrusted
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

_MAX_CURVE_BYTES = 1 << 26  # of a file of measurements that are read, its last ones
_WORD = re.compile(r"[\w.\-]+")  # also matches job names
_EXIT_CODE = re.compile(r"ended with exit code (\d{1,3})\b")


@dataclass(frozen=True, slots=True)
class TimeBase:
    """Converts the daemon's clock, in seconds since its store was created, to Unix time and back."""

    origin: float  # Unix time of the daemon's second 0

    def unix(self, at: float) -> float:
        return self.origin + at

    def instant(self, unix: float) -> float:
        return unix - self.origin


def holdings(allocation: Allocation | None, names: Mapping[int, str]) -> tuple[DeviceShareView, ...]:
    """List the device shares of an allocation."""
    if allocation is None:
        return ()
    return tuple(
        DeviceShareView(device, names.get(device, str(device)), share.fraction, share.turn)
        for share in allocation.shares
        for device in share.devices
    )


def describe_program(program: Program | None) -> str:
    """Return the entry of a program, or its command line."""
    return "" if program is None else program.entry or " ".join(program.command)


def redact_reason(reason: str, is_hidden: Callable[[JobId], bool]) -> str:
    """Remove the clauses of a policy's reason that name a hidden job.

    Policies separate clauses by semicolons and write job names as words.
    """
    return "; ".join(
        clause
        for clause in reason.split("; ")
        if not any(is_hidden(JobId(name)) for word in _WORD.findall(clause) for name in (word, word.rstrip(".-")))
    )


def redact_names(reason: str, is_hidden: Callable[[JobId], bool]) -> str:
    """Replace the names of hidden jobs in a reason; the rest, such as when the caller's job starts, stays."""

    def shown(word: re.Match[str]) -> str:
        name = word[0].rstrip(".-")
        hidden = next((each for each in (word[0], name) if is_hidden(JobId(each))), None)
        return word[0] if hidden is None else "another user's job" + word[0].removeprefix(hidden)

    return _WORD.sub(shown, reason)


def last_message_off_devices(account: JobAccount) -> str:
    """The executor's last report on a job since it lost its devices, for example that it is parked; else empty."""
    lost_at = account.decisions[-1].at if account.decisions and account.held is None else None
    if lost_at is None or account.phase.is_over or not account.story or account.story[-1][0] < lost_at:
        return ""
    return account.story[-1][1]


def job_view(
    account: JobAccount,
    *,
    phase: Phase,
    redact: Callable[[str], str],
    at: float,
    time_base: TimeBase,
    names: Mapping[int, str],
    what: str = "",
    total: float | None = None,
    ends_in: TimeEstimate | None = None,
    quota_weight: float = 1.0,
) -> JobView:
    """Build the view of a job at a time; `redact` filters the policy's reason for the caller.

    Its weight is the one that was given: without the factors of the job's priority and its user's quota.
    """
    spec, outcome = account.spec, account.outcome
    until = at if account.ended_at is None else account.ended_at
    held_s = account.held_s + (at - account.held_since if account.held is not None else 0.0)
    first = next((given.at for given in account.decisions if given.allocation is not None), None)
    return JobView(
        id=spec.id,
        user=spec.user,
        phase=phase,
        what=what,
        weight=spec.weight / weight_with_priority(quota_weight, spec.priority),
        devices=spec.devices,
        min_devices=spec.narrowest,
        max_devices=spec.widest,
        exact=spec.exact,
        after=spec.after,
        submitted_at=time_base.unix(account.submitted_at),
        started_at=None if first is None else time_base.unix(first),
        ended_at=None if account.ended_at is None else time_base.unix(account.ended_at),
        waited_s=max(0.0, until - account.submitted_at - held_s),
        holds=holdings(account.held, names),
        batch_size=account.held.batch_size if account.held is not None else spec.batch_size,
        steps=account.steps,
        total_steps=total,
        steps_per_s=account.rate,
        loss=account.loss if outcome is None else outcome.loss,
        metrics=account.last_metrics,
        ends_in=ends_in,
        reason=redact(account.decisions[-1].reason) if account.decisions else "",
        error=account.error,
        exit_code=exit_code(phase, account.error),
        digest=None if outcome is None else outcome.digest,
        cpus=spec.cpus,
        ram_bytes=spec.ram_bytes,
        disk_bytes=spec.disk_bytes,
        priority=priority_name(spec.priority),
        array=spec.array,
        at_most=spec.at_most,
        deadline=time_base.unix(account.submitted_at + spec.deadline_s) if spec.deadline_s else None,
        is_late=0.0 < spec.deadline_s < until - account.submitted_at,
        params=dict(spec.params),
        warning=account.warning,
        restarts=account.restarts,
    )


def exit_code(phase: Phase, error: str) -> int | None:
    """Return the exit code of an ended job; that of a command is parsed from the error the executor reported."""
    if not phase.is_over:
        return None
    if phase is Phase.CANCELLED and error:  # stopped by its sweep's halving rule
        return 0
    code = _EXIT_CODE.search(error)
    return int(code[1]) if code else 0 if phase is Phase.FINISHED else 1


def seconds_left(job: Job, at: float, estimates: Estimator) -> TimeEstimate | None:
    """Estimate the seconds a running job needs on its current devices: remaining work divided by its rate.

    None for a job whose length is unknown.
    """
    if job.observed is None or job.rate <= 0.0 or not estimates.knows_length(job):
        return None
    remaining = estimates.remaining(job, at)
    if not 0.0 <= remaining.mean < inf:
        return None
    mean = remaining.mean / job.rate
    return TimeEstimate(mean, hypot(remaining.std / job.rate, 0.05 * mean))


def job_story(
    account: JobAccount,
    time_base: TimeBase,
    names: Mapping[int, str],
    redact: Callable[[str], str],
    time_limit_s: float = 0.0,
) -> list[StoryEventView]:
    """Build a job's history, oldest first; `redact` filters the policy's reasons for the caller."""
    submitted = account.submitted_at, f"was submitted: requests {redact(describe_request(account.spec, time_limit_s))}"
    events = [submitted, *_decisions(account, names, redact), *account.story, *_ending(account)]
    return [StoryEventView(time_base.unix(at), words) for at, words in sorted(events, key=lambda event: event[0])]


def _decisions(
    account: JobAccount, names: Mapping[int, str], redact: Callable[[str], str]
) -> Iterator[tuple[float, str]]:
    for decision in account.decisions:
        if decision.allocation is None:
            words = "is preempted"
        else:
            devices = (
                share.name + ("" if share.fraction == 1.0 else f" at {share.fraction:.0%}")
                for share in holdings(decision.allocation, names)
            )
            words = f"gets {', '.join(devices)}"
        reason = redact(decision.reason)
        yield decision.at, f"{words}: {reason}" if reason else words


def _ending(account: JobAccount) -> Iterator[tuple[float, str]]:
    if account.ended_at is not None:
        cancelled = account.error or "was cancelled by its user"
        words = {Phase.FAILED: f"failed: {account.error}", Phase.CANCELLED: cancelled}
        yield account.ended_at, words.get(account.phase, str(account.phase))


def change_views(planned: Planned, names: Mapping[int, str], visible: set[JobId]) -> tuple[ChangeView, ...]:
    """Build the changes of a plan; jobs that are not `visible` have no name."""
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
    """Build the view of every device; jobs whose owner the caller may not see have no name."""
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


def node_views(occupancy: Occupancy, drained: Collection[int], devices: Iterable[DeviceView]) -> list[NodeView]:
    """Build the view of every node."""
    by_node: dict[str, list[DeviceView]] = {}
    for device in devices:
        by_node.setdefault(device.node, []).append(device)
    return [
        NodeView(
            node.name,
            node.id in occupancy.lost and node.id not in drained,
            node.id in drained,
            len(node.devices),
            dict(Counter(device.kind for device in by_node[node.name])),
            sum(device.held for device in by_node[node.name]),
            ResourceView(*node.resources),
            ResourceView(*occupancy.host_usage.taken(node.id)),
            tuple(each for device in by_node[node.name] for each in device.outsiders),
        )
        for node in occupancy.cluster.nodes
    ]


def read_log(path: Path, start: int, most: int, *, is_over: bool) -> LogChunk:
    """Read up to `most` bytes of a log; a negative start counts from its end. Discarded and empty parts are skipped.

    A character that is cut off at the end is left for the next call, unless the log is complete.
    """
    try:
        with os.fdopen(open_untrusted(path), "rb") as file:
            size = file.seek(0, 2)
            start = max(0, size + start) if start < 0 else min(start, size)
            start, stop = next_data(file.fileno(), start)
            file.seek(start)
            text = file.read(min(most, stop - start))
    except FileNotFoundError:
        size, start, stop, text = 0, 0, 0, b""
    except OSError as error:  # the job has replaced the file by something else
        whole = f"the log cannot be read: {error.strerror}\n".encode()
        size, start = len(whole), max(0, min(start, len(whole)))
        text, stop = whole[start:], len(whole)
    # before a hole, the rest of a character is missing
    is_cut = start + len(text) < stop or (stop == size and not is_over)
    if is_cut:
        text = _without_cut_character(text)
    end = start + len(text)
    return LogChunk(text.decode("utf-8", "replace"), start, end, is_over and end >= size)


def _without_cut_character(text: bytes) -> bytes:
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte >= 0xC0:  # the first byte of a multi-byte character
            return text[:-back] if back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else text
        if byte < 0x80:
            return text
    return text


def read_curve(path: Path, time_base: TimeBase, most: int) -> list[MeasurementView]:
    """Read a training's reports, thinned to `most` points that include the last; damaged lines are skipped."""
    try:
        with os.fdopen(open_untrusted(path), "rb") as file:
            first = max(0, file.seek(0, 2) - _MAX_CURVE_BYTES)
            file.seek(first)
            count = sum(line.endswith(b"\n") for line in file)  # the last line may be incomplete
            every = max(1, -(-count // most))
            file.seek(first)
            chosen = islice(file, (count - 1) % every, count, every) if count else ()
            return [point for line in chosen if (point := _measurement(line, time_base)) is not None]
    except OSError:
        return []


def _measurement(line: bytes, time_base: TimeBase) -> MeasurementView | None:
    try:
        row = json.loads(line)
        metrics = decode_value(Mapping[str, Measured], row.get("metrics") or {}, "row.metrics")
        at, step = (decode_value(Amount, row[name], f"row.{name}") for name in ("at_s", "step"))
        loss, rate = (decode_value(Measured | None, row.get(name), f"row.{name}") for name in ("loss", "steps_per_s"))
        return MeasurementView(time_base.unix(at), step, loss, rate, metrics)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
