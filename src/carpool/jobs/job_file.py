"""Job file: parses and checks TOML job tables into job specs and programs; errors name file, job and key."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from carpool.core.constraints.priorities import PRIORITIES, weight_with_priority
from carpool.core.errors import InputError, UnknownName
from carpool.core.model import JobId, JobSpec, Kind
from carpool.core.units import parse_bytes, parse_seconds
from carpool.jobs.dependencies import check_dependencies
from carpool.jobs.entry_file import check_command, check_entry
from carpool.jobs.job_keys import KEYS
from carpool.jobs.program import Program
from carpool.jobs.progress_pattern import ProgressPattern
from carpool.jobs.sweep import Sweep, add_sweep, as_params, filled_command
from carpool.jobs.toml_table import Table, read_toml


def parse_deadline(value: object, where: str, now: float | None = None) -> float:
    """Seconds from now to a deadline: a duration (``8h``) or a date (``2027-03-01 08:00``, local time by default)."""
    date = _date(value)
    if date is None:
        seconds = parse_seconds(value, where) if not isinstance(value, str) or value[:1].isdigit() else 0.0
    else:
        seconds = date.timestamp() - (time.time() if now is None else now)
    if seconds <= 0.0:
        problem = f"{value!r} is in the past" if date is not None else f"{value!r} is not a duration or date"
        raise InputError(problem, where=where, way_out="Write a duration such as 8h, or a future date.")
    return seconds


def _date(value: object) -> datetime | None:
    if isinstance(value, datetime):
        return value
    try:
        return datetime.fromisoformat(value) if isinstance(value, str) and "-" in value else None
    except ValueError:
        return None


_OWN = frozenset({"name", "entry", "command", "after", "sweep"})  # not allowed in [defaults]
_NAME = re.compile(r"[A-Za-z0-9][\w.\-]{0,99}", re.ASCII)


class ListedJob(NamedTuple):
    """One job of a file: its spec for the scheduler and its program for the workers."""

    spec: JobSpec
    program: Program


@dataclass(frozen=True, slots=True)
class JobFile:
    """A job file that passed all checks."""

    path: Path
    jobs: tuple[ListedJob, ...]

    @property
    def name(self) -> str:
        """The file's name without its suffix; names its runs."""
        return self.path.stem


def read_jobs(path: Path, sweep: Mapping[str, Any] | None = None) -> JobFile:
    """Read and check a job file, without importing any entry; `sweep` adds parameters to each of its jobs."""
    data = read_toml(path)
    return JobFile(path, parse_jobs(add_sweep(data, sweep or {}, str(path)), path.parent, str(path)))


def parse_jobs(data: Mapping[str, Any], folder: Path, where: str) -> tuple[ListedJob, ...]:
    """Parse the content of a job file; paths are relative to `folder`."""
    for key in data:
        if key not in {"job", "defaults"}:
            raise UnknownName("table", key, ["job", "defaults"], where=where)
    defaults = data.get("defaults", {})
    Table(defaults, f"{where}: defaults").only([key for key in KEYS if key not in _OWN])
    tables = data.get("job", [])
    if not isinstance(tables, list) or not tables:
        raise InputError(
            "has no [[job]] table",
            where=where,
            way_out='Add one: a line [[job]], then lines name = "a", entry = "train.py:main".',
        )
    jobs: list[ListedJob] = []
    sweeps: dict[str, list[ListedJob]] = {}  # in `after`, a sweep's name stands for all its jobs
    for place, table in enumerate(tables, start=1):
        expanded = _expanded(table, defaults, place, folder, where)
        if len(expanded) > 1 or "sweep" in table:
            sweeps[str(table.get("name"))] = expanded
        jobs += expanded
    _check_unique_names(jobs, where)
    made = [_with_sweeps(job, sweeps, where) for job in jobs]
    check_dependencies({job.spec.id: job.spec.after for job in made}, where)
    return tuple(made)


def _expanded(given: object, defaults: Mapping[str, Any], place: int, folder: Path, where: str) -> list[ListedJob]:
    """The job of a table, or one job per combination of its sweep."""
    if not isinstance(given, dict):
        raise InputError(f"job {place} is {given!r}, not a table", where=where, way_out="Write a [[job]] table.")
    name = _name(given, place, where)
    where = f"{where}: job {name!r}"
    table = Table({**defaults, **given}, where)
    table.only(KEYS)
    sweep = Sweep.read(table.mapping("sweep"), f"{where}: sweep")
    at_most = sweep.at_most or _integer(table, "at_most")
    if not sweep.params:
        if at_most:
            raise InputError("at_most needs a sweep", where=where, way_out="Add a sweep, or remove at_most.")
        return [_job(name, table, folder)]
    jobs = []
    for number, values in enumerate(sweep.trials(), start=1):
        spec, program = _job(f"{name}-{number}", _trial(f"{name}-{number}", table, values), folder)
        spec = replace(spec, array=name, at_most=at_most, params=as_params(values), halving=sweep.halving)
        jobs.append(ListedJob(spec, program))
    return jobs


