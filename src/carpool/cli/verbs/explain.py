"""``carpool explain`` and ``carpool why``: a job's history, and the reason for its present allocation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from carpool.cli.support.json_output import json_option
from carpool.core.errors import InputError, JournalError, cause
from carpool.core.estimates import DeclaredEstimator, Estimator
from carpool.core.job_history import HistoryLabels, job_history
from carpool.core.journal import Header, read_journal
from carpool.core.messages import JobCancelled, JobFailed, JobFinished, JobSubmitted, PolicyChanged, Record
from carpool.core.model import JobId
from carpool.core.scheduler import Scheduler

journal_option = click.option("--journal", default="", metavar="FILE", help="A journal, as written by simulate or run.")
run_option = click.option(
    "--run",
    default="",
    metavar="RUN",
    help="A run by name or folder. [default: the daemon, else the newest that has it]",
)


def check_named_once(journal: str, run: str) -> None:
    """Refuse to guess which of two is meant."""
    if journal and run:
        raise InputError("--journal and --run are both given", way_out="Name one of them.")


@contextmanager
def open_journal(path: Path) -> Iterator[tuple[Header, Iterator[Record]]]:
    """The header of a journal and its records, to be read while it is open."""
    try:
        with path.open(encoding="utf-8") as lines:
            yield read_journal(lines)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {cause(error)}", where=str(path), way_out="Name a journal file.") from None
    except JournalError as error:
        raise InputError(
            f"is not a journal that can be read: {error}", where=str(path), way_out="Name another journal file."
        ) from None


Story = list[tuple[float, str]]

_EXPLAIN_EPILOG = """\b
Examples:
  carpool explain 17 --journal run.jsonl
  carpool explain mlp --run jobs
"""


@click.command("explain", epilog=_EXPLAIN_EPILOG)
@click.argument("job")
@journal_option
@run_option
@json_option
def explain(job: str, journal: str, run: str, as_json: bool) -> None:
    """Tell what happened to JOB: what was believed of it, what was decided and why, and what was measured."""
    check_named_once(journal, run)
    told = (
        _story_from_journal(Path(journal), JobId(job))
        if journal
        else (None if run else _story_from_daemon(job)) or _story_from_run(job, run)
    )
    if not told:
        raise InputError(
            f"job {job!r} is not in it", where=journal or run, way_out="Check the id; ids are those of the trace."
        )
    if as_json:
        click.echo(json.dumps({"schema": 1, "job": job, "story": [{"at_s": at, "what": words} for at, words in told]}))
        return
    for at, words in told:
        click.echo(f"{at:>14.3f} s  {words}")


def _story_from_daemon(job: str) -> Story | None:
    """The daemon's story of a job, in seconds since its submission; None where it has no such job."""
    from carpool.cli.support.daemon_client import from_daemon

    told = from_daemon(job, lambda client, name: client.story(name))
    return [(moment["at"] - told[0]["at"], moment["words"]) for moment in told] if told else None


def _story_from_run(job: str, run: str) -> Story:
    """What the journal of a run says, between it what the executor told, and around it what was known of the job."""
    from carpool.backends.run_folder import BELIEVED, PROFILE
    from carpool.cli.support.run_lookup import run_with
    from carpool.service.store.run_journal import read_run_journal

    folder = run_with(job, run)
    header, records = read_run_journal(folder)
    told = list(job_history(records, JobId(job), header.cluster, HistoryLabels("steps", folder.settings().names)))
    told += [(float(row["at_s"]), str(row["what"])) for row in folder.rows(JobId(job), "story.jsonl")]
    told.sort(key=lambda line: line[0])
    if told:
        before = [(told[0][0], f"was known from before: {words}") for words in _known(folder.job(job) / BELIEVED)]
        after = [(told[-1][0], f"is known now: {words}") for words in _known(folder.job(job) / PROFILE)]
        told = [*before, *told, *after]
    return told


def _known(path: Path) -> Iterator[str]:
    """What a profile says, one line for each setting in which steps were made, and one for the costs."""
    from carpool.predictors.profiles.profile import read_profile

    if not path.is_file():
        return
    profile = read_profile(path)
    for each in profile.measurements:
        if each.step_s is not None:
            share = "" if each.share == 1.0 else f"{each.share:.0%} of "
            beside = f" beside {each.beside}" if each.beside else ""
            steps = f"batch {each.batch_size}, {each.steps} steps seen"
            yield f"{1.0 / each.step_s:.4g} steps/s on {share}{each.devices} {each.kind}{beside} ({steps})"
    costs = {"to start": profile.start_s, "to move": profile.resize_s, "to end": profile.end_s}
    if words := ", ".join(f"{seconds:.2f} s {what}" for what, seconds in costs.items() if seconds is not None):
        yield words


