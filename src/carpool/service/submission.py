"""From what was sent to jobs: bounded, from allowed folders only, and read as a job file is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from carpool.core.errors import InputError
from carpool.runtime.jobfile import Listed, parse_jobs
from carpool.service.roots import Roots


def read_submission(data: Mapping[str, Any], folder: Path, roots: Roots | None, most: int) -> tuple[Listed, ...]:
    """The jobs of a submission, at most so many; without roots they may be anywhere. InputError tells what is wrong."""
    tables = data.get("job", [])
    defaults = data.get("defaults", {})
    _check_count(tables, most)
    _check_text(data)
    if roots is not None:
        roots.check_tables([{**defaults, **table} for table in tables], folder)
    return parse_jobs(data, folder, "submission")


def _check_count(tables: Sequence[Mapping[str, Any]], most: int) -> None:
    """Before they are counted out: a sweep over a few lists is easily a million jobs."""
    asked = sum(
        prod(len(values) if isinstance(values, list) else 1 for values in (table.get("sweep") or {}).values())
        for table in tables
    )
    if asked > most:
        raise InputError(f"{asked} jobs at once; the limit is {most}", way_out="Send them in several submissions.")


def _check_text(data: Mapping[str, Any]) -> None:
    """What cannot be written as UTF-8, or be given to a program, is no text."""
    try:
        json.dumps(data, ensure_ascii=False).encode("utf-8")
    except (UnicodeEncodeError, ValueError, OverflowError) as error:
        raise InputError(f"is no text that could be kept: {error}", where="submission") from None
    for table in (data.get("defaults", {}), *data.get("job", [])):
        environment = table.get("environment")
        variables = environment if isinstance(environment, dict) else {}
        lists = [value for key in ("command", "notify") if isinstance(value := table.get(key), list)]
        texts = [*chain.from_iterable(lists), *variables, *variables.values()]
        is_name = all(name and "=" not in name for name in variables)
        if not is_name or any("\x00" in text for text in texts if isinstance(text, str)):
            raise InputError(
                "command, notify or environment holds what no program can be given",
                where=f"job {table.get('name')!r}",
                way_out="Leave out zero bytes; the name of a variable is not empty and has no '='.",
            )
