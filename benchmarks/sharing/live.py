"""Runs the mixes through ``carpool run``: shares chosen by the policy or held in turn, and the rates at them."""

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
from math import inf
from pathlib import Path
from typing import Any

from measured import ROOT
from sharing import fed, journal
from sharing.mixes import Mix
from sharing.table import Table, fair, total
from zoo import ENTRIES

WALK = Path(__file__).with_name("walk.py")
_FOREVER = 10_000_000  # steps
_POLL_S = 0.1
_LEAD_S = 0.5  # after the last change, before rates count
_END_S = 30.0  # from the interrupt to the end


def job_file(whole: Mix, *, deterministic: bool, graph: bool = True) -> str:
    """A job file of a mix; every job runs until it is interrupted."""
    switches = f"deterministic = {str(deterministic).lower()}\ngraph = {str(graph).lower()}\n"
    tables = ['[defaults]\nprecision = "tf32"\nchannels_last = true\ncheckpoint_every = "1h"\n' + switches]
    for place, task in enumerate(whole.tasks):
        args: dict[str, Any] = {"batch_size": task.batch, "steps": _FOREVER, **task.sizes}
        entry = f"{ENTRIES}:{task.model}"
        if task.per_s:
            entry, args = f"{fed.__file__}:delivered", {"model": task.model, "per_s": task.per_s, **args}
        words = ", ".join(f"{key} = {json.dumps(value)}" for key, value in args.items())
        tables.append(f'[[job]]\nname = "{name(whole, place)}"\nentry = "{entry}"\nargs = {{ {words} }}\n')
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
        self.policy = policy
        self._devices = devices
        self._folder = tempfile.TemporaryDirectory()
        self._work = Path(self._folder.name)
        self._child: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self._loaded_s = 0.0  # from its start until it had decided something
        self._kept: float | None = None
        self._steady_s = inf  # that rates are counted for

    @property
    def is_walk(self) -> bool:
        """Whether equal shares follow on those that it chooses."""
        return self.policy.startswith(str(WALK))

    def start(self) -> None:
        """Begin, unless it has."""
        if self._child is not None:
            return
        work = self._work
        (work / "jobs.toml").write_text(job_file(self.whole, deterministic=self.deterministic), encoding="utf-8")
        command = [sys.executable, "-m", "carpool", "run", "jobs.toml"]
        command += ["--devices", self._devices, "--policy", self.policy]
        command += ["--state", "state", "--journal", "journal", "--json"]
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        with (work / "out").open("wb") as out, (work / "err").open("wb") as err:  # a pipe that nobody reads fills up
            self._child = subprocess.Popen(command, stdout=out, stderr=err, env=env, cwd=work, process_group=0)
        self._began = time.monotonic()

    def measure(self, table: Table, steady_s: float, limit_s: float, until: float) -> None:
        """Let it run until its shares are settled and for a while longer, and interrupt it.

        That is done anyhow once it has run for `limit_s`, or when the clock says `until`.
        """
        assert self._child is not None
        is_over, until = False, min(until, self._began + limit_s)
        try:
            while not self._records() and self._child.poll() is None and time.monotonic() < until:
                time.sleep(_POLL_S)
            self._loaded_s = time.monotonic() - self._began
            while not is_over and self._child.poll() is None and time.monotonic() < until:
                time.sleep(_POLL_S)
                records = self._records()
                self._kept = journal.settled_at(records)
                is_over = journal.is_walked(records) if self.is_walk else self._kept is not None
            if is_over and not self.is_walk:
                self._steady_s = steady_s
                time.sleep(_LEAD_S + steady_s)
            self._child.send_signal(signal.SIGINT)
            time.sleep(0.2)
            self._child.send_signal(signal.SIGINT)  # without checkpoints
        except (KeyboardInterrupt, SystemExit):  # no time left: tell how far it came
            records = self._records()
            how = {"plans": journal.plans(records), "applied": journal.applied(records)}
            table.note("live, cut short", {"mix": self.whole.name, **how})
            raise

    def finish(self, table: Table, solo: Sequence[float], by_code: Sequence[float] = ()) -> None:
        """Wait for its end, and note the rates it held, against those alone; where these are not given, its probes'.

        What it held is in its journal, even if it does not end in time.
        """
        self._end(_END_S)
        records = self._records()
        told: dict[str, Any] = {"deterministic": self.deterministic, "loaded_s": round(self._loaded_s, 2)}
        told |= {"plans": journal.plans(records), "applied": journal.applied(records), "stories": self._stories()}
        told["is_settled"] = self._kept is not None
        if self._kept is None:
            said = (self._work / "err").read_text(encoding="utf-8", errors="replace")[-500:]
            print(f"{self.whole.name}: not settled. {told['plans'][-3:]} {said}", flush=True)
        self._write(table, solo, by_code, records, told)

    def close(self, keep: Path | None) -> None:
        """End it whatever happened; what it wrote of itself goes to the folder `keep`."""
        if self._child is not None:
            self._end(0.0)
        if keep is not None and self._child is not None:
            _keep(self._work, keep / f"{self.whole.name} {'equal bits' if self.deterministic else 'any bits'}")
        self._folder.cleanup()

    # --------------------------------------------------------------------------------------------------------- inside
    def _end(self, limit_s: float) -> None:
        assert self._child is not None
        try:
            self._child.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _records(self) -> journal.Records:
        return journal.read(self._work / "journal")

    def _stories(self) -> dict[str, list[str]]:
        return {
            path.parent.name: [json.loads(line)["what"] for line in path.read_text(encoding="utf-8").splitlines()]
            for path in (self._work / "state").rglob("story.jsonl")
        }

    def _rates(self, records: journal.Records, *span: float) -> list[float]:
        """Samples per second of each job from one instant to another."""
        tasks = enumerate(self.whole.tasks)
        return [journal.rate(records, name(self.whole, place), *span) * task.batch for place, task in tasks]

    def _write(
        self,
        table: Table,
        solo: Sequence[float],
        by_code: Sequence[float],
        records: journal.Records,
        told: dict[str, Any],
    ) -> None:
        """The chosen shares, then the equal ones if there were any."""
        kept = self._kept
        if kept is None:
            kept = max((record["at"] for record in records), default=0.0) - 3.0
        left = journal.left_at(records)
        since = kept + _LEAD_S
        rates = self._rates(records, since, min(left, since + self._steady_s))
        names = [name(self.whole, place) for place in range(len(self.whole.tasks))]
        shares = journal.shares(records, names, left)
        probes = journal.probed(records)
        own = [probes.get(job, 0.0) * task.batch for job, task in zip(names, self.whole.tasks, strict=True)]
        alone = solo or (own if all(own) else None)
        told |= {"policy": "competitive" if self.is_walk else self.policy, "shares": shares}
        told |= {"alone_by_probe": [round(rate, 1) for rate in own], "settled_s": round(kept, 2)}
        told["measuring_s"] = round(journal.measuring_s(records), 2)
        if by_code:
            told["sum_of_eager"] = round(total(rates, by_code), 3)
        words = "/".join(str(share) for share in shares)
        table.add("live", self.whole.name, f"carpool run, {told['policy']}: {words} %", rates, alone, **told)
        if solo and all(own):
            print(f"{'':12} of its own rates alone: Σ {total(rates, own):.3f}", flush=True)
        if by_code:
            print(f"{'':12} {told['sum_of_eager']:.2f} times one after another, eager", flush=True)
        for share, since, until in journal.held(records):
            rates = self._rates(records, since + _LEAD_S, until)
            more = {"share": share, "seconds": round(until - since - _LEAD_S, 2), "deterministic": self.deterministic}
            table.add("live", self.whole.name, f"carpool run, {share} % each", rates, alone, **more)


def compared(table: Table, mix: str) -> None:
    """How far the shares that a run chose are ahead of the best equal ones in the fair measure, both live."""
    rows = [row for row in table.rows if row.get("mix") == mix and row["stage"] == "live" and all(row["rates"])]
    chosen = next((row for row in rows if "policy" in row), None)
    equal = [row for row in rows if "share" in row]
    if chosen is not None and equal:
        ahead, best = min((fair(chosen["rates"], row["rates"]) - 1.0, row["share"]) for row in equal)
        told = {"chosen": chosen["shares"], "best_equal": best, "ahead": round(ahead, 4)}
        table.note("live, compared", {"mix": mix, **told})


def _keep(work: Path, folder: Path) -> None:
    """Copy what a run wrote of itself."""
    folder.mkdir(parents=True, exist_ok=True)
    of_jobs = [path for name in ("story.jsonl", "log") for path in (work / "state").rglob(name)]
    for path in [work / "journal", work / "err", *of_jobs]:
        if path.is_file():
            name = path.name if path.parent == work else f"{path.parent.name} {path.name}"
            shutil.copyfile(path, folder / name)
