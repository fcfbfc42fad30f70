"""``carpool why``: why a job waits, or holds what it holds, at the end of a journal or at any instant of it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import click

from carpool.cli.flags import json_option
from carpool.cli.journals import check_named_once, journal_option, opened, run_option
from carpool.core.errors import InputError
from carpool.core.estimates import Declared
from carpool.core.messages import JobCancelled, JobFailed, JobFinished, JobSubmitted, Record
from carpool.core.model import JobId
from carpool.core.scheduler import Scheduler

_ENDS = (JobFinished, JobFailed, JobCancelled)
_ENDINGS = {JobFinished: "finished", JobFailed: "failed", JobCancelled: "was cancelled"}
_EPILOG = """\b
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


@click.command("why", epilog=_EPILOG)
@click.argument("job")
@journal_option
@run_option
@click.option("--at", type=float, default=None, metavar="S", help="The instant. [default: the last of the job's life]")
@json_option
def command(job: str, journal: str, run: str, at: float | None, as_json: bool) -> None:
    """Tell why JOB waits, or why it holds what it holds, as its policy sees it.

    The policy is asked with what was known then; nothing is decided. With a journal of a simulation, lengths and rates
    are taken as they were declared.
    """
    check_named_once(journal, run)
    path = Path(journal)
    if not journal and not run and at is None:
        from carpool.cli.found import from_daemon

        now = from_daemon(job, lambda client, name: client.why(name))
        if now is not None:
            click.echo(json.dumps({"schema": 1, "job": job, "why": now}) if as_json else f"now: {job} {now}")
            return
    if not journal:
        from carpool.cli.runs import run_with

        path = run_with(job, run).journal
    answer = _asked(path, JobId(job), at, live=not journal)
    if as_json:
        row = {"at_s": answer.at, "why": answer.why, "last_plan": answer.last_plan, "ending": answer.ending}
        click.echo(json.dumps({"schema": 1, "job": job, **row}))
        return
    click.echo(f"at {answer.at:.3f} s: {job} {answer.why}")
    if answer.last_plan:
        click.echo(f"the last plan before that: {answer.last_plan}")
    if answer.ending:
        click.echo(answer.ending)


def _asked(path: Path, job: JobId, at: float | None, *, live: bool) -> Reason:
    """Fold the journal up to the instant and ask the policy."""
    from carpool.backends.live import Live
    from carpool.policies.registry import parse_policy

    with opened(path) as (header, records):
        known, ending = _until(records, job, at)
    estimator = Live(header.cluster) if live else Declared()
    scheduler = Scheduler(header.cluster, parse_policy(header.policy), estimator=estimator)
    scheduler.recover(known)
    found = scheduler.jobs.get(job)
    if found is None:
        way_out = (
            "Check the id, or give a later --at." if at is not None else "Check the id; ids are those of the trace."
        )
        raise InputError(
            f"job {job!r} is not in it{'' if at is None else f' at {at:g} s'}", where=str(path), way_out=way_out
        )
    plans = [record.planned.reason for record in known if record.planned is not None and record.planned.reason]
    why = scheduler.why(found)
    return Reason(scheduler.at, why, plans[-1] if plans else "", ending)


def _until(records: Iterable[Record], job: JobId, at: float | None) -> tuple[list[Record], str]:
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
