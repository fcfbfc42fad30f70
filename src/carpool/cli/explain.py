"""``carpool explain``: a job's story, from the journal."""

from __future__ import annotations

import json
from pathlib import Path

import click

from carpool.core.errors import InputError, JournalError
from carpool.core.journal import read_journal
from carpool.core.model import JobId
from carpool.core.story import story


@click.command("explain", epilog="Example: carpool explain 17 --journal run.jsonl")
@click.argument("job")
@click.option("--journal", required=True, metavar="FILE", help="A journal, as written by simulate --journal.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON and nothing else.")
def command(job: str, journal: str, as_json: bool) -> None:
    """Tell what happened to JOB, what was decided about it and why."""
    told = _read(Path(journal), JobId(job))
    if not told:
        raise InputError(
            f"job {job!r} is not in it", where=journal, way_out="Check the id; ids are those of the trace."
        )
    if as_json:
        click.echo(json.dumps({"schema": 1, "job": job, "story": [{"at_s": at, "what": words} for at, words in told]}))
        return
    for at, words in told:
        click.echo(f"{at:>14.3f} s  {words}")


def _read(path: Path, job: JobId) -> list[tuple[float, str]]:
    try:
        with path.open(encoding="utf-8") as lines:
            header, records = read_journal(lines)
            return list(story(records, job, header.cluster))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", where=str(path), way_out="Name a journal file.") from None
    except JournalError as error:
        raise InputError(str(error), where=str(path)) from None
