"""Run lookup: finds run folders by name, by job, or the newest unfinished one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from carpool.backends.run_folder import RunFolder
from carpool.core.errors import InputError, UnknownName
from carpool.jobs.devices import LocalDevice
from carpool.jobs.job_file import JobFile, ListedJob, parse_jobs, read_jobs
from carpool.jobs.sweep import add_sweep
from carpool.service.store.journal_file import is_unfinished
from carpool.service.store.store import has_store

RUNS = Path(".carpool") / "runs"


class ChosenRun(NamedTuple):
    """The jobs to run and the folder; policy and devices are those of a resumed run."""

    name: str
    jobs: tuple[ListedJob, ...]
    folder: RunFolder
    resume: bool = False
    policy: str | None = None
    devices: tuple[LocalDevice, ...] | None = None


def look_up(
    jobs: str | None,
    state: str | None,
    resume: str | None,
    sweep: Mapping[str, Any] | None = None,
    program: Mapping[str, Any] | None = None,
) -> ChosenRun:
    """The run that the command line names; `resume` is None without --resume, empty if it names no run.

    `sweep` adds parameters to the jobs of the file, or to the program that is given instead of a file.
    """
    if jobs is None and resume is None and program is None:
        raise InputError(
            "no job file is given", way_out="Name one: carpool run jobs.toml; or a program: carpool run -- python a.py."
        )
    if sweep and jobs is None and program is None:
        raise InputError(
            "--sweep needs a job file or a program",
            way_out="Name it: carpool run jobs.toml --sweep lr=0.1,0.01.",
        )
    file = read_jobs(Path(jobs), sweep) if jobs is not None else _as_file(program, sweep or {})
    if resume is not None:
        folder = RunFolder(Path(state)) if state else find_run(resume, file.name if file is not None else "")
        before = folder.settings()
        listed = before.jobs if file is None else file.jobs
        return ChosenRun(before.name, listed, folder, True, before.policy, before.devices)
    assert file is not None
    folder = RunFolder(Path(state) if state else free_place(file.name))
    if folder.exists:
        raise InputError(
            "already holds a run", where=str(state), way_out="Continue it with --resume, or name another --state."
        )
    if has_store(folder.path):
        raise InputError("holds the state of a daemon", where=str(state), way_out="Name another --state.")
    return ChosenRun(file.name, file.jobs, folder)


def _as_file(program: Mapping[str, Any] | None, sweep: Mapping[str, Any]) -> JobFile | None:
    """A program of the command line as a job file in the current folder."""
    if program is None:
        return None
    jobs = parse_jobs(add_sweep(program, sweep, "--sweep"), Path.cwd(), "command line")
    return JobFile(Path(f"{program['job'][0]['name']}.toml"), jobs)


def find_run(run: str, name: str = "") -> RunFolder:
    """A run by its folder or name; without either, the newest unfinished one of a job file, or of all."""
    if run:
        return named_run(run)
    mine = [folder for folder in all_runs() if not name or folder.settings().name == name]
    found = next((folder for folder in reversed(mine) if is_unfinished(folder)), None)
    if found is None:
        raise InputError(
            f"no run{f' of {name!r}' if name else ''} in {RUNS} is unfinished",
            way_out="Omit --resume to begin a new one.",
        )
    return found


def named_run(run: str) -> RunFolder:
    """A run by its folder or name."""
    for place in (Path(run), RUNS / run):
        if RunFolder(place).exists:
            return RunFolder(place)
    raise UnknownName("run", run, [folder.path.name for folder in all_runs()], where=str(RUNS))


def run_with(job: str, run: str = "") -> RunFolder:
    """The named run, which must have the job, or the newest run that has it."""
    runs = [named_run(run)] if run else all_runs()
    if not runs:
        raise InputError(
            f"no running daemon knows job {job!r}, and there are no runs in {RUNS}",
            way_out="Name the folder of a run with --run, or start its daemon: carpool serve.",
        )
    names = {folder.path: [str(spec.id) for spec, _ in folder.settings().jobs] for folder in runs}
    for folder in reversed(runs):
        if job in names[folder.path]:
            return folder
    known = {name for listed in names.values() for name in listed}
    raise UnknownName("job", job, known, where=str(runs[0].path) if run else str(RUNS))


def all_runs() -> list[RunFolder]:
    """Every run, oldest first."""
    places = sorted(RUNS.glob("*/run.json"), key=lambda path: path.stat().st_mtime_ns)
    return [RunFolder(path.parent) for path in places]


def free_place(name: str) -> Path:
    """An unused folder: of this name, or with -2, -3 and so on."""
    number = 1
    while RunFolder(RUNS / (name if number == 1 else f"{name}-{number}")).exists:
        number += 1
    return RUNS / (name if number == 1 else f"{name}-{number}")
