"""The same mixes through ``carpool run``: shares chosen by itself, and the rates it holds afterwards."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measured import ROOT
from sharing.mixes import Mix
from sharing.table import Table

_FOREVER = 10_000_000  # steps
_POLL_S = 0.1
_LEAD_S = 0.5  # after the last change, before rates count


def job_file(whole: Mix, *, deterministic: bool, graph: bool = True) -> str:
    """A job file of a mix; every job runs until it is interrupted."""
    switches = f"deterministic = {str(deterministic).lower()}\ngraph = {str(graph).lower()}\n"
    tables = ['[defaults]\nprecision = "tf32"\nchannels_last = true\ncheckpoint_every = "1h"\n' + switches]
    for place, task in enumerate(whole.tasks):
        args = {"batch_size": task.batch, "steps": _FOREVER, **task.sizes}
        words = ", ".join(f"{key} = {json.dumps(value)}" for key, value in args.items())
        tables.append(f'[[job]]\nname = "{name(whole, place)}"\nentry = "carpool.runtime.zoo.trainings:{task.model}"\n')
        tables[-1] += f"args = {{ {words} }}\n"
    return "\n".join(tables)


def name(whole: Mix, place: int) -> str:
    """Of a job."""
    return f"{whole.tasks[place].model.replace('_', '-')}-{place}"


class LiveRun:
    """A ``carpool run`` of one mix; `start` it as soon as the one before was interrupted, while that one still leaves.

    What it does first, loading torch, is nothing to the GPU.
    """

    def __init__(self, whole: Mix, *, policy: str, devices: str, deterministic: bool) -> None:
        self.whole = whole
        self.deterministic = deterministic
        self._policy = policy
        self._devices = devices
        self._folder = tempfile.TemporaryDirectory()
        self._work = Path(self._folder.name)
        self._child: subprocess.Popen[str] | None = None
        self._began = 0.0
        self._loaded_s = 0.0  # from its start until it had decided something
        self._kept: float | None = None

    def start(self) -> None:
        """Begin, unless it has."""
        if self._child is not None:
            return
        work = self._work
        (work / "jobs.toml").write_text(job_file(self.whole, deterministic=self.deterministic), encoding="utf-8")
        command = [sys.executable, "-m", "carpool", "run", "jobs.toml"]
        command += ["--devices", self._devices, "--policy", self._policy]
        command += ["--state", "state", "--journal", "journal", "--json"]
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        self._child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=work, process_group=0
        )
        self._began = time.monotonic()

    def measure(self, table: Table, steady_s: float, limit_s: float) -> None:
        """Let it run until its shares are settled and for a while longer, and interrupt it."""
        assert self._child is not None
        try:
            while not _records(self._work / "journal") and self._child.poll() is None:
                time.sleep(_POLL_S)
            self._loaded_s = time.monotonic() - self._began
            self._kept = _settled(self._work / "journal", self._child, self._began + limit_s)
            if self._kept is not None:
                time.sleep(_LEAD_S + steady_s)
            self._child.send_signal(signal.SIGINT)
            time.sleep(0.2)
            self._child.send_signal(signal.SIGINT)  # without checkpoints
        except (KeyboardInterrupt, SystemExit):  # no time left: tell how far it came
            records = _records(self._work / "journal")
            told = [[round(r["at"], 2), r["planned"]["reason"]] for r in records if "planned" in r]
            how = {"mix": self.whole.name, "plans": told, "applied": _applied(self._work / "journal")}
            table.note("live, cut short", how)
            raise

    def finish(self, table: Table, solo: Sequence[float]) -> None:
        """Wait for its end, and note the rates it held, against those alone."""
        assert self._child is not None
        stdout, stderr = self._child.communicate(timeout=30.0)
        told = {"policy": self._policy, "deterministic": self.deterministic, "loaded_s": round(self._loaded_s, 2)}
        _write(table, self.whole, solo, self._work, self._kept, stdout, stderr, **told)

    def close(self, keep: Path | None) -> None:
        """End it whatever happened; what it wrote of itself goes to the folder `keep`."""
        if self._child is not None and self._child.poll() is None:
            self._child.kill()
            self._child.communicate()
        if keep is not None and self._child is not None:
            _keep(self._work, keep / f"{self.whole.name} {'equal bits' if self.deterministic else 'any bits'}")
        self._folder.cleanup()


def _keep(work: Path, folder: Path) -> None:
    """Copy what a run wrote of itself."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in [work / "journal", *(work / "state").rglob("story.jsonl"), *(work / "state").rglob("log")]:
        if path.is_file():
            name = path.name if path.name == "journal" else f"{path.parent.name} {path.name}"
            shutil.copyfile(path, folder / name)


