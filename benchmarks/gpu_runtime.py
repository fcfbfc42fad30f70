"""Compares the digests of example jobs on one GPU under switching, kill and resume, in default and exact mode.

    python benchmarks/gpu_runtime.py [--devices cuda] [--at-once 5] [--out FILE]

Nothing is timed, so several cases may run at once. Exits with 1 unless all digests of a mode are equal.
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
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from measured import RESULTS, ROOT, conditions

EXAMPLES = ROOT / "examples"
JOBS = {  # job -> the rest of its table in a job file
    "mlp": 'entry = "digits.py:mlp"\nargs = { epochs = 6 }',
    "cnn": 'entry = "digits.py:cnn"\nargs = { epochs = 4 }',
    "adam": 'entry = "digits.py:mlp"\nargs = { epochs = 6, optimizer = "adamw" }',
    "lstm": 'entry = "lstm_language_model.py:lstm"\nargs = { epochs = 2 }',
}
LIMIT_S = 150.0
FIRST, RESUMED = "one after another", "interrupted and resumed"


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


def run(folder: Path, *args: str, interrupt_at: str = "", **environment: str) -> dict[str, Any]:
    """``carpool run --json``; with `interrupt_at` Ctrl-C is pressed once a job of that name has begun."""
    command = [sys.executable, "-m", "carpool", "run", str(folder / "jobs.toml"), "--json", *args]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=folder)
    try:
        if interrupt_at:
            begun = folder / "state" / "jobs" / interrupt_at / "log"
            until = time.monotonic() + LIMIT_S
            while child.poll() is None and not begun.exists() and time.monotonic() < until:
                time.sleep(0.05)
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
    if name == FIRST:
        result = run(folder, *basic, "--policy", "fifo")
    elif name == "switched":
        result = run(folder, *basic, "--policy", "mps-equal:slots=4", "--lanes", "slice")
    elif name == "side by side":
        result = run(folder, *basic, "--policy", "mps-equal:slots=4")
    elif name == "killed":
        faults = [{"job": job, "step": 20, "kind": "kill", "once": str(folder / f"mark-{job}")} for job in JOBS]
        result = run(folder, *basic, "--policy", "fifo", CARPOOL_FAULTS=json.dumps(faults))
    else:
        result = run(folder, *basic, "--policy", "fifo", interrupt_at=list(JOBS)[1])
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


def differing(rows: list[dict[str, Any]], row: dict[str, Any]) -> list[str]:
    """The jobs whose weights are not those of the first way in the same mode."""
    first = next(other for other in rows if other["exact"] == row["exact"] and other["scenario"] == FIRST)
    base = first["digests"]
    return [job for job in JOBS if not row["digests"].get(job) or row["digests"][job] != base.get(job)]


def judge(rows: list[dict[str, Any]]) -> int:
    """Print how the digests compare; the exit code."""
    unlike = 0
    for row in rows:
        others = differing(rows, row)
        unlike += bool(others)
        problem = f"{row.get('error', '')} {row.get('failed', '')} {row.get('stderr', '')[-600:]}".strip()
        told = "all equal" if not others else f"UNEQUAL {others} {problem}"
        print(f"{'exact' if row['exact'] else 'default':8} {row['scenario']:24} code {row['code']}, {told}", flush=True)
    print(f"{len(rows) - unlike} of {len(rows)} ways gave the weights of the first")
    return 1 if unlike else 0


def main() -> int:
    """Run every scenario and compare digests with the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_runtime.json")
    parser.add_argument("--devices", default="cuda")
    parser.add_argument("--at-once", type=int, default=1, help="ways that run at the same time")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    # Lanes of unlike sizes have unlike bits, so side by side only exact jobs can be compared: theirs are whole.
    cases = [(name, exact) for exact in (False, True) for name in (FIRST, "switched", "killed", RESUMED)]
    cases.append(("side by side", True))
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(options.at_once) as pool:
        started = [pool.submit(scenario, name, options.devices, exact, Path(work)) for name, exact in cases]
        for future in as_completed(started):
            row = future.result()
            rows.append(row)
            print(f"{row['scenario']}, exact {row['exact']}: {row['wall_s']} s, code {row['code']}", flush=True)
            document = {"schema": 1, **conditions(), "results": rows}
            options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    rows.sort(key=lambda row: cases.index((row["scenario"], row["exact"])))
    return judge(rows)


if __name__ == "__main__":
    sys.exit(main())
