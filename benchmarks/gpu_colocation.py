"""Measures trainings alone and in groups on one GPU under MPS, at various shares.

Usage: PYTHONPATH=src python benchmarks/gpu_colocation.py [--out FILE] [--budget SECONDS] [--device cuda|cpu]

Every task is a process with a fixed active thread percentage, its step one CUDA graph. A wave of tasks is resident at
each share; groups of them run in a common window, and only steps inside it count. The table trains `interference.py`
and is what `--world colocation:FILE` simulates. About five minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from colocation.daemon import mps
from colocation.groups import Member, groups
from colocation.seat import Gone, Seat, Window
from colocation.tasks import PROBES, SHARES, WAVES, Task
from colocation.traits import Clerks
from measured import RESULTS, conditions

_LOAD_S, _RUN_S = 90.0, 20.0  # longest waits for an answer
_BETWEEN_S = 12.0  # what loading the next wave takes, or ending
_QUERY = "utilization.gpu,utilization.memory,power.draw.instant,clocks.sm"


@dataclass(slots=True)
class Gauge:
    """What the driver says of the device, sampled all the time."""

    samples: list[tuple[float, list[float]]] = field(default_factory=list)
    _child: Any = None

    def __enter__(self) -> Gauge:
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", "-lms", "50"]
        try:
            self._child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            return self
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def _read(self) -> None:
        for line in self._child.stdout:
            try:
                self.samples.append((time.monotonic(), [float(cell) for cell in line.split(",")]))
            except ValueError:
                continue

    def between(self, start: float, end: float) -> list[float]:
        """The means over the samples of an interval."""
        rows = [row for at, row in list(self.samples) if start <= at <= end]
        return [round(sum(column) / len(rows), 2) for column in zip(*rows, strict=True)] if rows else []


class Table:
    """The results as they come, kept on disk from the first wave on."""

    def __init__(self, path: Path, before: Path | None) -> None:
        self.path = path
        device = torch_device()
        if before is not None:
            self.document: dict[str, Any] = json.loads(before.read_text(encoding="utf-8"))
            return
        self.document = {
            "schema": 1,
            "benchmark": "gpu_colocation",
            **conditions(),
            "device": device,
            "shares": SHARES,
            "tasks": {},
            "alone": [],  # [wave, task, share, SMs, steps/s, gauge: SM %, memory %, W, MHz]
            "probed": [],  # [wave, task, steps/s beside the probe, probe, the probe's steps/s]
            "together": [],  # [wave, [task, share, steps/s], …]
        }

    def task(self, name: str, facts: dict[str, Any]) -> None:
        """Add to what is known of a task."""
        self.document["tasks"].setdefault(name, {}).update(facts)

    def save(self) -> None:
        """One line for each entry, so that it stays small and can be read."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        parts = []
        for key, value in self.document.items():
            if isinstance(value, list) and value and isinstance(value[0], list):
                rows = ",\n".join("  " + json.dumps(row) for row in value)
                parts.append(f" {json.dumps(key)}: [\n{rows}\n ]")
            elif key == "tasks":
                rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(facts)}" for name, facts in value.items())
                parts.append(f' "tasks": {{\n{rows}\n }}')
            else:
                parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
        self.path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def torch_device() -> str:
    """The device's name, asked of the driver: this process must not touch it."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "cpu"


@dataclass(slots=True)
class Session:
    """The seats, the clock and the table of one run."""

    seats: dict[tuple[str, int], Seat]
    table: Table
    gauge: Gauge
    solo_s: dict[tuple[str, int], float] = field(default_factory=dict)  # seconds of a step alone

    def measure(self, members: Sequence[Member], least_s: float = 0.15) -> list[float]:
        """Steps per second of each member, all of them running at once."""
        seats = [self.seats[member.task.name, member.share] for member in members]
        longest = max(self.solo_s.get((m.task.name, m.share), 0.03) for m in members) * (0.5 + 0.5 * len(members))
        start = time.monotonic() + 0.003
        count_from = start + max(0.03, 1.5 * longest)
        window = Window(start, count_from, count_from + min(0.8, max(least_s, 4.0 * longest)))
        for seat in seats:
            seat.ask("run", window)
        answers = [seat.answer(_RUN_S) for seat in seats]
        for answer in answers:
            if "error" in answer:
                raise Gone(answer["error"])
        self._last = window
        return [round(answer["steps_per_s"], 3) for answer in answers]

    _last: Window = field(default_factory=lambda: Window(0.0, 0.0, 0.0))

    def alone(self, wave: int, task: Task, share: int) -> None:
        """One task by itself; at the whole device long enough for the driver's gauges."""
        whole = share == 100
        (rate,) = self.measure([Member(task, share)], 0.45 if whole else 0.15)
        self.solo_s[task.name, share] = 1.0 / max(rate, 1e-6)
        gauge = self.gauge.between(self._last.count_from + 0.15, self._last.count_until) if whole else []
        sms = self.table.document["tasks"][task.name].get("sms", {}).get(str(share), 0)
        self.table.document["alone"].append([wave, task.name, share, sms, rate, *gauge])