def _trial(name: str, table: Table, values: Mapping[str, Any]) -> Table:
    """The table of one trial: its values are arguments of the entry, or are filled into the command."""
    if table.values.get("command"):
        return filled_command(table, values, name)
    return Table({**table.values, "args": {**table.mapping("args"), **values}}, table.where)


def _name(table: Mapping[str, Any], place: int, where: str) -> str:
    name = table.get("name")
    if name is None:
        raise InputError(f"job {place} has no name", where=where, way_out='Add one: name = "mlp".')
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(
            f"job {place} has the name {name!r}",
            where=where,
            way_out="Use at most 100 ASCII letters, digits, '.', '_' and '-', starting with a letter or digit.",
        )
    return name


def _job(name: str, table: Table, folder: Path) -> ListedJob:
    home = folder / table.text("folder")
    if not home.is_dir():
        raise InputError(f"folder {str(home)!r} does not exist", where=table.where, way_out="Name an existing folder.")
    entry, command = table.text("entry"), table.texts("command")
    if bool(entry) == bool(command):
        problem = "has both entry and command" if entry else "has neither entry nor command"
        way_out = 'Write one of them: entry = "digits.py:mlp" or command = ["python", "train.py"].'
        raise InputError(problem, where=table.where, way_out=way_out)
    program = _program(table, home, entry, command)
    spec = _spec(name, table, program)
    if wide := [pattern for pattern in program.metrics if "**" in pattern]:
        way_out = "Name the folders: runs/*/events*."
        raise InputError(f"metrics has {wide[0]!r}, which searches whole trees", where=table.where, way_out=way_out)
    if command:
        _check_command(table, spec)
        if not spec.after:  # a job that it depends on may write it
            check_command(command, home, program.environment.get("PATH"), table.where)
    else:
        if program.metrics:
            raise InputError("metrics needs a command", where=table.where, way_out="Return them from evaluate instead.")
        check_entry(entry, program.args, home, table.where)
    if program.exact and "shards" not in table.values and spec.widest == 1:
        program = replace(program, shards=1)  # it never has a second device: no need to split its steps
    return ListedJob(spec, program)


def _integer(table: Table, key: str) -> int:
    """The value of a key within its limits, else its default."""
    known = KEYS[key]
    return table.whole(key, known.default, least=int(known.least), most=int(known.most))


def _program(table: Table, home: Path, entry: str, command: tuple[str, ...]) -> Program:
    exact = table.flag("exact")
    shards = _integer(table, "shards")
    if shards & (shards - 1):
        raise InputError(f"shards is {shards}", where=table.where, way_out="Write a power of two: 1, 2, 4, 8, 16 …")
    if "shards" in table.values and not exact:
        raise InputError("shards needs exact = true", where=table.where, way_out="Add exact = true, or remove shards.")
    batch = _batch(table)
    return Program(
        entry=entry,
        args=table.mapping("args"),
        command=command,
        folder=str(home.resolve()),
        environment=table.settings("environment"),
        metrics=table.texts("metrics"),
        resumable=table.flag("resumable"),
        progress=_progress(table),
        fork_start=table.flag("fork_start", True),
        python=table.text("python"),
        memory_bytes=parse_bytes(table.values.get("memory", 0), f"{table.where}: memory"),
        ram_bytes=parse_bytes(table.values.get("ram", 0), f"{table.where}: ram"),
        cpus=_integer(table, "cpus"),
        seed=_integer(table, "seed"),
        exact=exact,
        shards=shards,
        batch_size=batch.whole("size", 0, least=0),
        tune=batch.flag("tune"),
        batch_per_device=batch.choice("per", ("step", "device")) == "device",
        sync_batchnorm=_sync_batchnorm(table, exact),
        deterministic=_deterministic(table, exact),
        graph=table.flag("graph", True),
        precision=table.choice("precision", ("", "float32", "tf32", "bf16")),
        channels_last=table.flag("channels_last"),
        checkpoint_s=parse_seconds(table.values.get("checkpoint_every", 60.0), f"{table.where}: checkpoint_every"),
        keep=_integer(table, "keep"),
        time_limit_s=parse_seconds(table.values.get("time_limit", 0.0), f"{table.where}: time_limit"),
        retries=_integer(table, "retries"),
        notify=table.texts("notify"),
    )


def _progress(table: Table) -> str:
    pattern = table.text("progress")
    if pattern:
        ProgressPattern(pattern, f"{table.where}: progress")
    return pattern


def _sync_batchnorm(table: Table, exact: bool) -> bool:
    wanted = table.flag("sync_batchnorm")
    if wanted and exact:
        raise InputError(
            "sync_batchnorm = true and exact = true cannot be combined: shards of an exact job may run one after "
            "another, so they cannot exchange statistics",
            where=table.where,
            way_out="Remove one of them. With exact = true statistics are computed per shard and averaged, with equal "
            "results on any number of devices.",
        )
    return wanted


def _deterministic(table: Table, exact: bool) -> bool:
    deterministic = table.flag("deterministic", True)
    if exact and not deterministic:
        raise InputError(
            "exact = true needs deterministic = true",
            where=table.where,
            way_out="Remove deterministic = false, or exact = true.",
        )
    return deterministic


