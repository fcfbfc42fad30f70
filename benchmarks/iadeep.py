"""Compares completion times and makespan of `iadeep` and its halves with sharing baselines; tests its tuner.

Usage: PYTHONPATH=src python benchmarks/iadeep.py [--table FILE] [--data FOLDER] [--seeds 3] [--bounds]

First the tuner on 50 random problems with known optimum and 3 % noise; then streams of 300 jobs on 20 devices
(grounds/iadeep.py) at three arrival rates. `competitive` has one stream only, because its search is slow. About six
minutes. With --bounds only lower bounds: the mean completion time if every job had a device to itself at once, with
its own and its best batch, and what the devices allow (grounds/iadeep_bound.py).
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from math import log, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
from grounds import iadeep as ground
from grounds.iadeep_bound import Mixes, lower_bound, mixes_of
from measured import RESULTS, ROOT, save

from carpool.core.messages import Record
from carpool.core.model import Allocation, JobId, JobSpec
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.policies.iadeep.batch_tuning import Tuner, batch_grid
from carpool.policies.registry import POLICIES, parse_policy
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.colocation import ColocationWorld

BASELINES = ("fifo", "mps-equal", "antman", "kernel-est")
OURS = ("competitive", "iadeep", "iadeep:predictor=false", "iadeep:tuner=false")
SLOW = "competitive"
LOADS = (0.6, 1.2, 2.4)
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36, 10: 2.26}


# ------------------------------------------------------------------------------------------------------------- tuner
def tuner(problems: int = 50) -> dict[str, Any]:
    """How far above the true optimum the chosen batch is, starting from a wrong belief and from none."""
    found = {}
    for name in ("wrong a, b and φ believed", "nothing believed"):
        rng = np.random.default_rng(0)
        excess, counts = [], []
        for _ in range(problems):
            a, b = 10 ** rng.uniform(-3, -1), 10 ** rng.uniform(-5, -3)
            own = int(2 ** rng.integers(3, 10))
            noise, slower = own * 10 ** rng.uniform(0, 1.5), rng.uniform(1.0, 4.0)
            sizes = np.array(batch_grid(max(1, own // 8), own * 16, own, 25), dtype=float)
            truth = slower * _degradation(sizes, a, b, noise)
            ideal = min(max(sqrt(a * noise / b), sizes[0]), sizes[-1])
            wrong = a * rng.lognormal(0, 0.4), b * rng.lognormal(0, 0.4), noise * rng.lognormal(0, 0.7)
            believed = np.log(_degradation(sizes, *wrong)) if name.startswith("wrong") else np.zeros(len(sizes))
            search = Tuner(np.log(sizes)[:, None], believed)
            tried: list[tuple[int, float]] = []
            while (row := search.propose(tried)) is not None:
                tried.append((row, log(truth[row] * rng.lognormal(0, 0.03))))
            optimum = slower * float(_degradation(np.array(ideal), a, b, noise))
            excess.append(float(truth[search.best(tried)]) / optimum - 1.0)
            counts.append(len(tried))
        row = {
            "problems": problems,
            "within_5_percent": sum(value <= 0.05 for value in excess),
            "worst_excess": round(max(excess), 4),
            "mean_excess": round(mean(excess), 4),
            "mean_evaluations": round(mean(counts), 2),
            "most_evaluations": max(counts),
        }
        found[name] = row
        print(
            f"tuner, {name}: {row['within_5_percent']} of {problems} within 5 %, worst {max(excess):.1%}, "
            f"{mean(counts):.1f} measured on average, {max(counts)} at most",
            flush=True,
        )
    return found


def _degradation(size: np.ndarray, a: float, b: float, noise: float) -> np.ndarray:
    """IF·DT/EFF up to a factor that no batch changes."""
    return np.asarray((a + b * size) / size * (noise + size))


# ------------------------------------------------------------------------------------------------------------- bounds
def bounds(table: Path, data: Path, seeds: int, loads: tuple[float, ...]) -> Iterator[list[dict[str, Any]]]:
    """For each stream; what jobs need alone does not depend on arrivals."""
    world = ColocationWorld.load(table)
    rows: list[dict[str, Any]] = []
    mixes: Mixes | None = None
    for load, seed in product(loads, range(seeds)):
        arrivals, _ = world.prepare(ground.jobs(world, seed, load, data), ground.cluster())
        mixes = mixes or mixes_of(world, [spec for _, spec in arrivals])
        own = mean([spec.work or 0.0 for _, spec in arrivals])
        best = mean([(spec.work or 0.0) / mixes.best[spec.model].rate for _, spec in arrivals])
        least = lower_bound(arrivals, mixes)
        rows.append({"load": load, "seed": seed, "own_batch_s": own, "best_batch_s": best, "least_s": least})
        print(
            f"load {load}, seed {seed}: alone with the own batch {own:.0f} s, with the best {best:.0f} s; "
            f"on {ground.DEVICES} devices at least {least:.0f} s",
            flush=True,
        )
        yield [{key: round(value, 1) for key, value in row.items()} for row in rows]


# ------------------------------------------------------------------------------------------------------------ streams
class Case(NamedTuple):
    """One run."""

    policy: str
    load: float
    seed: int
    table: str
    data: str


class Use:
    """SM and memory use over time: a device's SMs are taken by what its jobs have blocks for, within their shares."""

    def __init__(self, world: ColocationWorld, arrivals: list[Arrival], memory_bytes: int) -> None:
        self._world, self._memory = world, memory_bytes
        self._specs: dict[JobId, JobSpec] = {spec.id: spec for _, spec in arrivals}
        self._held: dict[JobId, Allocation] = {}
        self._at = 0.0
        self.sm = self.memory = 0.0  # device-seconds

    def record(self, record: Record) -> None:
        """Add what was used since the last record, then take changes in."""
        elapsed, self._at = record.at - self._at, record.at
        if elapsed > 0.0 and self._held:
            sm: dict[int, float] = defaultdict(float)
            for job, held in self._held.items():
                spec = self._specs[job]
                profile = self._world.table.profile(spec.model, held.batch_size or spec.batch_size)
                sm[held.shares[0].devices.start] += min(profile.fill, held.shares[0].fraction)
                self.memory += elapsed * profile.memory_bytes / self._memory
            self.sm += elapsed * sum(min(1.0, value) for value in sm.values())
        for fact in record.facts:
            if type(fact).__name__ == "JobFinished":
                self._held.pop(fact.job, None)  # type: ignore[attr-defined]
        for change in record.planned.changes if record.planned is not None else ():
            if change.allocation is None:
                self._held.pop(change.job, None)
            else:
                self._held[change.job] = change.allocation


