"""Fits the prior of the retention model to measured groups, and measures its error on models never seen.

Usage: PYTHONPATH=src python benchmarks/sharing_prior.py [--table FILE] [--write]

Per model of the table (`gpu_colocation.py`): the prior is fitted to the groups without that model, then predicts all
groups with it, from the traits that a running job reports (step time, peak memory): MAPE of speeds relative to alone on
the whole device, over all members. Then 20 of these groups, drawn by seed, are learned and the others predicted again.
Beside it the parametric form with typical coefficients (`Slowdown`), and the Gaussian process (`Interference`) with all
profiled traits and the profiled speed under the cap. `--write` stores the prior fitted to all groups in the package.
About a minute on one core.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from measured import ROOT, save
from scipy.optimize import least_squares

from carpool.policies.sharing.trial_model import Slowdown
from carpool.predictors.sharing.colocation import ColocationTable, GroupMember, Solo
from carpool.predictors.sharing.interference import Interference
from carpool.predictors.sharing.retention import Floats, LanePrior, Observed, RetentionModel, Sharer, Traits

PRIOR = ROOT / "src" / "carpool" / "predictors" / "sharing" / "h200_prior.json"
START = (log(0.3), log(0.7), log(0.8))  # latents of an average job before any fit
FORM = (log(0.8 / 0.2), log(0.6), 0.0)  # logit of a, logarithms of e and k
TIED = 0.03  # spread of offsets while coefficients are fitted: traits should explain what they can
SPREAD, NOISE = 0.5, 0.1
MEASURED = 20  # groups learned
Group = tuple[GroupMember, ...]


def solo(table: ColocationTable, model: str, batch_size: int) -> Solo:
    """A task's profile."""
    return table.profile(model, batch_size)


def raw_traits(profile: Solo) -> tuple[float, float]:
    """Traits as the prior standardizes them."""
    return log(profile.step_s), log(profile.memory_bytes)


def traits(profile: Solo) -> Traits:
    """What a running job would report of itself."""
    return Traits(profile.step_s, profile.memory_bytes)


def speeds_of(table: ColocationTable, group: Group) -> list[float]:
    """Measured speeds relative to alone on the whole device."""
    return [each.steps_per_s * solo(table, each.model, each.batch_size).step_s for each in group]


def fitted(table: ColocationTable, groups: Sequence[Group]) -> LanePrior:
    """The prior by penalized least squares of log-speeds: coefficients of traits, and offsets of tasks from them."""
    tasks = sorted({(each.model, each.batch_size) for group in groups for each in group})
    place = {task: index for index, task in enumerate(tasks)}
    raw = np.array([raw_traits(solo(table, *task)) for task in tasks])
    center, scale = raw.mean(0), raw.std(0)
    standard = (raw - center) / scale
    features = np.hstack([np.ones((len(tasks), 1)), standard, standard[:, 1:] ** 2 - 1.0])
    width = max(map(len, groups))
    shares, who, target = (np.zeros((len(groups), width)) for _ in range(3))
    for row, group in enumerate(groups):
        for column, (each, speed) in enumerate(zip(group, speeds_of(table, group), strict=True)):
            shares[row, column], target[row, column] = each.share, log(max(speed, 1e-3))
            who[row, column] = place[each.model, each.batch_size]
    index, present = who.astype(int), shares > 0.0
    caps = [
        (task, share, log(min(1.0, speed)))
        for task, name in enumerate(tasks)
        for share, speed in solo(table, *name).scaling
        if share < 1.0
    ]
    cap_task, cap_share, cap_speed = (np.array(column) for column in zip(*caps, strict=True))
    count = features.shape[1]
    start = np.zeros((3, count))
    start[:, 0] = START

    def parts(values: Floats) -> tuple[Floats, tuple[float, float, float], Floats]:
        table_, form, offsets = np.split(values, [3 * count, 3 * count + 3])
        a, e, k = form
        return table_.reshape(3, count), (1.0 / (1.0 + np.exp(-a)), float(np.exp(e)), float(np.exp(k))), offsets

    def residuals(values: Floats, spread: float) -> Floats:
        coefficients, form, offsets = parts(values)
        latents = features @ coefficients.T + offsets.reshape(-1, 3)
        prior = LanePrior((), (), (), (), form, NOISE)
        found = prior.speeds(latents[index.astype(int)], shares).log_speeds
        alone = -np.log1p(np.exp(np.clip(latents[cap_task.astype(int), 0], -6.0, 2.5)) * (1.0 / cap_share - 1.0))
        pulls = ((coefficients - start).ravel(), values[3 * count : 3 * count + 3] - np.array(FORM), offsets / spread)
        return np.concatenate([(found - target)[present] / NOISE, (alone - cap_speed) / NOISE, *pulls])

    first = np.concatenate([start.ravel(), FORM, np.zeros(3 * len(tasks))])
    best = least_squares(residuals, first, max_nfev=12, args=(TIED,)).x
    coefficients, form, _ = parts(best)
    shape = best[: 3 * count + 3]
    offsets = least_squares(
        lambda own: residuals(np.concatenate([shape, own]), SPREAD), first[len(shape) :], max_nfev=8
    ).x
    spread = offsets.reshape(-1, 3).std(0)
    return LanePrior(
        tuple(center.tolist()),
        tuple(scale.tolist()),
        tuple(tuple(row) for row in coefficients.tolist()),
        tuple(spread.tolist()),
        (float(form[0]), form[1], form[2]),
        NOISE,
    )


