"""One GPU: the example jobs unchanged, their digests under switching, kill and resume, and what carpool costs a step.

Usage: PYTHONPATH=src python benchmarks/gpu_runtime.py [--out FILE] [--devices cuda]
Every child has a time limit. Needs a GPU, torch, and nothing else that carpool does not need anyway.
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
from pathlib import Path
from typing import Any

from measured import ROOT, conditions

EXAMPLES = ROOT / "examples"
JOBS = {  # job -> the rest of its table in a job file
    "mlp": 'entry = "digits.py:mlp"\nargs = { epochs = 6 }',
    "cnn": 'entry = "digits.py:cnn"\nargs = { epochs = 4 }',
    "adam": 'entry = "digits.py:mlp"\nargs = { epochs = 6, optimizer = "adamw" }',
    "lstm": 'entry = "lstm_language_model.py:lstm"\nargs = { epochs = 2 }',
}
LIMIT_S = 150.0


def job_file(folder: Path, names: list[str], *, exact: bool) -> Path:
    """A job file of some of the jobs."""
    tables = [
        f'[[job]]\nname = "{name}"\nfolder = "{EXAMPLES}"\nexact = {str(exact).lower()}\nmax_devices = 1\n'
        + JOBS[name]
        + "\n"
        for name in names
    ]
    path = folder / "jobs.toml"
    path.write_text("\n".join(tables), encoding="utf-8")
    return path


def run(folder: Path, *args: str, interrupt_s: float = 0.0, **environment: str) -> dict[str, Any]:
    """``carpool run --json``; with `interrupt_s` Ctrl-C is pressed after so many seconds."""
    command = [sys.executable, "-m", "carpool", "run", str(folder / "jobs.toml"), "--json", *args]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=folder)
    try:
        if interrupt_s:
            try:
                child.wait(interrupt_s)
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGINT)
        stdout, stderr = child.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        stdout, stderr = child.communicate()
        return {"error": f"no end after {LIMIT_S:.0f} s", "stderr": stderr[-1500:]}
    try:
        return {"code": child.returncode, **json.loads(stdout)}
    except json.JSONDecodeError:
        return {"error": f"exit code {child.returncode}", "stderr": stderr[-1500:]}


def digests(result: dict[str, Any]) -> dict[str, str]:
    """Digest by job."""
    return {job["name"]: job["digest"] for job in result.get("jobs", [])}


def scenario(name: str, devices: str, exact: bool, work: Path) -> dict[str, Any]:
    """One way of running all jobs; their digests."""
    folder = Path(tempfile.mkdtemp(dir=work))
    job_file(folder, list(JOBS), exact=exact)
    started = time.perf_counter()
    basic = ["--devices", devices, "--state", str(folder / "state")]
    if name == "one after another":
        result = run(folder, *basic, "--policy", "fifo")
    elif name == "switched":
        result = run(folder, *basic, "--policy", "mps-equal:slots=4", "--lanes", "slice")
    elif name == "side by side":
        result = run(folder, *basic, "--policy", "mps-equal:slots=4")
    elif name == "killed":
        faults = [{"job": job, "step": 20, "kind": "kill", "once": str(folder / f"mark-{job}")} for job in JOBS]
        result = run(folder, *basic, "--policy", "fifo", CARPOOL_FAULTS=json.dumps(faults))
    else:
        result = run(folder, *basic, "--policy", "fifo", interrupt_s=14.0)
        first = result.get("code")
        if first == 130:
            result = run(folder, *basic, "--policy", "fifo", "--resume")
        result["interrupted_with"] = first
    found = {"scenario": name, "exact": exact, "wall_s": round(time.perf_counter() - started, 1)}
    found |= {
        "digests": digests(result),
        "code": result.get("code"),
        "interrupted_with": result.get("interrupted_with"),
    }
    if result.get("error"):
        found |= {"error": result["error"], "stderr": result.get("stderr", "")}
    failed = {job["name"]: job["error"] for job in result.get("jobs", []) if job["error"]}
    return found | ({"failed": failed} if failed else {})


def main() -> None:
    """Run every scenario and compare digests with the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="", help="write JSON here")
    parser.add_argument("--devices", default="cuda")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        for exact in (False, True):
            first = len(rows)
            # Lanes of unlike sizes have unlike bits, so side by side only exact jobs can be compared: theirs are whole.
            names = ["one after another", "switched", *["side by side"] * exact, "killed", "interrupted and resumed"]
            for name in names:
                row = scenario(name, options.devices, exact, Path(work))
                rows.append(row)
                base = rows[first]["digests"]
                equal = {job: row["digests"].get(job) == base.get(job) is not None for job in JOBS}
                told = (
                    "all equal"
                    if all(equal.values())
                    else f"UNEQUAL {[job for job, same in equal.items() if not same]}"
                )
                print(
                    f"{'exact' if exact else 'default':8} {name:24} {row['wall_s']:6.1f} s, code {row['code']}, {told} "
                    f"{row.get('error', '')} {row.get('failed', '')} {row.get('stderr', '')[-600:]}",
                    flush=True,
                )
                if options.out:  # as they come: a run that is cut short leaves what it found
                    document = {"schema": 1, **conditions(), "results": rows}
                    Path(options.out).write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