class Timed(Policy):
    """A policy whose decisions are timed."""

    def __init__(self, inner: Policy) -> None:
        self.inner, self.seconds = inner, []
        self.cadence, self.max_virtual, self.shares_devices = inner.cadence, inner.max_virtual, inner.shares_devices  # type: ignore[misc]
        self.keeps_running_order = inner.keeps_running_order  # type: ignore[misc]
        self.waiting_key, self.running_key = inner.waiting_key, inner.running_key  # type: ignore[method-assign]

    seconds: list[float]

    def plan(self, view: Snapshot) -> Plan:
        """Ask the policy."""
        started = time.process_time()
        plan = self.inner.plan(view)
        self.seconds.append(time.process_time() - started)
        return plan


def run(case: Case) -> dict[str, Any]:
    """One policy over one stream."""
    world = ColocationWorld.load(case.table)
    world.report_every_s = 30.0
    listed = ground.jobs(world, case.seed, case.load, Path(case.data))
    arrivals, cluster = world.prepare(listed, ground.cluster())
    policy, use = Timed(parse_policy(case.policy)), Use(world, listed, ground.MEMORY_BYTES)
    found = simulate(arrivals, cluster, policy, world, observers=[use]).summary()
    assert found.finished == len(listed), f"{case.policy}: {found.finished} of {len(listed)} finished"
    room = ground.DEVICES * found.makespan_s
    return {
        "avg_jct_s": found.avg_jct_s,
        "avg_wait_s": found.avg_wait_s,
        "p99_jct_s": found.p99_jct_s,
        "makespan_s": found.makespan_s,
        "sm_use": use.sm / room,
        "memory_use": use.memory / room,
        "plans": len(policy.seconds),
        "plan_cpu_ms": 1e3 * mean(policy.seconds),
        "plan_worst_ms": 1e3 * max(policy.seconds),
    }