def _settled(journal: Path, child: subprocess.Popen[str], until: float) -> float | None:
    """When the policy settled for shares that then came to hold, in the run's own seconds; None if it did not."""
    kept: float | None = None
    while child.poll() is None and time.monotonic() < until:
        time.sleep(_POLL_S)
        records = _records(journal)
        for record in records:
            if "keeps" in record.get("planned", {}).get("reason", ""):
                kept = record["at"]
        if kept is not None:
            orders = {change["job"] for r in records if r["at"] == kept for change in r["planned"].get("changes", ())}
            applied = {
                fact["job"]
                for r in records
                if r["at"] >= kept
                for fact in r.get("facts", ())
                if fact["fact"] == "AssignApplied"
            }
            if orders <= applied:
                return max(r["at"] for r in records if r["at"] >= kept)
    return None


def _applied(journal: Path) -> list[list[Any]]:
    """When which job came to hold what was ordered."""
    found = [(r["at"], fact) for r in _records(journal) for fact in r.get("facts", ())]
    return [[round(at, 2), fact["job"]] for at, fact in found if fact["fact"] == "AssignApplied"]


def _records(journal: Path) -> list[dict[str, Any]]:
    """The records so far; the last line may be half written."""
    try:
        lines = journal.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines[1:]:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


def _write(
    table: Table,
    whole: Mix,
    solo: Sequence[float],
    work: Path,
    kept: float | None,
    stdout: str,
    stderr: str,
    **more: Any,
) -> None:
    records = _records(work / "journal")
    plans = [[round(r["at"], 2), r["planned"]["reason"]] for r in records if r.get("planned", {}).get("reason")]
    stories = {
        path.parent.name: [json.loads(line)["what"] for line in path.read_text(encoding="utf-8").splitlines()]
        for path in (work / "state").rglob("story.jsonl")
    }
    told = {**more, "plans": plans, "applied": _applied(work / "journal"), "stories": stories}
    try:
        jobs = {job["name"]: job for job in json.loads(stdout)["jobs"]}
    except (json.JSONDecodeError, KeyError):
        table.fail(f"live {whole.name}", RuntimeError(f"no JSON: {stderr[-400:]}"))
        return
    names = [name(whole, place) for place in range(len(whole.tasks))]
    told["is_settled"] = kept is not None
    if kept is None:
        print(f"{whole.name}: not settled. {plans[-3:]} {stderr[-200:]}", flush=True)
        kept = max((record["at"] for record in records), default=0.0) - 3.0
    rates = [_rate(records, job, kept + _LEAD_S) * task.batch for job, task in zip(names, whole.tasks, strict=True)]
    probes = {fact["job"]: fact["rate"] for r in records for fact in r.get("facts", ()) if fact.get("alone")}
    shares = [jobs[job]["allocations"][-1]["fractions"][0] if jobs[job]["allocations"] else 0.0 for job in names]
    own = [probes.get(job, 0.0) * task.batch for job, task in zip(names, whole.tasks, strict=True)]
    told |= {"shares": [round(100 * share) for share in shares], "alone_by_probe": [round(rate, 1) for rate in own]}
    told |= {"settled_s": round(kept, 2), "measuring_s": round(_measuring_s(records), 2)}
    words = "/".join(str(share) for share in told["shares"])
    table.add("live", whole.name, f"carpool run, {more['policy']}: {words} %", rates, solo, **told)
    if all(own):
        print(
            f"{'':12} of its own rates alone: Σ {sum(r / o for r, o in zip(rates, own, strict=True)):.3f}", flush=True
        )


def _measuring_s(records: Sequence[dict[str, Any]]) -> float:
    """Seconds in which all jobs ran as ordered and were looked at, until shares were settled."""
    total, since = 0.0, None
    pending: set[str] = set()
    for record in records:
        for fact in record.get("facts", ()):
            if fact["fact"] == "AssignApplied":
                pending.discard(fact["job"])
                since = record["at"] if not pending else since
        planned = record.get("planned") or {}
        changes = {change["job"] for change in planned.get("changes", ())}
        if since is not None and (changes or "keeps" in planned.get("reason", "")):
            total += record["at"] - since
            since = None
        pending |= changes
        if "keeps" in planned.get("reason", ""):
            break
    return total


def _rate(records: Sequence[dict[str, Any]], job: str, since: float) -> float:
    """Steps per second from one instant on."""
    points = [
        (record["at"], fact["done"])
        for record in records
        for fact in record.get("facts", ())
        if fact["fact"] == "ProgressReported" and fact["job"] == job and record["at"] >= since
    ]
    if len(points) < 2:
        return 0.0
    return float((points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0]))
