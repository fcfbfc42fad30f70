"""``carpool explain`` and ``carpool why``: a job's history, and the reason for its current allocation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import click

from carpool.cli.support.daemon_client import from_daemon, server_option
from carpool.cli.support.options import json_option, print_json
from carpool.core.errors import InputError, JournalError, cause

if TYPE_CHECKING:
    from carpool.core.estimates import Estimator
    from carpool.core.journal import Header
    from carpool.core.messages import Record
    from carpool.core.model import JobId

journal_option = click.option(
    "--journal", default="", metavar="FILE", help="Read this journal, as written by `simulate` or `run`."
)
run_option = click.option(
    "--run",
    default="",
    metavar="RUN",
    help="Read this run, by name or folder. [default: ask the daemon, else the newest run that has the job]",
)

History = list[tuple[float, str]]  # seconds, event

_EXPLAIN_EPILOG = """\b
Examples:
  carpool explain mlp
  carpool explain mlp --run jobs
  carpool explain 17 --journal run.jsonl
"""


@click.command("explain", epilog=_EXPLAIN_EPILOG)
@click.argument("job")
@journal_option
@run_option
@server_option
@json_option
def explain(job: str, journal: str, run: str, server: str, as_json: bool) -> None:
    """Show the history of JOB: its submission, every decision with the reason, measurements and its end."""
    _check_one_source(journal, run, server)
    if journal:
        history = _history_from_journal(Path(journal), job)
    else:
        history = (None if run else _history_from_daemon(job, server)) or _history_from_run(job, run)
    if not history:
        raise _unknown_job(job, journal or run)
    if as_json:
        print_json({"job": job, "story": [{"at_s": at, "what": event} for at, event in history]})
        return
    for at, event in history:
        click.echo(f"{at:>14.3f} s  {event}")


def _check_one_source(journal: str, run: str, server: str) -> None:
    given = [name for name, value in (("--journal", journal), ("--run", run), ("--server", server)) if value]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} cannot be combined", way_out="Give one of them.")


def _unknown_job(job: str, where: str) -> InputError:
    return InputError(
        f"unknown job {job!r}", where=where, way_out="Check the name; jobs of a trace are named by their ids in it."
    )


def _not_yet_submitted(job: str, where: str, at: float, records: Iterable[Record]) -> InputError:
    """The error for a job that no record up to `at` names; it says when the job is submitted, if ever."""
    from carpool.core.messages import JobSubmitted

    for record in records:
        if any(isinstance(fact, JobSubmitted) and fact.spec.id == job for fact in record.facts):
            return InputError(
                f"job {job!r} is submitted at {record.at:.10g} s, after --at {at:g}",
                where=where,
                way_out="Give a later --at.",
            )
    return _unknown_job(job, where)


@contextmanager
def _open_journal(path: Path) -> Iterator[tuple[Header, Iterator[Record]]]:
    from carpool.core.journal import read_journal

    try:
        with path.open(encoding="utf-8") as lines:
            yield read_journal(lines)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {cause(error)}", where=str(path), way_out="Give a journal file.") from None
    except JournalError as error:
        raise InputError(
            f"not a readable journal: {error}", where=str(path), way_out="Give another journal file."
        ) from None


def _history_from_journal(path: Path, job: str) -> History:
    from carpool.core.job_history import job_history
    from carpool.core.model import JobId

    with _open_journal(path) as (header, records):
        return list(job_history(records, JobId(job), header.cluster))


def _history_from_daemon(job: str, server: str) -> History | None:
    """History in seconds since submission; None if no daemon knows the job."""
    events = from_daemon(job, lambda client, name: client.story(name), server)
    return [(event["at"] - events[0]["at"], event["words"]) for event in events] if events else None


def _history_from_run(job: str, run: str) -> History:
    """Merge the run's journal with the executor's reports, between the profile before and after the run."""
    from carpool.backends.run_folder import BELIEVED, PROFILE
    from carpool.cli.support.run_lookup import run_with
    from carpool.core.job_history import HistoryLabels, job_history
    from carpool.core.model import JobId
    from carpool.service.store.journal_file import read_run_journal

    folder = run_with(job, run)
    header, records = read_run_journal(folder)
    settings = folder.settings()
    limits = {spec.id: program.time_limit_s for spec, program in settings.jobs}
    labels = HistoryLabels("steps", settings.names, limits.get(JobId(job), 0.0))
    history = list(job_history(records, JobId(job), header.cluster, labels))
    for row in folder.rows(JobId(job), "story.jsonl"):
        at = row.get("at_s")
        if isinstance(at, int | float) and isfinite(at):
            history.append((float(at), str(row.get("what", ""))))
    history.sort(key=lambda line: line[0])
    if history:
        before = [(history[0][0], f"profile before: {line}") for line in _profile_lines(folder.job(job) / BELIEVED)]
        after = [(history[-1][0], f"profile after: {line}") for line in _profile_lines(folder.job(job) / PROFILE)]
        history = [*before, *history, *after]
    return history


def _profile_lines(path: Path) -> Iterator[str]:
    from carpool.predictors.profiles.profile import read_profile

    if not path.is_file():
        return
    profile = read_profile(path)
    for each in profile.measurements:
        if each.step_s is not None:
            share = "" if each.share == 1.0 else f"{each.share:.0%} of "
            beside = f" beside {each.beside}" if each.beside else ""
            steps = f"batch {each.batch_size}, {each.steps} steps measured"
            yield f"{1.0 / each.step_s:.4g} steps/s on {share}{each.devices} {each.kind}{beside} ({steps})"
    overheads = {"start": profile.start_s, "resize": profile.resize_s, "end": profile.end_s}
    if line := ", ".join(f"{name} {seconds:.2f} s" for name, seconds in overheads.items() if seconds is not None):
        yield line


_WHY_EPILOG = """\b
Examples:
  carpool why mlp
  carpool why mlp --verbose
  carpool why mlp --run jobs --at 30
  carpool why 17 --journal run.jsonl --at 3600
