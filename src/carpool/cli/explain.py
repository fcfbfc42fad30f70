"""``carpool explain``: a job's story, from the journal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click

from carpool.cli.flags import json_option
from carpool.cli.journals import check_named_once, journal_option, opened, run_option
from carpool.core.errors import InputError
from carpool.core.model import JobId
from carpool.core.story import PLAIN, Words, story

Story = list[tuple[float, str]]

_EPILOG = """\b
Examples:
  carpool explain 17 --journal run.jsonl
  carpool explain mlp --run jobs
"""


@click.command("explain", epilog=_EPILOG)
@click.argument("job")
@journal_option
@run_option
@json_option
def command(job: str, journal: str, run: str, as_json: bool) -> None:
    """Tell what happened to JOB: what was believed of it, what was decided and why, and what was measured."""
    check_named_once(journal, run)
    told = _read(Path(journal), JobId(job)) if journal else (None if run else _of_daemon(job)) or _of_run(job, run)
    if not told:
        raise InputError(
            f"job {job!r} is not in it", where=journal or run, way_out="Check the id; ids are those of the trace."
        )
    if as_json:
        click.echo(json.dumps({"schema": 1, "job": job, "story": [{"at_s": at, "what": words} for at, words in told]}))
        return
    for at, words in told:
        click.echo(f"{at:>14.3f} s  {words}")


def _of_daemon(job: str) -> Story | None:
    """The daemon's story of a job, in seconds since its submission; None where it has no such job."""
    from carpool.cli.found import from_daemon

    told = from_daemon(job, lambda client, name: client.story(name))
    return [(moment["at"] - told[0]["at"], moment["words"]) for moment in told] if told else None


def _of_run(job: str, run: str) -> Story:
    """What the journal of a run says, between it what the executor told, and around it what was known of the job."""
    from carpool.backends.runfolder import BELIEVED, PROFILE
    from carpool.cli.runs import run_with

    folder = run_with(job, run)
    told = _read(folder.journal, JobId(job), Words("steps", folder.settings().names))
    told += [(float(row["at_s"]), str(row["what"])) for row in folder.rows(JobId(job), "story.jsonl")]
    told.sort(key=lambda line: line[0])
    if told:
        before = [(told[0][0], f"was known from before: {words}") for words in _known(folder.job(job) / BELIEVED)]
        after = [(told[-1][0], f"is known now: {words}") for words in _known(folder.job(job) / PROFILE)]
        told = [*before, *told, *after]
    return told


def _known(path: Path) -> Iterator[str]:
    """What a profile says, one line for each setting in which steps were made, and one for the costs."""
    from carpool.predictors.profile_file import read_profile

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


def _read(path: Path, job: JobId, words: Words = PLAIN) -> Story:
    with opened(path) as (header, records):
        return list(story(records, job, header.cluster, words))