def streams(table: Path, data: Path, seeds: int, loads: tuple[float, ...]) -> Iterator[list[dict[str, Any]]]:
    """All policies at all rates; the rows so far, as they come."""
    policies = [*BASELINES, *OURS, *(["carpool"] if "carpool" in POLICIES else [])]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(2) as pool:
        waiting = []
        for load, policy in product(loads, policies):
            some = range(seeds if policy != SLOW else int(load == loads[len(loads) // 2]))
            cases = [Case(policy, load, seed, str(table), str(data)) for seed in some]
            waiting.append((load, policy, [pool.submit(run, case) for case in cases]))
        for load, policy, futures in waiting:
            if futures:
                rows.append(_row(rows, load, policy, [future.result() for future in futures]))
                yield rows


def _row(rows: list[dict[str, Any]], load: float, policy: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"load": load, "policy": policy, "seeds": len(runs)}
    row |= {key: round(mean(each[key] for each in runs), 4) for key in runs[0]}
    row["avg_jct_by_seed_s"] = [round(each["avg_jct_s"], 1) for each in runs]
    row["makespan_by_seed_s"] = [round(each["makespan_s"], 1) for each in runs]
    row["against_best"] = _against(rows, row)
    told = "".join(f"; {name} {text}" for name, text in row["against_best"].items())
    print(
        f"load {load}: {policy:24} CT {row['avg_jct_s']:7.0f} s, makespan {row['makespan_s']:7.0f} s, "
        f"SM {row['sm_use']:.0%}, memory {row['memory_use']:.0%}, {row['plan_cpu_ms']:.1f} ms a plan{told}",
        flush=True,
    )
    return row


def _against(rows: list[dict[str, Any]], row: dict[str, Any]) -> dict[str, str]:
    """Change against the best baseline at that load, with a 95 % interval over seeds; nothing for baselines."""
    if row["policy"] in BASELINES:
        return {}
    found = {}
    rivals = [other for other in rows if other["load"] == row["load"] and other["policy"] in BASELINES]
    for name, figure in (("CT", "avg_jct"), ("makespan", "makespan")):
        best = min(rivals, key=lambda other: other[f"{figure}_s"])
        pairs = zip(row[f"{figure}_by_seed_s"], best[f"{figure}_by_seed_s"], strict=False)
        changes = [ours / theirs - 1.0 for ours, theirs in pairs]
        spread = T95.get(len(changes), 2.0) * stdev(changes) / sqrt(len(changes)) if len(changes) > 1 else 0.0
        found[name] = f"{mean(changes):+.1%} ± {spread:.1%} against {best['policy']}"
    return found


def main() -> None:
    """The tuner, then the streams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=RESULTS / "gpu_colocation.json")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    parser.add_argument("--bounds", action="store_true", help="only what nobody can be below")
    options = parser.parse_args()
    if options.bounds:
        for found in bounds(options.table, options.data, options.seeds, tuple(options.loads)):
            kept = save("iadeep_bounds", found)
        print(f"wrote {kept}")
        return
    searched = tuner()
    for rows in streams(options.table, options.data, options.seeds, tuple(options.loads)):
        kept = save("iadeep", {"tuner": searched, "streams": rows})
    print(f"wrote {kept}")


if __name__ == "__main__":
    main()