"""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a job had its allocation at an instant, and the reason of the last plan before it."""

    at: float
    why: str
    last_plan: str
    ending: str = ""  # how the job ended right after the instant
    details: str = ""  # figures of the policy


@click.command("why", epilog=_WHY_EPILOG)
@click.argument("job")
@journal_option
@run_option
@click.option(
    "--at",
    type=float,
    metavar="S",
    help="Seconds since the start. [default: now if a daemon knows the job, else just before its end]",
)
@click.option("-v", "--verbose", is_flag=True, help="Add the policy's figures, such as the prices of devices.")
@server_option
@json_option
def why(job: str, journal: str, run: str, at: float | None, verbose: bool, server: str, as_json: bool) -> None:
    """Show why JOB waits, or why it has its devices, since when, and what would change it.

    Without --journal, --run and --at the daemon answers for the current state. Otherwise the policy is evaluated on the
    recorded state at that instant. For a journal of `simulate`, job lengths and rates are those declared in the trace.
    """
    _check_one_source(journal, run, server)
    if not journal and not run and at is None:
        now = from_daemon(job, lambda client, name: client.why(name, verbose=verbose), server)
        if now is not None:
            if as_json:
                print_json({"job": job, "why": now})
            else:
                click.echo(f"now: {job} {now}")
            return
    reason = _reason_from_journal(Path(journal), job, at) if journal else _reason_from_run(job, run, at)
    _print_reason(job, reason, as_json, verbose=verbose)


def _print_reason(job: str, reason: Reason, as_json: bool, *, verbose: bool) -> None:
    if as_json:
        values = asdict(reason)
        print_json({"job": job, "at_s": values.pop("at"), **values})
        return
    click.echo(
        f"at {reason.at:.3f} s: {job} {reason.why}" + (f"; {reason.details}" if verbose and reason.details else "")
    )
    if verbose and reason.last_plan:
        click.echo(f"last plan before: {reason.last_plan}")
    if reason.ending:
        click.echo(reason.ending)


def _reason_from_journal(path: Path, job: str, at: float | None) -> Reason:
    from carpool.core.estimates import DeclaredEstimator

    with _open_journal(path) as (header, records):
        return _evaluate_policy(str(path), header, records, job, at, DeclaredEstimator(), {})


def _reason_from_run(job: str, run: str, at: float | None) -> Reason:
    from carpool.backends.online_estimator import OnlineEstimator
    from carpool.cli.support.run_lookup import run_with
    from carpool.service.store.journal_file import read_run_journal

    folder = run_with(job, run)
    header, records = read_run_journal(folder)
    return _evaluate_policy(
        str(folder.path), header, records, job, at, OnlineEstimator(header.cluster), folder.settings().names
    )


def _evaluate_policy(
    where: str,
    header: Header,
    records: Iterable[Record],
    name: str,
    at: float | None,
    estimator: Estimator,
    names: Mapping[int, str],
) -> Reason:
    """Recover the scheduler at the instant and ask the policy that was active then."""
    from carpool.core.messages import PolicyChanged
    from carpool.core.model import JobId
    from carpool.core.scheduler import Scheduler
    from carpool.policies.registry import parse_policy

    records = list(records)
    known, ending = _records_until(records, JobId(name), at)
    changes = [fact.policy for record in known for fact in record.facts if isinstance(fact, PolicyChanged)]
    policy = parse_policy(changes[-1] if changes else header.policy)
    scheduler = Scheduler(header.cluster, policy, estimator=estimator)
    scheduler.recover(known)
    job = scheduler.jobs.get(JobId(name))
    if job is None:
        raise _unknown_job(name, where) if at is None else _not_yet_submitted(name, where, at, records)
    plans = [record.planned.reason for record in known if record.planned is not None and record.planned.reason]
    details = policy.details(scheduler.snapshot(), job)
    return Reason(scheduler.at, scheduler.why(job, names), plans[-1] if plans else "", ending, details)


def _records_until(records: Iterable[Record], job: JobId, at: float | None) -> tuple[list[Record], str]:
    """Records up to the instant or to just before the job's end, and a sentence about that end."""
    from carpool.core.messages import JobCancelled, JobFailed, JobFinished, JobSubmitted

    endings = {JobFinished: "finished", JobFailed: "failed", JobCancelled: "was cancelled"}
    found: list[Record] = []
    submitted = False
    for record in records:
        if at is not None and record.at > at:
            break
        for fact in record.facts:
            if submitted and isinstance(fact, JobFinished | JobFailed | JobCancelled) and fact.job == job:
                error = f": {fact.error}" if isinstance(fact, JobFailed) and fact.error else ""
                return found, f"at {record.at:.3f} s: {job} {endings[type(fact)]}{error}"
            submitted = submitted or (isinstance(fact, JobSubmitted) and fact.spec.id == job)
        found.append(record)
    return found, ""