def _story_from_journal(path: Path, job: JobId) -> Story:
    with open_journal(path) as (header, records):
        return list(job_history(records, job, header.cluster))


_ENDS = (JobFinished, JobFailed, JobCancelled)
_ENDINGS = {JobFinished: "finished", JobFailed: "failed", JobCancelled: "was cancelled"}
_WHY_EPILOG = """\b
Examples:
  carpool why mlp
  carpool why mlp --run jobs --at 30
  carpool why 17 --journal run.jsonl --at 3600
"""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a job stood as it did at an instant, and what was decided last before it."""

    at: float
    why: str
    last_plan: str
    ending: str = ""  # what became of the job right after that


@click.command("why", epilog=_WHY_EPILOG)
@click.argument("job")
@journal_option
@run_option
@click.option("--at", type=float, default=None, metavar="S", help="The instant. [default: the last of the job's life]")
@json_option
def why(job: str, journal: str, run: str, at: float | None, as_json: bool) -> None:
    """Tell why JOB waits, or why it holds what it holds, as its policy sees it.

    The policy is asked with what was known then; nothing is decided. With a journal of a simulation, lengths and rates
    are taken as they were declared.
    """
    check_named_once(journal, run)
    path = Path(journal)
    if not journal and not run and at is None:
        from carpool.cli.support.daemon_client import from_daemon

        now = from_daemon(job, lambda client, name: client.why(name))
        if now is not None:
            click.echo(json.dumps({"schema": 1, "job": job, "why": now}) if as_json else f"now: {job} {now}")
            return
    if journal:
        with open_journal(path) as (header, records):
            answer = _ask_policy(journal, header, records, JobId(job), at)
    else:
        answer = _ask_policy_of_run(job, run, at)
    if as_json:
        row = {"at_s": answer.at, "why": answer.why, "last_plan": answer.last_plan, "ending": answer.ending}
        click.echo(json.dumps({"schema": 1, "job": job, **row}))
        return
    click.echo(f"at {answer.at:.3f} s: {job} {answer.why}")
    if answer.last_plan:
        click.echo(f"the last plan before that: {answer.last_plan}")
    if answer.ending:
        click.echo(answer.ending)


def _ask_policy_of_run(job: str, run: str, at: float | None) -> Reason:
    from carpool.backends.online_estimator import OnlineEstimator
    from carpool.cli.support.run_lookup import run_with
    from carpool.service.store.run_journal import read_run_journal

    folder = run_with(job, run)
    header, records = read_run_journal(folder)
    return _ask_policy(str(folder.path), header, records, JobId(job), at, OnlineEstimator(header.cluster))


def _ask_policy(
    where: str,
    header: Header,
    records: Iterable[Record],
    job: JobId,
    at: float | None,
    estimator: Estimator | None = None,
) -> Reason:
    """Fold the journal up to the instant and ask the policy."""
    from carpool.policies.registry import parse_policy

    known, ending = _records_until(records, job, at)
    changed = [fact.policy for record in known for fact in record.facts if isinstance(fact, PolicyChanged)]
    policy = parse_policy(changed[-1] if changed else header.policy)
    scheduler = Scheduler(header.cluster, policy, estimator=estimator or DeclaredEstimator())
    scheduler.recover(known)
    found = scheduler.jobs.get(job)
    if found is None:
        way_out = (
            "Check the id, or give a later --at." if at is not None else "Check the id; ids are those of the trace."
        )
        raise InputError(
            f"job {job!r} is not in it{'' if at is None else f' at {at:g} s'}", where=where, way_out=way_out
        )
    plans = [record.planned.reason for record in known if record.planned is not None and record.planned.reason]
    why = scheduler.why(found)
    return Reason(scheduler.at, why, plans[-1] if plans else "", ending)


def _records_until(records: Iterable[Record], job: JobId, at: float | None) -> tuple[list[Record], str]:
    """Records up to an instant, or up to the end of the job's life, and that end in words."""
    found: list[Record] = []
    submitted = False
    for record in records:
        if at is not None and record.at > at:
            break
        for fact in record.facts:
            if submitted and isinstance(fact, _ENDS) and fact.job == job:
                error = f": {fact.error}" if isinstance(fact, JobFailed) and fact.error else ""
                return found, f"at {record.at:.3f} s: {job} {_ENDINGS[type(fact)]}{error}"
            submitted = submitted or (isinstance(fact, JobSubmitted) and fact.spec.id == job)
        found.append(record)
    return found, ""
