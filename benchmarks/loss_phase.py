"""Compares splits of devices by learning phase: an older and a younger training on four devices, and more.

Usage: python benchmarks/loss_phase.py [--seeds N] [--live [--device cpu:2|cuda] [--repeats N] [--lanes N]]

Simulated: true loss curves with noise; speeds by number of devices as the published times imply, for a batch of 512
per job and of 128 per device. Policies know the speeds and predict the lengths from the curves. Prints every row with
its 95 % interval over seeds, beside the published change from 2-2 to 3-1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import numpy as np
from measured import save

from carpool.core.draft import Draft
from carpool.core.metrics import Metrics
from carpool.core.model import JobId, JobSpec
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.core.topology import Cluster
from carpool.policies.elastic_allocation import resize
from carpool.policies.registry import POLICIES, parse_policy
from carpool.predictors.loss.curve import LossCurve
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.loss_curves import LossModel, LossWorld

GAP_S, RESIZE_S = 200.0, 0.5
# Speeds on 1 to 4 devices, of that on four: what the published times of 2-2 and 3-1 imply. Beyond four: ours.
PER_JOB = (0.66, 0.60, 0.83, 1.0, 1.12, 1.22, 1.31, 1.38)
PER_DEVICE = (0.12, 0.42, 0.73, 1.0, 1.22, 1.40, 1.55, 1.68)
VGG = LossModel(b0=0.00095, b1=0.476, floor=0.2, target=0.509, noise=0.06, steps_per_s=9.05)  # 300 s on four
RESNET = replace(VGG, b0=0.0011, floor=0.3, target=0.573, speeds=(0.30, 0.384, 0.478, 1.0))
PUBLISHED = {"job": (-4.70, -12.76, -7.26), "device": (-2.72, -23.01, -4.03), "mixed": (-7.11, -11.20, -10.63)}
SCENES = {
    "job": {"older": replace(VGG, speeds=PER_JOB[:4]), "younger": replace(VGG, speeds=PER_JOB[:4])},
    "device": {"older": replace(VGG, speeds=PER_DEVICE[:4]), "younger": replace(VGG, speeds=PER_DEVICE[:4])},
    "mixed": {"older": RESNET, "younger": replace(VGG, speeds=(0.707, 0.60, 0.83, 1.0))},
}

OURS = ("loss-phase-literal", "loss-phase", "loss-phase:objective=total")
DEFAULT = tuple(name for name in ("carpool", "carpool:objective=makespan") if "carpool" in POLICIES)


@dataclass(frozen=True, slots=True)
class Split(Policy):
    """Fixed numbers for the older and the younger while both are there; who is alone has all."""

    older: int
    younger: int

    def plan(self, view: Snapshot) -> Plan:
        """Shrink first."""
        jobs = sorted(view.active(), key=lambda job: job.seq)[:2]
        wanted = [self.older, self.younger] if len(jobs) == 2 else [view.cluster.num_devices]
        draft = Draft(view)
        for job, count in sorted(zip(jobs, wanted, strict=False), key=lambda pair: pair[0].seq):
            resize(draft, job, view.cluster.kinds[0], count)
        return draft.finish("fixed")


def policies() -> dict[str, Callable[[], Policy]]:
    """Every row of the table of two."""
    fixed: dict[str, Callable[[], Policy]] = {
        "2-2": lambda: Split(2, 2),
        "3-1": lambda: Split(3, 1),
        "1-3": lambda: Split(1, 3),
        "one after another": lambda: parse_policy("fifo"),
    }
    return fixed | {name: _named(name) for name in (*OURS, *DEFAULT)}


def _named(text: str) -> Callable[[], Policy]:
    return lambda: parse_policy(text)


# ---------------------------------------------------------------------------------------------------------- running
def run(
    policy: Policy, jobs: Sequence[tuple[float, str]], learners: Mapping[str, LossModel], devices: int, seed: int
) -> dict[str, float]:
    """Ends of all jobs, and the sums of interest."""
    world = LossWorld(learners, seed, resize_s=RESIZE_S)
    arrivals = [Arrival(at, JobSpec(JobId(f"{model}-{i}"), devices, None, model)) for i, (at, model) in enumerate(jobs)]
    prepared, cluster = world.prepare(arrivals, Cluster.build([(1, devices, "V100")]))
    ends = _Ends()
    metrics: Metrics = simulate(prepared, cluster, policy, world, observers=(ends,))
    summary = metrics.summary()
    assert summary.finished == len(jobs), f"{policy}: {summary.finished} of {len(jobs)} jobs finished"
    took = [ends.at[arrival.spec.id] - arrival.submit_s for arrival in arrivals]
    named = {"total": summary.makespan_s, "mean": summary.avg_jct_s}
    return named | {f"job {place}": seconds for place, seconds in enumerate(took)}


class _Ends:
    """When every job ended."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}

    def record(self, record: Any) -> None:
        for fact in record.facts:
            if type(fact).__name__ == "JobFinished":
                self.at[fact.job] = record.at


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval (normal; 20 seeds or more)."""
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return float(np.mean(values)), 1.96 * spread / sqrt(len(values))


# --------------------------------------------------------------------------------------------------------- two jobs
def two_jobs(seeds: int) -> list[dict[str, Any]]:
    """An older training, a younger one 200 s later, four devices; everything relative to 2-2 of the same seed."""
    rows: list[dict[str, Any]] = []
    for scene, learners in SCENES.items():
        print(f"\n{_title(scene)}: change from 2-2, published for 3-1: total, older, younger {PUBLISHED[scene]} %")
        base: list[dict[str, float]] = []
        for name, make in policies().items():
            found = [run(make(), [(0.0, "older"), (GAP_S, "younger")], learners, 4, seed) for seed in range(seeds)]
            base = base or found
            row: dict[str, Any] = {"scene": scene, "policy": name}
            for key, label in (("total", "total"), ("job 0", "older"), ("job 1", "younger"), ("mean", "mean")):
                mean, half = interval([one[key] for one in found])
                gain, wide = interval(
                    [100.0 * (one[key] / two[key] - 1.0) for one, two in zip(found, base, strict=True)]
                )
                row[label] = {"s": round(mean, 2), "ci_s": round(half, 2), "pct": round(gain, 2), "ci": round(wide, 2)}
            rows.append(row)
            told = "  ".join(
                f"{label} {row[label]['s']:6.1f} ({row[label]['pct']:+6.2f} ± {row[label]['ci']:.2f} %)"
                for label in ("total", "older", "younger", "mean")
            )
            print(f"  {name:26} {told}", flush=True)
    return rows


def _title(scene: str) -> str:
    return {"job": "512 per job", "device": "128 per device", "mixed": "ResNet-50 and VGG-16, 512 per job"}[scene]


# -------------------------------------------------------------------------------------------------------- many jobs
def many_jobs(seeds: int) -> list[dict[str, Any]]:
    """Three and more jobs, eight devices, a pre-trained newcomer; total and mean completion time."""
    whole = {"vgg": replace(VGG, speeds=PER_JOB), "resnet": RESNET, "long": replace(VGG, target=0.42, speeds=PER_JOB)}
    four = {"vgg": replace(VGG, speeds=PER_JOB[:4]), "trained": replace(VGG, behind=2400.0, speeds=PER_JOB[:4])}
    grounds: dict[str, tuple[list[tuple[float, str]], Mapping[str, LossModel], int]] = {
        "pre-trained newcomer, 4 devices": ([(0.0, "vgg"), (100.0, "trained")], four, 4),
        "3 jobs, 4 devices": ([(0.0, "vgg"), (100.0, "vgg"), (200.0, "vgg")], four, 4),
        "3 jobs, 8 devices": ([(0.0, "vgg"), (100.0, "long"), (200.0, "vgg")], whole, 8),
        "6 jobs, 8 devices": ([(60.0 * i, ("vgg", "long", "vgg")[i % 3]) for i in range(6)], whole, 8),
        "6 jobs, 8 devices, 128 per device": (
            [(60.0 * i, "vgg") for i in range(6)],
            {"vgg": replace(VGG, speeds=PER_DEVICE)},
            8,
        ),
    }
    names = ["fifo", "afs", "optimus", *OURS, *DEFAULT]
    rows: list[dict[str, Any]] = []
    for title, (jobs, learners, devices) in grounds.items():
        print(f"\n{title}")
        for name in names:
            found = [run(parse_policy(name), jobs, learners, devices, seed) for seed in range(seeds)]
            (total, wide), (mean, half) = (interval([one[key] for one in found]) for key in ("total", "mean"))
            figures = {"total_s": total, "total_ci_s": wide, "mean_jct_s": mean, "mean_jct_ci_s": half}
            rows.append({"ground": title, "policy": name} | {key: round(value, 2) for key, value in figures.items()})
            print(f"  {name:26} total {total:7.1f} ± {wide:4.1f}  mean JCT {mean:7.1f} ± {half:4.1f}", flush=True)
    return rows


# ------------------------------------------------------------------------------------------------------- classifier
def classifier(starts: int) -> list[dict[str, Any]]:
    """How often the literal rule and the loss curve tell which of two is nearer to its end."""
    other = replace(VGG, b0=0.00019, b1=0.0952, floor=1.0, target=2.545)  # the same training, its loss times five
    pairs = {
        "equal trainings": (VGG, VGG),
        "older with five times the loss": (other, VGG),
        "younger with five times the loss": (VGG, other),
        "pre-trained newcomer": (VGG, replace(VGG, behind=2400.0)),
    }
    rows = []
    print(f"\nwhich is older, right out of {starts} starts (older at 10 to 90 % of its run)")
    for title, (older, younger) in pairs.items():
        for after in (100, 300):
            literal, curve = zip(*[_told_apart(older, younger, seed, after) for seed in range(starts)], strict=True)
            right = {"literal": float(np.mean(literal)), "curve": float(np.mean(curve))}
            rows.append({"pair": title, "iterations": after, "starts": starts} | right)
            told = f"literal {right['literal']:6.1%}  loss curve {right['curve']:6.1%}"
            print(f"  {title:33} after {after} iterations: {told}", flush=True)
    return rows


def _told_apart(older: LossModel, younger: LossModel, seed: int, after: int) -> tuple[bool, bool]:
    """Whether each way names the one with less work left, so many iterations after the newcomer's first."""
    world = LossWorld({"a": older, "b": younger}, seed)
    first, second = (world._history(JobSpec(JobId(name), model=name)) for name in ("a", "b"))
    at = int(np.random.default_rng(seed).uniform(0.1, 0.9) * len(first))
    first_now, second_now = min(at + after, len(first) - 1), min(after, len(second) - 1)
    falls = first[at] - first[first_now], second[0] - second[second_now]
    truth = len(first) - first_now < len(second) - second_now
    left = [
        LossCurve().fit(np.arange(1.0, now, 5.0), history[1:now:5]).remaining_to(learner.target, learner.window).mean
        for history, now, learner in ((first, first_now, older), (second, second_now, younger))
    ]
    return bool((falls[0] <= falls[1]) == truth), bool((left[0] < left[1]) == truth)


