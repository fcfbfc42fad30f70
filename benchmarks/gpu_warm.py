"""Measures the time from a job's `Assign` to its first step: in a warm, a forked and a fresh process.

Usage: PYTHONPATH=src python benchmarks/gpu_warm.py [--models resnet18,…] [--devices cuda:0] [--out FILE]

``carpool run`` gives one GPU to one job after another (`fifo`). The clock runs from the order until the device has
done the first (eager) step, including import, data, model and transfer. The first job is forked, as with ``--warm 0``;
the second is the same on a warm process and must end with the same weights. Fresh processes run at the end, at most
one per core. JSON after each row.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from measured import RESULTS, ROOT, conditions
from trials.jobfile import BATCH, entry_of, job_file, story
from trials.stamped import PARTS, spans

from carpool.cli.main import run as carpool_run
from carpool.core.messages import Assign, Order
from carpool.runtime.executor.client import ExecutorClient

CHOSEN = "resnet18,vgg16,mobilenet_v3,resnet50,transformer,examples/digits.py:cnn,examples/cifar10_cnn.py:cnn"
LIMIT_S = 120.0
_TELLING = "ready after|started in|another program|no prewarmed processes"  # words of a story that explain a start
GOAL_S = 1.0


class Orders:
    """When each job was first assigned, seen where orders leave the scheduler's process."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}
        self._carry = ExecutorClient.carry

    def __enter__(self) -> Orders:
        seen, carry = self, self._carry

        def stamp(link: ExecutorClient, orders: Sequence[Order]) -> None:
            for order in orders:
                if isinstance(order, Assign):
                    seen.at.setdefault(order.job, time.monotonic())
            carry(link, orders)

        ExecutorClient.carry = stamp  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        ExecutorClient.carry = self._carry  # type: ignore[method-assign]


def timed(out: Path, began: float) -> dict[str, float]:
    """How long it took to the first step, and what for."""
    return {name: round(seconds, 3) for name, seconds in spans(out, began).items()}


def one_after_another(
    models: Sequence[str], devices: str, warm: int, seconds: float, keep: Callable[[dict[str, Any]], None]
) -> None:
    """Run them by ``carpool run``; a row for each."""
    with tempfile.TemporaryDirectory() as work:
        folder, state = Path(work), Path(work) / "state"
        jobs = {f"job{number}": model for number, model in enumerate(models)}
        path = job_file(folder, jobs, steps=10, pause_s=seconds / 10)
        words = ["run", str(path), "--devices", devices, "--policy", "fifo", "--warm", str(warm), "--state", str(state)]
        said = io.StringIO()
        with Orders() as orders, contextlib.redirect_stdout(said):
            code = carpool_run([*words, "--json"])
        digests = {job["name"]: job["digest"] for job in json.loads(said.getvalue())["jobs"]}
        for name, model in jobs.items():
            told = [words for words in story(state, name) if "prewarmed" in words]
            row: dict[str, Any] = {"model": model, "start": "warm seat" if told else "forked", "code": code}
            row["digest"] = digests[name]
            row["story"] = story(state, name)
            if (folder / name).exists() and name in orders.at:
                row |= timed(folder / name, orders.at[name])
            keep(row)


def fresh(models: Sequence[str], device: str, keep: Callable[[dict[str, Any]], None]) -> None:
    """Each in a process of its own that imports torch first; several at once."""
    program = (
        "import sys, json, time\n"
        "from trials.stamped import stamped\n"
        "from carpool.runtime.engine.trainer import Trainer\n"
        "trainer = Trainer(stamped(**json.loads(sys.argv[1])), device=sys.argv[2], graph=False)\n"
        "trainer.step()\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with tempfile.TemporaryDirectory() as work:
        children = []
        for number, model in enumerate(models):
            out = Path(work) / str(number)
            given = json.dumps({**entry_of(model), "out": str(out), "steps": 1})
            began = time.monotonic()
            child = subprocess.Popen([sys.executable, "-c", program, given, device], cwd=Path(__file__).parent, env=env)
            children.append((model, out, began, child))
        for model, out, began, child in children:
            row: dict[str, Any] = {"model": model, "start": "fresh process"}
            try:
                row["code"] = child.wait(LIMIT_S)
                row |= timed(out, began)
            except (subprocess.TimeoutExpired, OSError, ValueError) as error:
                child.kill()
                row["error"] = f"{type(error).__name__}: {error}"[:200]
            keep(row)


def batched(models: Sequence[str], most: int) -> list[Sequence[str]]:
    """At most so many at once."""
    return [models[first : first + most] for first in range(0, len(models), most)]


def main() -> None:
    """All three ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=CHOSEN)
    parser.add_argument("--devices", default="cuda:0")
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="that each job lasts: the next seat warms up meanwhile"
    )
    parser.add_argument("--forked", default="", help="models to run with --warm 0 as well")
    parser.add_argument("--fresh", action=argparse.BooleanOptionalAction, default=True, help="fresh processes as well")
    parser.add_argument("--out", default="", help=f"write JSON here instead of {RESULTS.name}/gpu_warm.json")
    options = parser.parse_args()
    path = Path(options.out) if options.out else RESULTS / "gpu_warm.json"
    rows: list[dict[str, Any]] = []
    about = {"schema": 1, "benchmark": "gpu_warm", **conditions(), "batch": BATCH, "goal_s": GOAL_S}

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        print(
            f"{row['start']:16} {row['model']:32} {row.get('first_step_s', row.get('error'))} s, "
            f"entry called after {row.get('to_entry_s')} s; "
            f"{', '.join(f'{part} {row.get(part)}' for part in PARTS)}; "
            f"{[words for words in row.get('story', ()) if re.match(_TELLING, words)]}",
            flush=True,
        )
        path.write_text(json.dumps({**about, "results": rows}, indent=1) + "\n", encoding="utf-8")

    models = options.models.split(",")
    one_after_another([models[0], *models], options.devices, 1, options.seconds, keep)
    if options.forked:
        one_after_another(options.forked.split(","), options.devices, 0, 0.0, keep)
    for few in batched(models, len(os.sched_getaffinity(0))) if options.fresh else []:
        fresh(few, "cpu" if options.devices.startswith("cpu") else "cuda", keep)
    kept: dict[str, set[str]] = {}
    for row in rows:
        if row.get("digest"):
            kept.setdefault(row["model"], set()).add(row["digest"])
    print(f"weights unlike between ways to start: {[model for model, found in kept.items() if len(found) > 1] or None}")
    warm = [row["first_step_s"] for row in rows if row["start"] == "warm seat" and "first_step_s" in row]
    print(
        f"warm: {sum(each <= GOAL_S for each in warm)} of {len(warm)} within {GOAL_S} s; worst {max(warm, default=0)} s"
    )


if __name__ == "__main__":
    main()
