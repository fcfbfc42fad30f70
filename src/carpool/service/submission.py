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
from carpool.service.limits import Limits
from carpool.service.roots import Roots


def read_submission(data: Mapping[str, Any], folder: Path, roots: Roots | None, limits: Limits) -> tuple[Listed, ...]:
    """The jobs of a submission, within limits; without roots they may be anywhere. InputError tells what is wrong."""
    tables = data.get("job", [])
    defaults = data.get("defaults", {})
    _check_count(tables, limits.jobs_at_once)
    _check_text(data)
    _check_size(defaults, tables, limits.jobs_bytes)
    if roots is not None:
        roots.check_tables([{**defaults, **table} for table in tables], folder)
    return parse_jobs(data, folder, "submission")


def _check_count(tables: Sequence[Mapping[str, Any]], most: int) -> None:
    """Before they are counted out: a sweep over a few lists is easily a million jobs."""
    asked = sum(map(_count, tables))
    if asked > most:
        raise InputError(f"{asked} jobs at once; the limit is {most}", way_out="Send them in several submissions.")


def _count(table: Mapping[str, Any]) -> int:
    """How many jobs a table stands for."""
    return prod(len(values) if isinstance(values, list) else 1 for values in (table.get("sweep") or {}).values())


def _check_size(defaults: Mapping[str, Any], tables: Sequence[Mapping[str, Any]], most: int) -> None:
    """Before they are written out: each job is kept with all that it has from defaults and sweeps.

    Every value is measured once, however many jobs have it.
    """
    usual = {key: _size(value) for key, value in defaults.items()}
    written = 0
    for table in tables:
        own = sum(_size(value) for key, value in table.items() if key != "sweep")
        inherited = sum(size for key, size in usual.items() if key not in table)
        swept = sum(_size(values) / len(values) for values in (table.get("sweep") or {}).values() if values)
        written += int(_count(table) * (own + inherited + swept))
    if written > most:
        raise InputError(
            f"the jobs are {written} bytes when each is written out with its defaults; the limit is {most}",
            way_out="Send fewer at once, or put what is large into a file that they read.",
        )


def _size(value: object) -> int:
    """Bytes of a value in the store."""
    return len(json.dumps(value))


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
