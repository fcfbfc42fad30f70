"""Injects faults on a shared GPU through ``carpool run`` and compares the weights of all jobs.

Usage: PYTHONPATH=src python benchmarks/gpu_faults.py [--at-once] [--steps 400] [--out FILE]

Three jobs share one GPU under MPS at a third each (`mps-equal:slots=3`). The undisturbed run gives the reference
digests. Then one job is killed in a kernel; makes one illegal memory access; makes one at every attempt of that step;
and the MPS daemon is killed. JSON after each row.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from measured import RESULTS, ROOT, conditions
from trials.jobfile import job_file, story

from carpool.runtime.sharing.mps_daemon import CONTROL

JOBS = {"resnet": "resnet18", "mobile": "mobilenet_v3", "words": "transformer"}
LIMIT_S = 150.0
PAUSE_S = 0.01  # after every step, so that none has finished before another has started
STRUCK = "mobile"  # the job that the fault is in
SCENARIOS = ("undisturbed", "killed in a kernel", "illegal access", "illegal access, always", "daemon killed")


def faults(scenario: str, folder: Path, step: int) -> str:
    """What a worker of the struck job is told to do, as CARPOOL_FAULTS."""
    kinds = {"killed in a kernel": "kernel", "illegal access": "illegal", "illegal access, always": "illegal"}
    if scenario not in kinds:
        return "[]"
    once = "" if scenario.endswith("always") else str(folder / "mark")
    return json.dumps([{"job": STRUCK, "step": step, "kind": kinds[scenario], "once": once}])


def descendants(root: int) -> dict[int, str]:
    """Processes below one, with their programs: the kernel cuts names to 15 characters, command lines it does not."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "stat").read_text(errors="replace")
                command = (entry / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            except OSError:
                continue
            names[int(entry.name)] = Path(command).name
            parents[int(entry.name)] = int(words.rpartition(")")[2].split()[1])
    found: dict[int, str] = {}
    ring = {root}
    while ring:
        ring = {pid for pid, parent in parents.items() if parent in ring and pid not in found}
        found |= {pid: names[pid] for pid in ring}
    return found


def kill_daemon(child: subprocess.Popen[str], folder: Path, jobs: Iterable[str]) -> str:
    """Kill the MPS daemon below a process once all jobs have made some steps; what was killed."""
    until = time.monotonic() + LIMIT_S / 2
    while time.monotonic() < until and child.poll() is None:
        if all((folder / name).exists() for name in jobs):
            found = {pid: name for pid, name in descendants(child.pid).items() if name == CONTROL}
            for pid in found:
                os.kill(pid, signal.SIGKILL)
            return ", ".join(f"{name} ({pid})" for pid, name in found.items()) or "no daemon was found"
        time.sleep(0.02)
    return "the jobs did not come so far"


def played(scenario: str, jobs: Mapping[str, str], work: Path, steps: int, devices: str) -> dict[str, Any]:
    """Run the jobs under a fault; a row of the table."""
    folder = Path(tempfile.mkdtemp(dir=work))
    step = steps // 3
    path = job_file(folder, jobs, steps=steps, step=step, pause_s=PAUSE_S)
    command = [sys.executable, "-m", "carpool", "run", str(path), "--json", "--devices", devices]
    command += ["--policy", "mps-equal:slots=3", "--state", str(folder / "state")]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "CARPOOL_FAULTS": faults(scenario, folder, step)}
    began = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=folder)
    row: dict[str, Any] = {"scenario": scenario}
    if scenario == "daemon killed":
        row["killed"] = kill_daemon(child, folder, jobs)
    try:
        stdout, stderr = child.communicate(timeout=max(1.0, LIMIT_S - (time.monotonic() - began)))
        document = json.loads(stdout)
    except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        child.kill()
        stdout, stderr = child.communicate()
        return {**row, "error": f"{type(error).__name__}: {error}"[:200], "stderr": stderr[-1500:]}
    found = {job["name"]: job for job in document["jobs"]}
    return {
        **row,
        "code": child.returncode,
        "wall_s": round(time.monotonic() - began, 1),
        "digests": {name: job["digest"] for name, job in found.items()},
        "failed": {name: job["error"] for name, job in found.items() if job["error"]},
        "struck": row.get("killed", "").startswith("nvidia")
        or (folder / "mark").exists()
        or bool(found[STRUCK]["error"]),
        "stories": {name: story(folder / "state", name) for name in jobs},
    }


def judged(row: dict[str, Any], wanted: dict[str, str]) -> dict[str, Any]:
    """Whether everybody but the one to blame has the bits of the undisturbed run, and only that one failed."""
    digests = row.get("digests", {})
    blamed = {STRUCK} if row["scenario"].endswith("always") else set()
    same = {name: digests.get(name) == digest for name, digest in wanted.items()}
    is_right = row["scenario"] == "undisturbed" or bool(row.get("struck"))
    is_right = is_right and bool(same) and all(same[name] for name in same if name not in blamed)
    return {**row, "same_digests": same, "as_promised": is_right and set(row.get("failed", {})) == blamed}


def main() -> None:
    """Every scenario."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--at-once", action="store_true", help="all scenarios side by side, each with its own daemon")
    parser.add_argument("--only", default="", help="scenarios, divided by semicolons")
    parser.add_argument("--jobs", default="", help=f"NAME=MODEL, divided by commas; one is called {STRUCK}")
    parser.add_argument("--devices", default="cuda:0")
    parser.add_argument("--out", default="", help=f"write JSON here instead of {RESULTS.name}/gpu_faults.json")
    options = parser.parse_args()
    path = Path(options.out) if options.out else RESULTS / "gpu_faults.json"
    jobs = dict(part.split("=") for part in options.jobs.split(",")) if options.jobs else JOBS
    scenarios = options.only.split(";") if options.only else list(SCENARIOS)
    about = {"schema": 1, "benchmark": "gpu_faults", **conditions(), "steps": options.steps, "jobs": jobs}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(len(scenarios) if options.at_once else 1) as pool:
        how = jobs, Path(work), options.steps, options.devices
        running = {pool.submit(played, name, *how): name for name in scenarios}
        for ended in as_completed(running):
            error = ended.exception()  # one row is lost, not the others
            rows.append({"scenario": running[ended], "error": repr(error)[:500]} if error else ended.result())
            wanted = next((row.get("digests", {}) for row in rows if row["scenario"] == "undisturbed"), {})
            found = [judged(row, wanted) for row in rows]
            path.write_text(json.dumps({**about, "results": found}, indent=1) + "\n", encoding="utf-8")
            row = found[-1]
            told = {key: row.get(key) for key in ("code", "wall_s", "struck", "killed", "failed", "error")}
            print(f"{row['scenario']:24} {told}", flush=True)
    for row in found:
        words = "as promised" if row["as_promised"] else "NOT AS PROMISED"
        print(f"{row['scenario']:24} {words}: equal digests {row['same_digests']}", flush=True)


if __name__ == "__main__":
    main()
