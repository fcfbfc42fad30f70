"""Job submission parsing: size limits, allowed path roots, and the job-file reader.

That keeps paths in order; it is no sandbox. Whoever may submit jobs runs programs as the daemon's user.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from carpool.core.errors import InputError
from carpool.jobs.entry_file import module_file
from carpool.jobs.job_file import ListedJob, parse_jobs
from carpool.service.http.limits import Limits

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class PathPolicy:
    """Folders and all that is in them, links followed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folder.resolve() for folder in folders)

    def check(self, path: Path, what: str, where: str) -> None:
        """InputError where a path, links followed, is in none of them."""
        if _CONTROL.search(str(path)):
            raise InputError(f"{what} holds control characters", where=where, way_out="Name a plain path.")
        try:
            real = path.resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise InputError(f"{what} cannot be found: {error}", where=where) from None
        if not any(real.is_relative_to(folder) for folder in self.folders):
            allowed = ", ".join(map(str, self.folders)) or "nowhere"
            raise InputError(
                f"{what} is {str(real)!r}, which is outside the folders from which jobs may be run",
                where=where,
                way_out=f"Allowed: {allowed}. The setting 'roots' of the daemon says which.",
            )

    def check_policy(self, text: str) -> None:
        """The same of a policy that is a class in a file."""
        file, dot, _ = text.partition(".py:")
        if dot:
            self.check(Path(f"{file}.py"), "policy", "policy")

    def check_tables(self, tables: Sequence[Mapping[str, Any]], base: Path) -> None:
        """The same of everything that job tables name, before anything of it is opened."""
        self.check(base, "folder", "folder")
        for table in tables:
            where = f"job {table.get('name')!r}"
            home = base / _text(table.get("folder"))
            self.check(home, "folder", where)
            for what, path in _paths(table, home, where):
                self.check(path, what, where)


def _paths(table: Mapping[str, Any], home: Path, where: str) -> list[tuple[str, Path]]:
    """What a table names on disk besides its folder."""
    found = []
    source = _text(table.get("entry")).rpartition(":")[0]
    if source.endswith(".py"):
        found.append(("entry", home / source))
    elif source and not _CONTROL.search(source):
        path = module_file(source, home, where)
        if path is None:
            raise InputError(
                f"entry names module {source!r}, which is in no file",
                where=where,
                way_out="Name a file: file.py:function.",
            )
        found.append(("entry", path))
    if python := _text(table.get("python")):
        found.append(("python", home / python))
    command = table.get("command")
    words = [word for word in command if isinstance(word, str)] if isinstance(command, list) else []
    if words and "/" in words[0]:
        found.append(("command", home / words[0]))
    if len(words) > 1 and words[1].endswith(".py"):
        found.append(("script", home / words[1]))
    notify = table.get("notify")
    program = notify[0] if isinstance(notify, list) and notify else notify
    if isinstance(program, str) and "/" in program and "://" not in program:
        found.append(("notify", home / program))
    return found


def _text(value: object) -> str:
    """A text; what is of another kind is told by whoever reads the table."""
    return value if isinstance(value, str) else ""


def read_submission(
    data: Mapping[str, Any], folder: Path, roots: PathPolicy | None, limits: Limits
) -> tuple[ListedJob, ...]:
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
