"""What verbs that read a journal share: how it is named, and what is said of one that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from carpool.core.errors import InputError, JournalError, cause
from carpool.core.journal import Header, read_journal
from carpool.core.messages import Record

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
def opened(path: Path) -> Iterator[tuple[Header, Iterator[Record]]]:
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