def as_mix(table: ColocationTable, group: Group, seen: bool = True) -> list[Sharer]:
    """A group as the model sees it; without traits unless `seen`."""
    return [
        Sharer(
            (each.model, each.batch_size),
            each.model,
            each.share,
            traits(solo(table, each.model, each.batch_size)) if seen else Traits(),
        )
        for each in group
    ]


def learned(table: ColocationTable, prior: LanePrior, groups: Iterable[Group]) -> RetentionModel:
    """A model that has learned these groups."""
    model = RetentionModel(prior)
    for group in groups:
        model.learn(as_mix(table, group), Observed(tuple(speeds_of(table, group)), (1.0,) * len(group)))
    return model


def errors(table: ColocationTable, model: RetentionModel, groups: Sequence[Group], **how: bool) -> tuple[float, float]:
    """MAPE, and the part of log-errors within one predicted standard deviation (0.68 if honest)."""
    answers = model.predict([as_mix(table, group, **how) for group in groups])
    truth = [speed for group in groups for speed in speeds_of(table, group)]
    found = [each for answer in answers for each in answer]
    off = [abs(each.mean / real - 1.0) for each, real in zip(found, truth, strict=True)]
    near = [abs(log(each.mean / real)) <= each.std / each.mean for each, real in zip(found, truth, strict=True)]
    return float(np.mean(off)), float(np.mean(near))


def typical(table: ColocationTable, groups: Sequence[Group]) -> float:
    """MAPE of the parametric form of `competitive` before it has measured a mix."""
    off = []
    for group in groups:
        whole = tuple(1.0 for _ in group)
        model = Slowdown().fit([whole], [[1.0 / (1.0 + 0.8 * (len(group) - 1))] * len(group)])
        found = model.predict(tuple(each.share for each in group))
        off += [abs(x / real - 1.0) for x, real in zip(found, speeds_of(table, group), strict=True)]
    return float(np.mean(off))


def process(table: ColocationTable, known: Sequence[Group], groups: Sequence[Group]) -> float:
    """MAPE of the Gaussian process with all traits of a profile, on speeds relative to alone on the whole device."""
    members, kept = table.samples(groups)
    answers = Interference("gp").fit(*table.samples(known)).predict(members)
    pairs = [(a.mean, k) for found, real in zip(answers, kept, strict=True) for a, k in zip(found, real, strict=True)]
    return float(np.mean([abs(mean / real - 1.0) for mean, real in pairs]))


def judge(table: ColocationTable, model: str, seeds: int) -> dict[str, Any]:
    """Errors on all groups with one model, which nothing was fitted to."""
    known = [group for group in table.groups if all(each.model != model for each in group)]
    unseen = [group for group in table.groups if any(each.model == model for each in group)]
    prior = fitted(table, known)
    before, honest = errors(table, RetentionModel(prior), unseen)
    without, _ = errors(table, RetentionModel(prior), unseen, seen=False)
    with_known, _ = errors(table, learned(table, prior, known), unseen)
    after = []
    for seed in range(seeds):
        order = np.random.default_rng(seed).permutation(len(unseen))
        drawn, rest = [unseen[i] for i in order[:MEASURED]], [unseen[i] for i in order[MEASURED:]]
        after.append(errors(table, learned(table, prior, [*known, *drawn]), rest)[0])
    return {
        "model": model,
        "groups": len(unseen),
        "prior": round(before, 4),
        "within_one_std": round(honest, 3),
        "no_traits": round(without, 4),
        "neighbours_known": round(with_known, 4),
        "after_20_groups": round(float(np.mean(after)), 4),
        "typical_slowdown": round(typical(table, unseen), 4),
        "gaussian_process_all_traits": round(process(table, known, unseen), 4),
    }


def prediction_ms(prior: LanePrior, mixes: int = 300) -> float:
    """Time to predict many mixes of two to six jobs."""
    model = RetentionModel(prior)
    asked = [[Sharer(j, j, 0.4, Traits(0.01, 1 << 30)) for j in range(2 + i % 5)] for i in range(mixes)]
    model.predict(asked)
    began = time.perf_counter()
    model.predict(asked)
    return 1000.0 * (time.perf_counter() - began)


def main() -> None:
    """Measure, or write the prior."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_colocation.json")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="store the prior in the package and stop")
    options = parser.parse_args()
    table = ColocationTable.load(options.table)
    prior = fitted(table, table.groups)
    if options.write:
        rounded = {
            "schema": 1,
            "source": f"{len(table.groups)} groups on {table.device}, benchmarks/sharing_prior.py",
            "traits": ["log step_s", "log memory_bytes", "log memory_bytes squared, less 1"],
            "center": np.round(prior.center, 4).tolist(),
            "scale": np.round(prior.scale, 4).tolist(),
            "coefficients": np.round(prior.coefficients, 4).tolist(),
            "spread": np.round(prior.spread, 4).tolist(),
            "form": np.round(prior.form, 4).tolist(),
            "noise": prior.noise,
        }
        PRIOR.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
        return
    rows = []
    for model in table.profiles:
        rows.append(judge(table, model, options.seeds))
        print(rows[-1], flush=True)
    keys = [key for key in rows[0] if key not in ("model", "groups")]
    mean = {key: round(float(np.mean([row[key] for row in rows])), 4) for key in keys}
    print("mean", mean)
    save("sharing_prior", {"mean": mean, "ms_for_300_mixes": round(prediction_ms(prior), 2), "models": rows})


if __name__ == "__main__":
    main()
