"""Job submission parsing: size limits, allowed path roots, and the job-file reader.

The path check is not a sandbox: a user who may submit jobs runs programs as the daemon's Unix user.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from carpool.core.errors import InputError
from carpool.jobs.entry_file import module_file
from carpool.jobs.job_file import ListedJob, parse_jobs
from carpool.jobs.sweep import Sweep, filled_command
from carpool.jobs.toml_table import Table
from carpool.service.http.limits import Limits

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class PathPolicy:
    """Allows paths inside given folders, after resolving symbolic links."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folder.resolve() for folder in folders)

    def check(self, path: Path, what: str, where: str) -> None:
        if _CONTROL.search(str(path)):
            raise InputError(f"{what} contains control characters", where=where, way_out="Remove them.")
        try:
            real = path.resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise InputError(f"{what} cannot be resolved: {error}", where=where) from None
        if not any(real.is_relative_to(folder) for folder in self.folders):
            allowed = ", ".join(map(str, self.folders)) or "none"
            raise InputError(
                f"{what} is {str(real)!r}, which is outside the allowed folders",
                where=where,
                way_out=f"Allowed: {allowed}. The daemon's setting 'roots' lists them.",
            )

    def check_policy(self, text: str) -> None:
        """Check the file of a policy given as FILE.py:Class."""
        file, dot, _ = text.partition(".py:")
        if dot:
            self.check(Path(f"{file}.py"), "policy", "policy")

    def check_tables(self, tables: Sequence[Mapping[str, Any]], base: Path) -> None:
        """Check every path that job tables name, before any of them is opened."""
        self.check(base, "folder", "folder")
        for table in tables:
            where = f"job {table.get('name')!r}"
            folder = base / _text(table.get("folder"))
            self.check(folder, "folder", where)
            for what, path in _paths(table, folder, where):
                self.check(path, what, where)


def _paths(table: Mapping[str, Any], folder: Path, where: str) -> Iterator[tuple[str, Path]]:
    """Yield the paths that a job table names, except its folder."""
    source = _text(table.get("entry")).rpartition(":")[0]
    if _CONTROL.search(source):
        raise InputError(f"entry {source!r} contains control characters", where=where, way_out="Remove them.")
    if source.endswith(".py"):
        yield "entry", folder / source
    elif source:
        yield "entry", _module_path(source, folder, where)
    if python := _text(table.get("python")):
        yield "python", folder / python
    command = _texts(table.get("command"))
    if command and "/" in command[0]:
        yield "command", folder / command[0]
    if len(command) > 1 and command[1].endswith(".py"):
        yield "script", folder / command[1]
    for pattern in (*_texts(table.get("metrics")), _text(table.get("metrics"))):
        yield "metrics", folder / pattern
    notify = table.get("notify")
    program = notify[0] if isinstance(notify, list) and notify else notify
    if isinstance(program, str) and "/" in program and "://" not in program:
        yield "notify", folder / program


def _module_path(module: str, folder: Path, where: str) -> Path:
    path = module_file(module, folder, where)
    if path is None:
        raise InputError(
            f"entry names module {module!r}, which has no file", where=where, way_out="Use a file: file.py:function."
        )
    return path


def _text(value: object) -> str:
    """Return a string value; others are empty here, the job-file reader rejects them."""
    return value if isinstance(value, str) else ""


def _texts(value: object) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def read_submission(
    data: Mapping[str, Any], folder: Path, roots: PathPolicy | None, limits: Limits
) -> tuple[ListedJob, ...]:
    """Parse the jobs of a submission within the limits; without `roots` they may be anywhere."""
    tables = data.get("job", [])
    defaults = data.get("defaults", {})
    _check_count(tables, limits.jobs_at_once)
    _check_text(data)
    _check_size(defaults, tables, limits.jobs_bytes)
    if roots is not None:
        roots.check_tables([trial for table in tables for trial in _trials({**defaults, **table})], folder)
    return parse_jobs(data, folder, "submission")


def _trials(table: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The job tables of a sweep whose values may become part of a path, else the table itself."""
    where = f"submission: job {table.get('name')!r}"
    texts = [*_texts(table.get("command"))[:2], *_texts(table.get("metrics")), _text(table.get("metrics"))]
    if not table.get("sweep") or "{" not in "".join(texts):
        yield table
        return
    for number, values in enumerate(Sweep.read(table["sweep"], f"{where}: sweep").trials(), start=1):
        yield filled_command(Table(table, where), values, f"{table.get('name')}-{number}").values


def _check_count(tables: Sequence[Mapping[str, Any]], limit: int) -> None:
    """Check the number of jobs before sweeps are expanded: a few lists easily make a million."""
    num_jobs = sum(map(_count, tables))
    if num_jobs > limit:
        raise InputError(
            f"the submission has {num_jobs} jobs; the limit is {limit}", way_out="Send them in several submissions."
        )


def _count(table: Mapping[str, Any]) -> int:
    return Sweep.read(table.get("sweep") or {}, f"submission: job {table.get('name')!r}: sweep").num_trials or 1


def _check_size(defaults: Mapping[str, Any], tables: Sequence[Mapping[str, Any]], limit: int) -> None:
    """Check the size of the stored jobs before they are expanded: each is stored with its defaults and sweep values."""
    default_sizes = {key: _size(value) for key, value in defaults.items()}
    total = 0
    for table in tables:
        own = sum(_size(value) for key, value in table.items() if key != "sweep")
        inherited = sum(size for key, size in default_sizes.items() if key not in table)
        swept = sum(map(_value_size, (table.get("sweep") or {}).values()))
        total += int(_count(table) * (own + inherited + swept))
    if total > limit:
        raise InputError(
            f"the jobs take {total} bytes, each with its defaults; the limit is {limit}",
            way_out="Send fewer jobs at once, or move large values into a file that the jobs read.",
        )


def _value_size(values: object) -> float:
    """The size of one value of a parameter; it is stored as an argument or in the command, and for display."""
    return 2 * (_size(values) / len(values) if isinstance(values, list) and values else _size(values))


def _size(value: object) -> int:
    return len(json.dumps(value))


def _check_text(data: Mapping[str, Any]) -> None:
    """Reject text that is not UTF-8, and commands and variables that the system does not accept."""
    try:
        json.dumps(data, ensure_ascii=False).encode("utf-8")
    except (UnicodeEncodeError, ValueError, OverflowError) as error:
        raise InputError(f"cannot be stored as UTF-8: {error}", where="submission") from None
    for table in (data.get("defaults", {}), *data.get("job", [])):
        environment = table.get("environment")
        variables = environment if isinstance(environment, dict) else {}
        values = [value for value in variables.values() if isinstance(value, str)]
        texts = [*_texts(table.get("command")), *_texts(table.get("notify")), *variables, *values]
        if any("\x00" in text for text in texts) or not all(name and "=" not in name for name in variables):
            raise InputError(
                "command, notify or environment contains a zero byte or an invalid variable name",
                where=f"job {table.get('name')!r}",
                way_out="Remove zero bytes; a variable name must not be empty or contain '='.",
            )
