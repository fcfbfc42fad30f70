"""Measures how well slowdown by neighbours is predicted, for groups and models never seen.

Usage: PYTHONPATH=src python benchmarks/interference.py [--gavel FILE] [--table FILE] [--seeds N]

On Gavel's table of pairs (one device type at a time, both rates above zero; pairs equal to the solo rates separately)
and on our own table of groups (`gpu_colocation.py`). MAPE is the mean of |predicted / measured − 1| over the members
of held-out groups. About five minutes on one core.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from measured import RESULTS, ROOT, save
from sklearn.metrics import roc_auc_score

from carpool.predictors.sharing.colocation import ColocationTable
from carpool.predictors.sharing.interference import Interference, Member, Method

METHODS: tuple[Method, ...] = ("forest", "gp", "both")
KINDS = ("v100", "p100", "k80")
SAMPLES = 135
Groups = list[list[Member]]
Kept = list[list[float]]


def mape(model: Interference, groups: Groups, kept: Kept) -> float:
    """Mean relative error over all members."""
    answers = model.predict(groups)
    errors = [
        abs(a.mean / k - 1.0)
        for found, values in zip(answers, kept, strict=True)
        for a, k in zip(found, values, strict=True)
    ]
    return float(np.mean(errors))  # fmt: skip


def held_out(groups: Groups, kept: Kept, seeds: int, samples: int) -> dict[str, dict[str, float]]:
    """Error of each method on the groups that were not among `samples` drawn ones."""
    found: dict[str, list[float]] = {method: [] for method in METHODS}
    for seed in range(seeds):
        order = np.random.default_rng(seed).permutation(len(groups))
        seen, unseen = order[:samples], order[samples:]
        for method in METHODS:
            model = Interference(method, seed=seed).fit([groups[i] for i in seen], [kept[i] for i in seen])
            found[method].append(mape(model, [groups[i] for i in unseen], [kept[i] for i in unseen]))
    return {
        method: {"mape": round(float(np.mean(e)), 4), "std": round(float(np.std(e)), 4)} for method, e in found.items()
    }


# ------------------------------------------------------------------------------------------------------ Gavel's table
class Pairs:
    """Gavel's pairs of one kind as groups of two."""

    def __init__(self, table: dict[str, Any], kind: str) -> None:
        solo = {k: {ast.literal_eval(name): row["null"] for name, row in table[k].items()} for k in KINDS}
        families = sorted({_family(name) for name, _ in solo[kind]})
        traits = {job: _traits(job, solo, kind, families) for job in solo[kind]}
        self.runs: tuple[Groups, Kept] = ([], [])  # both rates above zero
        self.exact: tuple[Groups, Kept] = ([], [])  # of these, both exactly as alone
        self.all: tuple[Groups, Kept] = ([], [])  # those that cannot run together too, with 0
        for name, row in table[kind].items():
            a = ast.literal_eval(name)
            for other, rates in row.items():
                if other == "null" or a > (b := ast.literal_eval(other)):
                    continue
                group = [Member(traits[a]), Member(traits[b])]
                kept = [rates[0] / (solo[kind][a] or 1.0), rates[1] / (solo[kind][b] or 1.0)]
                is_exact = kept == [1.0, 1.0]
                runs = min(kept) > 0.0
                for groups, values in (self.exact if is_exact else self.runs if runs else ([], []), self.all):
                    groups.append(group)
                    values.append(kept)


def _family(name: str) -> str:
    return re.sub(r" \(.*", "", name)


def _traits(job: tuple[str, int], solo: Any, kind: str, families: Sequence[str]) -> tuple[float, ...]:
    """Step time on the kind, how it compares over kinds, batch, width, and what sort of model it is."""
    steps = [-log(max(solo[k][job], 1e-3)) for k in KINDS]
    found = re.search(r"batch size (\d+)", job[0])
    batch = log(int(found[1]) if found else 1)
    own = steps[KINDS.index(kind)]
    sort = [float(_family(job[0]) == family) for family in families]
    return (own, steps[1] - steps[0], steps[2] - steps[1], batch, log(job[1]), own - batch, *sort)


def on_gavel(path: Path, seeds: int) -> dict[str, Any]:
    """Every kind of Gavel's table."""
    table = json.loads(path.read_text(encoding="utf-8"))
    results = {}
    for kind in KINDS:
        pairs = Pairs(table, kind)
        groups, kept = pairs.runs
        row: dict[str, Any] = {
            "pairs": len(groups),
            "exact_pairs": len(pairs.exact[0]),
            "after_135_pairs": held_out(groups, kept, seeds, SAMPLES),
            "with_exact_pairs": held_out(groups + pairs.exact[0], kept + pairs.exact[1], seeds, SAMPLES)["both"],
            "auc_runs_together": _auc(pairs, seeds),
        }
        results[kind] = row
        told = ", ".join(f"{method} {found['mape']:.1%}" for method, found in row["after_135_pairs"].items())
        exact = row["with_exact_pairs"]["mape"]
        print(f"Gavel {kind}: {len(groups)} pairs, MAPE {told}; with {row['exact_pairs']} exact ones {exact:.1%}; "
              f"can run together: AUC {row['auc_runs_together']:.3f}", flush=True)  # fmt: skip
    return results


