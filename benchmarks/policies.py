"""Compares the default policy with all others on every workload in benchmarks/grounds.

    python benchmarks/policies.py [--ground gavel] [--quick] [--data DIR]

A ground is a file in benchmarks/grounds with a `GROUND`. Rows are printed as they come; the last table gives, for every
setting, the best policy and the default's distance from it. Results are written after each ground. Exits with 1 when a
limit is missed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from grounds.ground import Ground, Row
from measured import ROOT, save

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # before the grounds import NumPy: waiting threads count too
    os.environ.setdefault(name, "1")

DEFAULT = "carpool"
BOUNDS = {"heSRPT", "lower bound"}  # nobody's figures, but what anybody can reach at best


def grounds() -> list[Ground]:
    """All that lie in the folder, by name; a file without a `GROUND` is part of another one."""
    names = sorted(path.stem for path in (Path(__file__).parent / "grounds").glob("*.py"))
    modules = [importlib.import_module(f"grounds.{name}") for name in names if name != "__init__"]
    return [module.GROUND for module in modules if hasattr(module, "GROUND")]


def missed(ground: Ground, rows: list[Row]) -> list[str]:
    """Limits that were not reached, in words."""
    figures = {(row.setting, row.policy): row.figure for row in rows}
    told = []
    for setting, policy, most, of in ground.limits:
        reached, basis = figures.get((setting, policy)), figures.get((setting, of)) if of else 1.0
        if reached is not None and basis is not None and reached > most * basis:
            told.append(
                f"{setting}: {policy} {reached:.1f}, limit {most * basis:.1f}" + (f" ({most:g} of {of})" if of else "")
            )
    return told


def summary(rows: list[Row]) -> list[dict[str, Any]]:
    """For every setting the best policy and the default's distance from the best other one."""
    found = []
    for setting in dict.fromkeys(row.setting for row in rows):
        here = [row for row in rows if row.setting == setting and row.policy not in BOUNDS]
        ours = [row.figure for row in here if row.policy == DEFAULT or row.policy.startswith(f"{DEFAULT}:objective")]
        others = [row for row in here if row.policy.partition(":")[0] != DEFAULT]
        if ours and others:
            best = min(others, key=lambda row: row.figure)
            distance = ours[0] / best.figure - 1.0
            found.append(
                {"setting": setting, "default": ours[0], "best_other": best.policy, "distance": round(distance, 4)}
            )
    return found


def main() -> int:
    """Run all grounds and print what comes out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder of the traces")
    parser.add_argument("--ground", default="", help="name of one ground, such as gavel; nothing is kept then")
    parser.add_argument("--quick", action="store_true", help="fewer seeds and jobs")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    failed: list[str] = []
    kept: Path | None = None
    for ground in grounds():
        if options.ground and ground.name != options.ground:
            continue
        if ground.needs and not (options.data / ground.needs).is_dir():
            print(f"{ground.name}: left out, there is no {options.data / ground.needs}. Name the folder with --data.")
            continue
        print(f"\n{ground.name}: {ground.objective}")
        rows: list[Row] = []
        for row in ground.run(options.data, options.quick):
            rows.append(row)
            print(f"  {row.setting:36} {row.policy:48} {row.figure:10.1f}  {row.cpu_s:6.1f} CPU s", flush=True)
        for line in summary(rows):
            print(f"  {line['setting']:36} default {line['distance']:+7.1%} from {line['best_other']}")
        failed += [f"{ground.name}, {words}" for words in missed(ground, rows)]
        results[ground.name] = {"rows": [row._asdict() for row in rows], "summary": summary(rows)}
        if not options.ground and not options.quick:
            kept = save("policies", {"grounds": results, "missed": failed})
    for words in failed:
        print(f"MISSED {words}")
    if kept is not None:
        print(f"wrote {kept}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
