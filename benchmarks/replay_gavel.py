"""Replays Gavel's traces under its policies, in rounds and event-driven, beside the figures of its simulator.

    python benchmarks/replay_gavel.py [--data ../shared/data] [--out FILE]

Rounds are Gavel's setting: decisions every 360 s, a new solution every 1,920 s at the earliest. Event-driven means a
decision at every arrival and ending, and after every 360 s. Exits with 1 when a figure of the 96-job trace is outside
its tolerance.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from carpool import __version__
from carpool.policies.registry import parse_policy
from carpool.sim.cluster_spec import parse_cluster
from carpool.sim.engine import simulate
from carpool.sim.traces.reader import read_trace
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.gavel import GavelWorld

ROOT = Path(__file__).resolve().parent.parent
ROUND_S, RECOMPUTE_S = 360.0, 1920.0


@dataclass(frozen=True, slots=True)
class Case:
    """One policy and what Gavel's simulator prints for it."""

    name: str  # in Gavel
    policy: str
    jct_s: float
    makespan_s: float
    tolerance: float = 0.03


@dataclass(frozen=True, slots=True)
class Setting:
    """A trace, a cluster and the cases listed for them."""

    trace: str
    cluster: str
    cases: tuple[Case, ...]
    event_driven: bool = True


SETTINGS = (
    Setting(
        "max_min_fairness.trace",
        "2x4xV100,4x4xP100,3x8xK80",
        (
            Case("fifo", "gavel-fifo:perf=false", 35904.6, 196524, 0.07),
            Case("fifo_perf", "gavel-fifo", 19526.9, 72320),
            Case("LAS", "gavel:objective=max-min:perf=false", 19989.3, 77141, 0.07),
            Case("max-min (perf)", "gavel:objective=max-min", 14622.8, 63945),
            Case("FTF (perf)", "gavel:objective=ftf", 15009.7, 64971),
            Case("makespan (perf)", "gavel:objective=makespan", 22972.6, 61513),
            Case("max throughput", "gavel:objective=throughput", 17071.7, 63937),
        ),
    ),
    Setting(
        "gen1000_l360_m_s0.trace",
        "9x4xV100,9x4xP100,9x4xK80",
        (
            Case("fifo", "gavel-fifo:perf=false", 10548.6, 396938, 0.07),
            Case("max-min (perf)", "gavel:objective=max-min", 9710.6, 390601),
            Case("FTF (perf)", "gavel:objective=ftf", 9818.5, 390601),
            Case("makespan (perf)", "gavel:objective=makespan", 10227.9, 390601),
        ),
        event_driven=False,
    ),
)


def main() -> int:
    """Run everything, print a table for each trace, write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder that holds gavel/")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "replay_gavel.json")
    options = parser.parse_args()
    folder = options.data / "gavel"
    if not folder.is_dir():
        print(f"There is no folder {folder}. Name the folder that holds gavel/ with --data.", file=sys.stderr)
        return 2
    world = GavelWorld.load(folder / "simulation_throughputs.json")
    results = [result for setting in SETTINGS for result in replay(setting, folder, world)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"schema": 1, **circumstances(), "results": results}, indent=1) + "\n")
    return 0 if all(result["within"] for result in results if result["trace"] == SETTINGS[0].trace) else 1


def replay(setting: Setting, folder: Path, world: GavelWorld) -> list[dict[str, Any]]:
    """All cases of one trace, printed as they come."""
    arrivals = read_trace(folder / setting.trace).arrivals
    world.check([arrival.spec for arrival in arrivals], parse_cluster(setting.cluster))
    print(f"\n{setting.trace} on {setting.cluster}: avg JCT / makespan in s")
    print(f"{'policy':16} {'listed':>17} {'rounds, wait 1920 s':>34} {'event-driven, no wait':>22}")
    results = []
    for case in setting.cases:
        rounds = run(f"{case.policy}:recompute_s={RECOMPUTE_S}", arrivals, setting.cluster, world, ROUND_S)
        events = run(case.policy, arrivals, setting.cluster, world, 0.0) if setting.event_driven else None
        off = (rounds["avg_jct_s"] / case.jct_s - 1.0, rounds["makespan_s"] / case.makespan_s - 1.0)
        within = max(map(abs, off)) <= case.tolerance
        print(
            f"{case.name:16} {case.jct_s:9.1f} {case.makespan_s:7.0f} "
            f"{rounds['avg_jct_s']:9.1f} {off[0]:+7.2%} {rounds['makespan_s']:8.0f} {off[1]:+7.2%}"
            + (f" {events['avg_jct_s']:13.1f} {events['makespan_s']:8.0f}" if events else "")
            + ("" if within else "  outside its tolerance"),
            flush=True,
        )
        results.append(
            {
                "trace": setting.trace,
                "cluster": setting.cluster,
                "name": case.name,
                "policy": case.policy,
                "listed": {"avg_jct_s": case.jct_s, "makespan_s": case.makespan_s},
                "tolerance": case.tolerance,
                "rounds": rounds,
                "off": {"avg_jct": round(off[0], 5), "makespan": round(off[1], 5)},
                "within": within,
                "events": events,
            }
        )
    return results


def run(policy: str, arrivals: Sequence[Arrival], cluster: str, world: GavelWorld, round_s: float) -> dict[str, Any]:
    """One simulation."""
    started = time.process_time()
    summary = simulate(arrivals, parse_cluster(cluster), parse_policy(policy), world, round_s=round_s).summary()
    assert summary.finished == len(arrivals), f"{policy}: {summary.finished} of {len(arrivals)} jobs finished"
    return {
        "policy": policy,
        "avg_jct_s": round(summary.avg_jct_s, 1),
        "makespan_s": round(summary.makespan_s, 1),
        "p99_jct_s": round(summary.p99_jct_s, 1),
        "preemptions": summary.preemptions,
        "moves": summary.resizes,
        "cpu_s": round(time.process_time() - started, 2),
    }


def circumstances() -> dict[str, Any]:
    """Where and with what the figures were made."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "version": __version__,
        "commit": found.stdout.strip() or None,
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "scipy": version("scipy"),
        "machine": f"{platform.system()} {platform.machine()}",
    }


if __name__ == "__main__":
    sys.exit(main())