def predictor(seeds: int) -> list[dict[str, Any]]:
    """Error of what remains, as a part of the whole run, and how often the truth is within two standard deviations."""
    rows = []
    print("\nwhat remains to the target, by loss curve")
    for portion in (0.05, 0.1, 0.25, 0.5, 0.75, 0.9):
        errors, inside = [], []
        for seed in range(seeds):
            history = LossWorld({"a": VGG}, seed)._history(JobSpec(JobId("a"), model="a"))
            now = int(portion * len(history))
            found = LossCurve().fit(np.arange(1.0, now, 10.0), history[1:now:10]).remaining_to(VGG.target, 10)
            errors.append(abs(found.mean - (len(history) - now)) / len(history))
            inside.append(abs(found.mean - (len(history) - now)) <= 2.0 * found.std)
        row = {"at": portion, "error": float(np.mean(errors)), "within_two_std": float(np.mean(inside))}
        rows.append(row)
        print(
            f"  after {portion:4.0%}: off by {row['error']:6.1%} of the run, within 2 std {row['within_two_std']:4.0%}"
        )
    return rows


def main() -> None:
    """Run everything, or the live part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--live", action="store_true", help="two real jobs instead of simulated ones")
    parser.add_argument("--device", default="cpu:2", help="with --live: as --devices of carpool run")
    parser.add_argument("--repeats", type=int, default=1, help="with --live: runs of each row")
    parser.add_argument("--lanes", type=int, default=4, help="with --live on one GPU: how many devices it stands for")
    options = parser.parse_args()
    if options.live:
        from trials.phases import live

        found = live(options.device, options.repeats, Split, (*OURS[:2], *DEFAULT[:1]), options.lanes)
        print(f"wrote {save('loss_phase_live', found)}")
        return
    results: dict[str, Any] = {}
    for name, part in (("two", two_jobs), ("many", many_jobs), ("classifier", classifier), ("predictor", predictor)):
        results[name] = part(5 * options.seeds if name == "classifier" else options.seeds)
        kept = save("loss_phase", results)
    print(f"wrote {kept}")


if __name__ == "__main__":
    main()