def _auc(pairs: Pairs, seeds: int) -> float:
    """How well the smaller predicted value tells pairs that run together from those that cannot, after 135 pairs."""
    groups, kept = pairs.all
    found = []
    for seed in range(seeds):
        order = np.random.default_rng(seed).permutation(len(groups))
        seen, unseen = order[:SAMPLES], order[SAMPLES:]
        model = Interference("forest", seed=seed).fit([groups[i] for i in seen], [kept[i] for i in seen])
        scores = [min(a.mean for a in answer) for answer in model.predict([groups[i] for i in unseen])]
        found.append(roc_auc_score([min(kept[i]) > 0.0 for i in unseen], scores))
    return round(float(np.mean(found)), 4)


# -------------------------------------------------------------------------------------------------------- our own table
def on_own(path: Path, seeds: int) -> dict[str, Any]:
    """Held-out groups, mixes of tasks never measured in any shares, and models never seen."""
    table = ColocationTable.load(path)
    groups, kept = table.samples()
    row: dict[str, Any] = {"groups": len(groups), "after_135_groups": held_out(groups, kept, seeds, SAMPLES)}
    told = ", ".join(f"{method} {found['mape']:.1%}" for method, found in row["after_135_groups"].items())
    print(f"own table: {len(groups)} groups, MAPE {told}", flush=True)
    row["mixes_never_measured"] = _by_mix(table, groups, kept)
    print(f"mixes never measured at any shares: MAPE {row['mixes_never_measured']:.1%}", flush=True)
    row["models_never_seen"] = by_model = _by_model(table, groups, kept)
    for model, error in by_model.items():
        print(f"  {model:20} never seen: MAPE {error:.1%}", flush=True)
    row["models_never_seen_mean"] = round(float(np.mean(list(by_model.values()))), 4)
    print(f"models never seen: mean MAPE {row['models_never_seen_mean']:.1%}", flush=True)
    return row


def _by_mix(table: ColocationTable, groups: Groups, kept: Kept, folds: int = 5) -> float:
    """Cross-validation in which all groups of the same tasks are held out together."""
    mixes = [tuple(sorted((t.model, t.batch_size) for t in group)) for group in table.groups]
    names = sorted(set(mixes))
    order = np.random.default_rng(0).permutation(len(names))
    errors = []
    for fold in range(folds):
        out = {names[i] for i in order[fold::folds]}
        seen = [i for i, mix in enumerate(mixes) if mix not in out]
        unseen = [i for i, mix in enumerate(mixes) if mix in out]
        model = Interference().fit([groups[i] for i in seen], [kept[i] for i in seen])
        errors.append(mape(model, [groups[i] for i in unseen], [kept[i] for i in unseen]))
    return round(float(np.mean(errors)), 4)


def _by_model(table: ColocationTable, groups: Groups, kept: Kept) -> dict[str, float]:
    """Each model left out with every group it is in, at any batch size; the error is that of its own members."""
    found = {}
    for name in table.profiles:
        is_in = [any(tenant.model == name for tenant in group) for group in table.groups]
        seen = [i for i, inside in enumerate(is_in) if not inside]
        model = Interference().fit([groups[i] for i in seen], [kept[i] for i in seen])
        errors = []
        for i in (i for i, inside in enumerate(is_in) if inside):
            (answer,) = model.predict([groups[i]])
            for tenant, estimate, value in zip(table.groups[i], answer, kept[i], strict=True):
                if tenant.model == name:
                    errors.append(abs(estimate.mean / value - 1.0))
        found[name] = round(float(np.mean(errors)), 4)
    return found


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = ROOT.parent / "shared" / "data" / "gavel" / "simulation_throughputs.json"
    parser.add_argument("--gavel", type=Path, default=shared)
    parser.add_argument("--table", type=Path, default=RESULTS / "gpu_colocation.json")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    results: dict[str, Any] = {"own": on_own(options.table, options.seeds)}
    if options.gavel.is_file():
        results["gavel"] = on_gavel(options.gavel, options.seeds)
    else:
        print(f"no {options.gavel}: Gavel's table is left out")
    print(save("interference", results))


if __name__ == "__main__":
    main()
