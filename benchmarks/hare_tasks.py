"""Computes Hare's printed rule per task in Hare's setting, beside the rule per job and gangs.

Usage: python benchmarks/hare_tasks.py [--seeds 4] [--jobs 300] [--no-save]

Jobs, devices and speeds are those of `hare.py`. The rule per task (`seeds/task_rule.py`) assigns every part of every
step, which no scheduler of whole jobs does, so it is computed and not simulated by a policy. A switch costs 4 ms.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import mean
from typing import Any

from grounds.hare import ARRIVALS, Case, perform, setting
from measured import save
from seeds.task_rule import TaskJob, ends, weighted_jct_s

from carpool.core.topology import Cluster
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.parts import PartsWorld

_SWITCH_S = 0.004
BESIDE = ("hare-literal", "wsrtf", "hare")


def as_tasks(arrivals: Sequence[Arrival], cluster: Cluster, world: PartsWorld) -> tuple[list[TaskJob], list[int]]:
    """The jobs with their parts, and the type of every device."""
    kinds = list(cluster.kinds)
    jobs = []
    for at, spec in arrivals:
        part_s = world.part_s[spec.model]
        steps = max(1, round(world.work(spec) / next(iter(part_s.values()))))
        jobs.append(TaskJob(spec.weight, at, steps, spec.devices, tuple(part_s[kind] for kind in kinds)))
    return jobs, [kinds.index(cluster.kind_of(device)) for device in range(cluster.num_devices)]


def main() -> None:
    """Compute, print and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    for words, span_s in ARRIVALS.items():
        found: dict[str, list[float]] = {}
        for seed in range(options.seeds):
            began = time.process_time()
            jobs, devices = as_tasks(*setting(Case("", seed, options.jobs, span_s)))
            found.setdefault("per task", []).append(weighted_jct_s(jobs, ends(jobs, devices, _SWITCH_S)))
            print(f"  seed {seed}: {time.process_time() - began:.0f} CPU s", flush=True)
            for policy in BESIDE:
                row = perform(Case(policy, seed, options.jobs, span_s))
                found.setdefault(policy, []).append(row.weighted_jct_s)
        results += [{"policy": name, "span_s": span_s, "weighted_jct_s": each} for name, each in found.items()]
        print(f"{options.jobs} jobs {words}: {', '.join(f'{name} {mean(each):.0f} s' for name, each in found.items())}")
        if not options.no_save:
            save("hare_tasks", {"jobs": options.jobs, "seeds": options.seeds, "rows": results})


if __name__ == "__main__":
    main()