def load(session: Session, wave: Sequence[Task]) -> list[Task]:
    """Put the tasks of a wave on the seats, one for each share, all at once; those that can run at every share."""
    wanted = {(task.name, share): task for task in wave for share in SHARES}
    stays = {key: seat for key, seat in session.seats.items() if key in wanted or key[0].startswith("probe")}
    idle: dict[int, list[tuple[str, int]]] = {share: [] for share in SHARES}
    for key, seat in session.seats.items():
        if key not in stays:
            idle[seat.share].append(key)
    for keys in idle.values():
        for key in keys:
            session.seats[key].ask("clear")
        for key in keys:
            session.seats[key].answer(_LOAD_S)
    loading = {}
    for (name, share), task in wanted.items():
        if (name, share) not in stays:
            seat = stays[name, share] = session.seats[idle[share].pop()]
            seat.ask("load", task)
            loading[name, share] = seat
    spare = {key: session.seats[key] for keys in idle.values() for key in keys}
    session.seats = {**spare, **stays}
    failed = set()
    for (name, share), seat in loading.items():
        found = seat.answer(_LOAD_S)
        if "error" in found:
            failed.add(name)
            session.seats[f"failed-{name}", share] = session.seats.pop((name, share))
            print(f"{name} at {share} %: {found['error'][:160]}", file=sys.stderr, flush=True)
        else:
            note_loaded(session.table, wanted[name, share], share, found)
    return [task for task in wave if task.name not in failed]


def note_loaded(table: Table, task: Task, share: int, found: dict[str, Any]) -> None:
    """Keep how a task runs at a share."""
    own = {"model": task.name.split("@")[0], "batch": task.batch, "fed": task.is_fed, "host_bytes": task.host_bytes}
    table.task(task.name, own)
    facts = table.document["tasks"][task.name]
    facts.setdefault("sms", {})[str(share)] = found["sms"]
    facts["graph"] = bool(facts.get("graph", True) and found["graph"])
    if found.get("note"):
        facts["note"] = found["note"]
    if share == 100:
        facts["reserved_bytes"] = found["reserved_bytes"]


def run_wave(session: Session, index: int, wave: Sequence[Task], until: float, seed: int) -> None:
    """Everything of one wave, the groups in random order until the time is up."""
    table = session.table
    for task in wave:
        for share in SHARES:
            session.alone(index, task, share)
    for probe in PROBES:
        session.alone(index, probe, 100)
        for task in wave:
            rates = session.measure([Member(task, 100), Member(probe, 100)], 0.12)
            table.document["probed"].append([index, task.name, rates[0], probe.name, rates[1]])
    done = 0
    wanted = groups(wave, SHARES, random.Random(seed))
    for members in wanted:
        if time.monotonic() > until:
            break
        rates = session.measure(members)
        rows = [[m.task.name, m.share, rate] for m, rate in zip(members, rates, strict=True)]
        table.document["together"].append([index, *rows])
        done += 1
    print(f"wave {index}: {done} of {len(wanted)} groups", flush=True)


def show(table: Table) -> None:
    """One line for each task: its rate at each share, relative to the whole device."""
    rates: dict[str, dict[int, float]] = {}
    for _, name, share, _, rate, *_ in table.document["alone"]:
        rates.setdefault(name, {})[share] = rate
    for name, by_share in rates.items():
        whole = by_share.get(100, 0.0) or 1.0
        facts = table.document["tasks"].get(name, {})
        relative = " ".join(f"{share}: {by_share.get(share, 0.0) / whole:.2f}" for share in SHARES[1:])
        how = "graph" if facts.get("graph") else f"eager ({facts.get('note', '')})"
        print(f"{name:24} {whole:9.1f} steps/s  {relative}  {how}", flush=True)


def main() -> int:
    """Measure wave by wave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_colocation.json")
    parser.add_argument("--budget", type=float, default=320.0, help="seconds for everything")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--waves", default="0,1,2,3", help="which waves, comma-separated")
    parser.add_argument("--append", type=Path, help="a table of other waves to go on with")
    parser.add_argument("--only", default="", help="models, comma-separated, for a quick look")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    torch.set_num_threads(1)
    only = options.only.split(",") if options.only else []
    waves = {
        int(index): [task for task in WAVES[int(index)] if not only or task.model in only]
        for index in options.waves.split(",")
    }
    table = Table(options.out, options.append)
    known = table.document["tasks"]
    tasks = list({task.name: task for wave in WAVES for task in wave if not only or task.model in only}.values())
    tasks = [task for task in tasks if "peak_bytes" not in known.get(task.name, {})]
    clerks = Clerks(tasks, options.device, 6 if options.device == "cuda" else 1)
    with mps() as environment, Gauge() as gauge:
        seats: dict[tuple[str, int], Seat] = {}
        most = max(map(len, waves.values()))
        for place in range(most):
            for share in SHARES:
                seats[f"none-{place}", share] = Seat(share, environment, options.device)
        session = Session(seats, table, gauge)
        try:
            for probe in PROBES:
                seat = seats[probe.name, 100] = Seat(100, environment, options.device)
                seat.ask("load", probe)
                note_loaded(table, probe, 100, seat.answer(_LOAD_S))
            for left, (index, wanted) in zip(range(len(waves), 0, -1), waves.items(), strict=True):
                wave = load(session, wanted)
                if left == len(waves):
                    for name, facts in clerks.collect(15.0).items():
                        table.task(name, facts)
                elapsed = time.monotonic() - began
                print(f"{elapsed:5.0f} s: wave {index} of {len(wave)} tasks is loaded", flush=True)
                until = began + elapsed + (options.budget - elapsed) / left - _BETWEEN_S
                run_wave(session, index, wave, until, options.seed + index)
                table.save()
        except Gone as error:
            print(f"stopped: {error}", file=sys.stderr, flush=True)
            return 1
        finally:
            for seat in list(session.seats.values()):
                seat.close()
            table.save()
            show(table)
    print(f"{time.monotonic() - began:.0f} s, {len(table.document['together'])} groups; {table.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
