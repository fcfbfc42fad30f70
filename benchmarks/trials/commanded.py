"""Runs examples with `carpool run`: on any devices, with a fault in the middle, interrupted and resumed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trials.catalogue import ENTRY, SHARDS
from trials.desk import MARK
from trials.setting import Ends, Trial, TrialFailed

ROOT = Path(__file__).resolve().parents[2]
WHOLE = f"{ROOT}/benchmarks/trials/whole.py:Whole"  # a job over unlike devices: no policy that ships does that
RUN_S = 300.0  # the most that one `carpool run` may take


def run_all(
    trial: Trial,
    spec: str,
    *,
    exact: bool,
    width: int = 1,
    faults: str = "",
    rank: int | None = None,
    policy: str = "fifo",
) -> Ends:
    """All jobs by one `carpool run`, each on so many devices; with a fault in the middle of each, if one is named."""
    write_jobs(trial, exact=exact, width=width)
    marks = {job: trial.folder / f"struck-{job}" for job in trial.jobs}
    named = [
        {"job": job, "step": trial.middle, "kind": faults, "once": str(marks[job]), "rank": rank}
        for job in trial.jobs
        if faults
    ]
    document = finish(begin(trial, "jobs.toml", "--devices", spec, "--oversubscribe", policy=policy, faults=named))
    ends = digests(document)
    for job in document["jobs"]:
        widest = max((len(given["devices"]) for given in job["allocations"]), default=0)
        if widest != width and not ends[job["name"]].startswith("FAILED"):
            ends[job["name"]] = f"NOT TRIED: it held {widest} devices, not {width}"
        if faults and not marks[job["name"]].exists():
            ends[job["name"]] = f"NOT TRIED: no {faults} struck it"
    return ends


def interrupt(trial: Trial, *, exact: bool, before: str, after: str, width: int = 1) -> Ends:
    """All jobs at a time, stopped with SIGINT when one has made some steps, resumed until each was once stopped."""
    write_jobs(trial, exact=exact, width=width)
    caught: dict[str, int] = {}
    document: dict[str, Any] = {"jobs": []}
    is_over, sitting = False, 0
    while not is_over and len(caught) < len(trial.jobs) and sitting < 2 * len(trial.jobs):
        journal = trial.folder / f"journal-{sitting}"
        more = ["--resume"] if sitting else []
        child = begin(trial, "jobs.toml", *more, "--devices", before, "--journal", str(journal))
        await_step(child, journal, set(trial.jobs) - set(caught), trial.steps // 6)
        child.send_signal(signal.SIGINT)
        document = finish(child, codes=(0, 130))
        steps = {job["name"]: job["steps"] for job in document["jobs"] if job["state"] == "interrupted"}
        caught |= {name: made for name, made in steps.items() if name not in caught and 0 < made < trial.steps}
        is_over, sitting = child.returncode == 0, sitting + 1
    trial.notes["interrupted at"] = ", ".join(f"{name} {steps}" for name, steps in caught.items())
    if not is_over:
        document = finish(begin(trial, "jobs.toml", "--resume", "--devices", after))
    missed = {job: "NOT TRIED: it was never stopped in the middle" for job in trial.jobs if job not in caught}
    return digests(document) | missed


def await_step(child: subprocess.Popen[str], journal: Path, jobs: set[str], step: int) -> None:
    """Wait until one of the jobs has made so many steps, or the run is over."""
    deadline = time.monotonic() + RUN_S
    while child.poll() is None and time.monotonic() < deadline:
        lines = journal.read_text(encoding="ascii").splitlines()[1:] if journal.exists() else []
        with contextlib.suppress(json.JSONDecodeError):  # the last line may be half written
            facts = [fact for line in lines for fact in json.loads(line)["facts"]]
            made = [fact for fact in facts if fact["fact"] == "ProgressReported" and fact["job"] in jobs]
            if any(fact["done"] >= step for fact in made):
                return
        time.sleep(0.05)


def write_jobs(trial: Trial, *, exact: bool, width: int) -> None:
    """A job file in which every job takes just so many devices."""
    tables = []
    for job in trial.jobs:
        args = trial.arguments(job)
        given = ", ".join(f"{name} = {json.dumps(value)}" for name, value in args["args"].items())
        rest = f'example = "{args["example"]}", steps = {args["steps"]}, pause_s = {args["pause_s"]}'
        lines = ["[[job]]", f'name = "{job}"', f'entry = "{ENTRY}"', f"devices = {width}"]
        lines.append(f"args = {{ {rest}, args = {{ {given} }} }}")
        lines += ["exact = true", f"shards = {SHARDS}"] if exact else []
        tables.append("\n".join(lines))
    (trial.folder / "jobs.toml").write_text("\n\n".join(tables) + "\n", encoding="utf-8")


def begin(
    trial: Trial, *args: str, policy: str = "fifo", faults: Sequence[dict[str, Any]] = ()
) -> subprocess.Popen[str]:
    """Start `carpool run`."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), MARK: trial.mark, "CARPOOL_FAULTS": json.dumps(faults)}
    command = [sys.executable, "-m", "carpool", "run", *args, "--policy", policy, "--state", "state", "--json"]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, text=True, env=env, cwd=trial.folder, start_new_session=True, stdout=pipe, stderr=pipe
    )


def finish(child: subprocess.Popen[str], codes: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    """What it printed at its end; one that takes too long is killed."""
    try:
        printed, told = child.communicate(timeout=RUN_S)
    except subprocess.TimeoutExpired:
        child.kill()
        printed, told = child.communicate()
        raise TrialFailed(f"carpool run took longer than {RUN_S:.0f} s") from None
    if child.returncode not in codes:
        raise TrialFailed(f"carpool run ended with {child.returncode}: {told.strip()[-300:]}")
    document: dict[str, Any] = json.loads(printed)
    return document


def digests(document: dict[str, Any]) -> Ends:
    """Digests by job, or why there is none."""
    return {job["name"]: job["digest"] or f"FAILED: {job['state']}, {job['error']}" for job in document["jobs"]}
