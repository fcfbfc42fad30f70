"""How well a few measured share vectors of a mix tell the others: the slowdown model of `competitive`, on kept rows.

Usage: PYTHONPATH=src python benchmarks/share_model.py [--table benchmarks/results/gpu_sharing.json]
For each mix the model learns from the two vectors that are always tried (whole shares, and equal ones that sum to
150 %) and from each job alone under its cap where that was measured; then it predicts every other vector that was
measured, and names the one it would try next. Mean absolute relative error of the jobs' rates, and CPU seconds of fit
and search. Seconds to run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from measured import RESULTS, save
from sharing.table import fair

from carpool.policies.competitive import Competitive
from carpool.policies.slowdown import Shares, Slowdown, Solo

Measured = Mapping[Shares, Sequence[float]]  # speeds relative to alone


def read(path: Path) -> dict[str, tuple[Measured, list[list[Solo]]]]:
    """Of each mix of three to six, what vectors gave, and the jobs alone under caps."""
    rows = [row for row in json.loads(path.read_text(encoding="utf-8"))["results"] if "rates" in row]
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
    """The error on vectors that were not learned from, and the best vector believed."""
    count = len(next(iter(vectors.values())))
    moderate = max((v for v in vectors if len(set(v)) == 1 and sum(v) <= 1.5 + 1e-6), default=None)
    learned = [vector for vector in ((1.0,) * count, moderate) if vector in vectors]
    if len(learned) < 2 or len(vectors) < 4:
        return None
    began = time.process_time()
    capped = [[pair for pair in own if moderate and pair[0] == moderate[0]] for own in solos]
    model = Slowdown().fit(learned, [vectors[vector] for vector in learned], capped)
    fit_s = time.process_time() - began
    others = [vector for vector in vectors if vector not in learned]
    errors = [abs(np.array(model.predict(vector)) / np.array(vectors[vector]) - 1.0).mean() for vector in others]
    began = time.process_time()
    levels = Competitive().levels if count == 3 else (0.15, 0.25, 0.33, 0.5, 0.8)
    best = max(product(levels, repeat=count), key=lambda vector: fair(model.predict(vector), [1.0] * count))
    equal = {v[0]: fair(s, [1.0] * count) for v, s in vectors.items() if len(set(v)) == 1}
    return {
        "mix": mix,
        "vectors": len(others),
        "error": round(float(np.mean(errors)), 4),
        "knows_caps": all(capped),
        "next": list(best),
        "best_equal": max(equal, key=lambda share: equal[share]),
        "fair_of_best_equal": round(max(equal.values()), 4),
        "fair_of_best_measured": round(max(fair(s, [1.0] * count) for s in vectors.values()), 4),
        "fit_cpu_s": round(fit_s, 3),
        "all_vectors_cpu_s": round(time.process_time() - began, 3),
    }


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
            words = "/".join(f"{share:.0%}" for share in row["next"])
            print(f"{mix:14} error {row['error']:6.1%} on {row['vectors']} vectors; would try {words} next", flush=True)
    print(save("share_model", results))


if __name__ == "__main__":
    main()