def _batch(table: Table) -> Table:
    """``batch = 64`` or ``batch = { size, tune, min, max, per }``."""
    given = table.values.get("batch", {})
    if isinstance(given, int) and not isinstance(given, bool):
        given = {"size": given}
    batch = Table(given, f"{table.where}: batch")
    batch.only(["size", "tune", "min", "max", "per"])
    if batch.flag("tune") and not {"min", "max"} <= batch.values.keys():
        raise InputError(
            "tune = true needs min and max",
            where=batch.where,
            way_out="Write both: { tune = true, min = 32, max = 512 }.",
        )
    if batch.flag("tune") and table.flag("exact"):
        raise InputError(
            "tune = true and exact = true cannot be combined: tuning changes the training",
            where=batch.where,
            way_out="Remove one of them.",
        )
    if batch.whole("min", 1) > batch.whole("max", 1 << 31):
        raise InputError(
            f"min is {batch.values['min']}, max is {batch.values['max']}", where=batch.where, way_out="Swap them."
        )
    return batch


def _spec(name: str, table: Table, program: Program) -> JobSpec:
    devices, least, most = (_integer(table, key) for key in ("devices", "min_devices", "max_devices"))
    least = least or (1 if most else devices)
    devices = devices or max(1, least)
    least, most = least or devices, most or max(devices, least)
    if not least <= devices <= most:
        raise InputError(
            f"min_devices is {least}, devices {devices}, max_devices {most}",
            where=table.where,
            way_out="Make min_devices <= devices <= max_devices.",
        )
    if program.exact and most > program.shards and "shards" in table.values:
        raise InputError(
            f"max_devices is {most}, shards is {program.shards}",
            where=table.where,
            way_out="A device needs at least one shard: raise shards, or lower max_devices.",
        )
    batch = _batch(table)
    priority = PRIORITIES[table.choice("priority", ("normal", *(word for word in PRIORITIES if word != "normal")))]
    given = table.values.get("deadline")
    return JobSpec(
        JobId(name),
        devices,
        model=program.entry or program.command[0],
        batch_size=program.batch_size,
        weight=weight_with_priority(
            table.number("weight", 1.0, least=KEYS["weight"].least, most=KEYS["weight"].most), priority
        ),
        user=table.text("user"),
        min_devices=least,
        max_devices=most,
        batch_range=(batch.whole("min", 1), batch.whole("max", 1)) if batch.flag("tune") else None,
        memory_bytes=program.memory_bytes,
        kinds=tuple(Kind(kind) for kind in table.texts("kinds")),
        exact=program.exact,
        after=tuple(JobId(other) for other in table.texts("after")),
        retries=program.retries,
        cpus=program.cpus,
        ram_bytes=program.ram_bytes,
        disk_bytes=parse_bytes(table.values.get("disk", 0), f"{table.where}: disk"),
        max_nodes=_max_nodes(table, program),
        priority=priority,
        deadline_s=0.0 if given is None else parse_deadline(given, f"{table.where}: deadline"),
        resumable=program.resumable or not program.command,
    )


def _max_nodes(table: Table, program: Program) -> int:
    most = _integer(table, "max_nodes")
    reason = "a command runs on one machine" if program.command else ""
    if program.sync_batchnorm:
        reason = "sync_batchnorm = true needs memory that all its devices share"
    if most > 1 and reason:
        raise InputError(f"max_nodes is {most}, and {reason}", where=table.where, way_out="Remove max_nodes.")
    return most


def _check_command(table: Table, spec: JobSpec) -> None:
    """InputError for keys that need an entry."""
    for key in ("args", "exact", "batch", "sync_batchnorm", "precision", "channels_last"):
        if table.values.get(key):
            raise InputError(
                f"{key} is not allowed for a command", where=table.where, way_out="Remove it, or use an entry."
            )
    if spec.narrowest != spec.widest:
        raise InputError(
            f"min_devices is {spec.narrowest}, max_devices {spec.widest}; a command cannot be resized",
            where=table.where,
            way_out="Set devices only.",
        )


def _check_unique_names(jobs: Sequence[ListedJob], where: str) -> None:
    names = [spec.id for spec, _ in jobs]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two jobs have the name {name!r}", where=where, way_out="Use unique names.")


def _with_sweeps(job: ListedJob, sweeps: Mapping[str, Sequence[ListedJob]], where: str) -> ListedJob:
    """The job with the names of sweeps in `after` replaced by their jobs."""
    after: list[JobId] = []
    for needed in job.spec.after:
        members = sweeps.get(needed, ())
        if any(member.spec.halving is not None for member in members):
            raise InputError(
                f"after names {needed!r}, whose halving stops jobs; a job fails when one that it waits for is stopped",
                where=f"{where}: job {job.spec.id!r}",
                way_out="Submit it when the sweep is over, or remove halving.",
            )
        after += [member.spec.id for member in members] or [needed]
    return ListedJob(replace(job.spec, after=tuple(after)), job.program) if tuple(after) != job.spec.after else job
