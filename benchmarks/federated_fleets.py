"""Residual of equation 1 and idle time at the barrier on other fleets: more speeds, tasks, devices and partitions.

    python benchmarks/federated_fleets.py [--seeds 10 11 12] [--save]

Each fleet runs with `balanced` and with (equal share, fixed batch), the plan `equal-steps`: real trainings of
examples/digits.py on emulated devices. Targets: residual down at least 10 times, idle time at most one third.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import Any

from measured import ROOT, save

from carpool.backends.federation_run import fork_server
from carpool.federated.federation_file import parse_federation
from federated import measure

ENTRIES: tuple[dict[str, Any], ...] = (
    {"entry": "digits.py:mlp"},
    {"entry": "digits.py:cnn", "args": {"channels": 4}},
    {"entry": "digits.py:mlp", "args": {"hidden": 32}},
    {"entry": "digits.py:cnn", "args": {"channels": 2}},
    {"entry": "digits.py:mlp", "args": {"hidden": 512}},
)
LABELS = {"scheme": "labels", "alpha": 0.1}
SIZES = {"scheme": "sizes", "alpha": 0.5}
FLEETS: dict[str, tuple[int, list[float], dict[str, Any]]] = {
    "2 tasks x 3 devices, speeds 1, 1.5, 3, quantity skew": (2, [1, 1.5, 3], SIZES),
    "3 tasks x 4 devices, speeds 1 to 20, quantity skew": (3, [1, 3, 8, 20], SIZES),
    "3 tasks x 4 devices, speeds 1 to 8, labels 0.1": (3, [1, 2, 4, 8], LABELS),
    "3 tasks x 4 equal devices, quantity skew": (3, [1, 1, 1, 1], SIZES),
    "5 tasks x 8 devices, speeds 1 to 5, quantity skew": (5, [1, 1, 2, 2, 3, 3, 5, 5], SIZES),
}


async def compare(fleet: str, seeds: list[int], rounds: int) -> dict[str, Any]:
    """Means over seeds of both plans of a fleet, and their ratios."""
    num_tasks, speeds, partition = FLEETS[fleet]
    tasks = [{"name": f"task-{number}", **ENTRIES[number], "partition": {**partition}} for number in range(num_tasks)]
    devices = [{"name": f"device-{number}", "slowdown": slowdown} for number, slowdown in enumerate(speeds)]
    found: dict[str, list[dict[str, Any]]] = {"balanced": [], "equal-steps": []}
    async with fork_server() as forks:
        for seed in seeds:
            for number, task in enumerate(tasks):
                task["partition"]["seed"] = 100 * seed + number
            for plan, runs in found.items():
                data = {"rounds": rounds, "plan": plan, "seed": seed, "task": tasks, "device": devices}
                runs.append(await measure(parse_federation(data, ROOT / "examples", "benchmark"), forks))

    def mean(plan: str, name: str) -> float:
        return statistics.fmean(run[name] for run in found[plan])

    return {
        **{f"{name}_{plan}": mean(plan, name) for plan in found for name in ("idle_part", "mismatch")},
        "idle_ratio": mean("balanced", "idle_part") / mean("equal-steps", "idle_part"),
        "mismatch_ratio": mean("equal-steps", "mismatch") / max(mean("balanced", "mismatch"), 1e-12),
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12])
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    rows = {}
    for fleet in FLEETS:
        rows[fleet] = row = asyncio.run(compare(fleet, given.seeds, given.rounds))
        print(
            f"{fleet:56} idle {row['idle_part_balanced']:.1%} of {row['idle_part_equal-steps']:.1%} "
            f"({row['idle_ratio']:.3f}), residual {row['mismatch_balanced']:.3f} of {row['mismatch_equal-steps']:.3f} "
            f"({row['mismatch_ratio']:.1f} times smaller)",
            flush=True,
        )
    if given.save:
        save("federated_fleets", {"rounds": given.rounds, "seeds": given.seeds, "fleets": rows})


if __name__ == "__main__":
    main()
