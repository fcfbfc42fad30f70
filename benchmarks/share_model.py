"""Measures how well the slowdown model of `competitive` predicts share vectors from a few measured ones.

Usage: PYTHONPATH=src python benchmarks/share_model.py [--table benchmarks/results/gpu_sharing.json]

For each mix whose jobs were also measured alone under a cap, the model learns from the vectors that are always tried
first (full shares, equal ones that sum to 150 %, and more for a cap-sensitive job with less for the others) and
predicts every other measured vector: mean absolute relative error of the jobs' rates. Then the search continues among
measured vectors as in `competitive`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measured import RESULTS, save
from sharing.table import fair

from carpool.core.estimates import DeclaredEstimator
from carpool.core.model import JobId, JobSpec, Kind
from carpool.policies.sharing.competitive import Competitive, contrasted
from carpool.policies.sharing.share_search import Setting, ShareSearch, Tenant, Vector
from carpool.policies.sharing.trial_model import Shares, Slowdown, Solo, sm_sensitivity

Measured = Mapping[Shares, Sequence[float]]  # speeds relative to alone


def read(path: Path) -> dict[str, tuple[Measured, list[list[Solo]]]]:
    """Of each mix of three to six, what vectors gave, and the jobs alone under caps."""
    rows = [row for row in json.loads(path.read_text(encoding="utf-8"))["results"] if "rates" in row]
    rows = [row for row in rows if row.get("deterministic", True)]
    alone = {row["mix"]: row["rates"] for row in rows if row["mode"] == "alone, graph"}
    found: dict[str, tuple[dict[Shares, Sequence[float]], list[list[Solo]]]] = {}
    for row in rows:
        whole = alone.get(row["mix"])
        if whole is None or "graph" not in row["mode"] or not ({"share", "shares"} & row.keys()):
            continue
        vectors, solos = found.setdefault(row["mix"], ({}, [[] for _ in whole]))
        speeds = [rate / w for rate, w in zip(row["rates"], whole, strict=True)]
        if row["mode"].startswith("alone at"):
            for own, speed in zip(solos, speeds, strict=True):
                own.append((row["share"] / 100.0, speed))
        elif row["mode"].startswith("MPS"):
            shares = row.get("shares") or [row["share"]] * len(whole)
            vectors[tuple(share / 100.0 for share in shares)] = speeds
    return dict(found)


def judge(mix: str, vectors: Measured, solos: list[list[Solo]]) -> dict[str, Any] | None:
    """The error on vectors that were not learned from, and what the search would keep of all that was measured."""
    count = len(next(iter(vectors.values())))
    whole, moderate, contrast = first_tries(vectors, [sm_sensitivity(own) for own in solos])
    tried = [vector for vector in (whole, moderate, contrast) if vector in vectors]
    if not all(solos) or moderate not in vectors or len(vectors) < 4:
        return None
    capped = [[pair for pair in own if pair[0] == moderate[0]] for own in solos]
    ones = [1.0] * count
    began = time.process_time()
    model = Slowdown().fit(tried, [vectors[vector] for vector in tried], capped)
    others = [vector for vector in vectors if vector not in tried]
    errors = [abs(np.array(model.predict(vector)) / np.array(vectors[vector]) - 1.0).mean() for vector in others]
    while left := [vector for vector in vectors if vector not in tried]:
        model = Slowdown().fit(tried, [vectors[vector] for vector in tried], capped)
        following = max(left, key=lambda vector: fair(model.predict(vector), ones))
        reached = max(fair(vectors[vector], ones) for vector in tried)
        enough = reached * (1.0 + Competitive().min_gain)
        if len(tried) >= Competitive().tries or fair(model.predict(following), ones) <= enough:
            break
        tried.append(following)
    kept = max(tried, key=lambda vector: fair(vectors[vector], ones))
    equal = max((v for v in vectors if len(set(v)) == 1), key=lambda v: fair(vectors[v], ones))
    return {
        "mix": mix,
        "vectors": len(others),
        "error": round(float(np.mean(errors)), 4),
        "tried": [list(vector) for vector in tried],
        "kept": list(kept),
        "fair_of_kept": round(fair(vectors[kept], ones), 4),
        "best_equal": equal[0],
        "fair_of_best_equal": round(fair(vectors[equal], ones), 4),
        "fair_of_best_measured": round(max(fair(speeds, ones) for speeds in vectors.values()), 4),
        "cpu_s": round(time.process_time() - began, 3),
    }


def first_tries(vectors: Measured, hungers: Sequence[float]) -> tuple[Shares, Shares, Shares]:
    """What `competitive` tries first of a mix: whole shares, moderate ones, and a contrast for the hungriest job."""
    tenants = [Tenant(JobSpec(JobId(str(place)))) for place in range(len(hungers))]
    levels = tuple(sorted({share for vector in vectors for share in vector}))
    search = ShareSearch(DeclaredEstimator(), Kind("H200"), tenants, levels)
    whole, moderate = (_shares(vector) for vector in (search.equal(1.0), search.moderate()))
    known = {tuple(map(Setting, each)): vectors[each] for each in (whole, moderate) if each in vectors}
    contrast = contrasted(search, hungers, known) if moderate in vectors else None
    return whole, moderate, _shares(contrast) if contrast is not None else whole


def _shares(vector: Vector) -> Shares:
    return tuple(setting.fraction for setting in vector)


def main() -> None:
    """Every mix of the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=RESULTS / "gpu_sharing.json")
    options = parser.parse_args()
    results = []
    for mix, (vectors, solos) in read(options.table).items():
        row = judge(mix, vectors, solos)
        if row is not None:
            results.append(row)
            words = "/".join(f"{share:.0%}" for share in row["kept"])
            ahead = row["fair_of_kept"] / row["fair_of_best_equal"] - 1.0
            print(
                f"{mix:14} error {row['error']:5.1%} on {row['vectors']:2} vectors; keeps {words} after "
                f"{len(row['tried'])}: {row['fair_of_kept']:.3f}, {ahead:+.1%} over the best equal share, "
                f"best measured {row['fair_of_best_measured']:.3f}",
                flush=True,
            )
    print(save("share_model", results))


if __name__ == "__main__":
    main()
