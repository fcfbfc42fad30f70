"""Three tasks on four heterogeneous devices, real trainings: our plans against (equal share, fixed batch), and alone.

    python benchmarks/federated.py [--seeds 30 31 32] [--save]

Tasks are the digits perceptron and two CNNs of examples/digits.py, with imbalanced data. Devices are emulated by CPU
seconds times 1, 2, 4 and 8, so that load on the machine hardly matters. For each seed:

- balanced, shortest and equal-steps, all tasks together: accuracy, idle time at the barrier, residual of equation 1;
- matched: balanced, with batch sizes of 16 to 256 in proportion to a device's data of each task (batch_range);
- each task alone, with the same rounds, devices, data and initial weights (plan equal-epochs).

The accuracy of a task counts as the same if its mean is at most twice the seed noise below that of training alone; the
seed noise is the standard deviation over seeds of training alone. The noise of our plans does not count: a plan that
makes results erratic would excuse itself. Intervals are 95 % (Student's t) of the mean difference to alone by seed.
Two partitions are measured: imbalanced sizes, and skewed labels (Dirichlet 0.5), where residuals do not differ because
each task's labels are skewed alike.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measured import ROOT, save
from scipy.stats import t

from carpool.backends.federation_run import FederationRun, fork_server
from carpool.backends.federation_store import FederationStore
from carpool.federated.federation_file import FederationFile, parse_federation
from carpool.federated.figures import FederationFigures
from carpool.runtime.process.forkserver import ForkServer

TASKS: tuple[dict[str, Any], ...] = (
    {"name": "mlp", "entry": "digits.py:mlp", "partition": {"sizes": [4, 3, 2, 1]}},
    {"name": "cnn", "entry": "digits.py:cnn", "args": {"channels": 8}, "partition": {"sizes": [1, 2, 3, 4]}},
    {"name": "small-cnn", "entry": "digits.py:cnn", "args": {"channels": 4}, "partition": {"sizes": [1, 8, 1, 8]}},
)
DEVICES = [{"name": f"device-{slowdown}x", "slowdown": slowdown} for slowdown in (1, 2, 4, 8)]


SKEWED = {"scheme": "labels", "alpha": 0.5}
PLANS = ("balanced", "matched", "shortest", "equal-steps")
OURS = ("balanced", "matched", "shortest")
BATCHES = [16, 256]


def description(seed: int, plan: str, tasks: Sequence[dict[str, Any]], rounds: int) -> FederationFile:
    """The federation of these tasks."""
    if plan == "matched":
        plan, tasks = "balanced", [{**task, "batch_range": BATCHES} for task in tasks]
    data = {"rounds": rounds, "plan": plan, "seed": seed, "task": list(tasks), "device": DEVICES}
    return parse_federation(data, ROOT / "examples", "benchmark")


async def measure(file: FederationFile, forks: ForkServer) -> dict[str, Any]:
    """Run a federation; its figures and the accuracy of each task."""
    figures = FederationFigures(file.federation)
    with tempfile.TemporaryDirectory() as folder:
        run = FederationRun(file, FederationStore(Path(folder)), [figures])
        tasks = await run.run(forks)
    return {
        "seconds": sum(each.seconds for each in figures.cycles),
        "idle_s": figures.idle_s,
        "idle_part": figures.idle_part,
        "mismatch": figures.mean_mismatch,
        "samples": sum(each.samples for each in figures.cycles),
        "accuracy": {name: task.metrics[-1][1]["accuracy"] for name, task in tasks.items()},
    }


async def measure_all(
    rounds: int, tasks: Sequence[dict[str, Any]], seeds: Sequence[int]
) -> dict[str, list[dict[str, Any]]]:
    """All runs of all seeds."""
    found: dict[str, list[dict[str, Any]]] = {plan: [] for plan in (*PLANS, "alone")}
    async with fork_server() as forks:
        for seed in seeds:
            for plan in PLANS:
                found[plan].append(await measure(description(seed, plan, tasks, rounds), forks))
            alone: dict[str, float] = {}
            seconds = 0.0
            for task in tasks:
                one = await measure(description(seed, "equal-epochs", (task,), rounds), forks)
                alone |= one["accuracy"]
                seconds += one["seconds"]
            found["alone"].append({"accuracy": alone, "seconds": seconds})
    return found


def accuracy_of(found: dict[str, list[dict[str, Any]]], task: str) -> dict[str, Any]:
    """Means over seeds of one task, and whether each of our plans is as good as training alone."""
    values = {plan: [run["accuracy"][task] for run in runs] for plan, runs in found.items()}
    means = {plan: statistics.fmean(each) for plan, each in values.items()}
    noise = statistics.stdev(values["alone"])
    rows: dict[str, Any] = {**means, "seed_noise": noise}
    for plan in OURS:
        differences = [ours - alone for ours, alone in zip(values[plan], values["alone"], strict=True)]
        half = float(t.ppf(0.975, len(differences) - 1)) * statistics.stdev(differences) / len(differences) ** 0.5
        mean = statistics.fmean(differences)
        rows[f"{plan}_minus_alone"] = [mean - half, mean, mean + half]
        rows[f"{plan}_same"] = means[plan] >= means["alone"] - 2 * noise
    return rows


def summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Means over seeds, and the claims."""

    def mean(plan: str, name: str) -> float:
        return statistics.fmean(run[name] for run in found[plan])

    plans: dict[str, Any] = {}
    for plan in PLANS:
        rates = (
            mean(plan, "samples") / mean(plan, "seconds"),
            mean("equal-steps", "samples") / mean("equal-steps", "seconds"),
        )
        plans[plan] = {
            **{name: mean(plan, name) for name in ("seconds", "samples", "idle_part", "mismatch")},
            "idle_ratio": mean(plan, "idle_s") / mean("equal-steps", "idle_s"),
            "mismatch_ratio": mean("equal-steps", "mismatch") / max(mean(plan, "mismatch"), 1e-12),
            "samples_per_s_ratio": rates[0] / rates[1],
        }
    return {
        "plans": plans,
        "alone_seconds": mean("alone", "seconds"),
        "accuracy": {task["name"]: accuracy_of(found, task["name"]) for task in TASKS},
    }


def show(name: str, shown: dict[str, Any]) -> None:
    """Print a summary."""
    print(f"{name}: tasks one after another, each alone: {shown['alone_seconds']:.1f} s")
    for plan, each in shown["plans"].items():
        print(
            f"  {plan:12} {each['seconds']:.1f} s, idle {each['idle_part']:.1%}, over equal-steps "
            f"{each['idle_ratio']:.3f} (target: 0.333), residual {each['mismatch']:.4f}, smaller by "
            f"{each['mismatch_ratio']:.1f} (target: 10), samples per second {each['samples_per_s_ratio']:.2f}"
        )
    for task, values in shown["accuracy"].items():
        print(f"  {task:10} alone {values['alone']:.4f}, seed noise {values['seed_noise']:.4f}", end="")
        for plan in OURS:
            low, _, high = values[f"{plan}_minus_alone"]
            verdict = "same or better" if values[f"{plan}_same"] else "WORSE"
            print(f"; {plan} {values[plan]:.4f} [{low:+.4f}, {high:+.4f}] {verdict}", end="")
        print()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seeds", type=int, nargs="+", default=[30, 31, 32])
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    results: dict[str, Any] = {"rounds": given.rounds, "seeds": given.seeds}
    partitions = {"imbalanced": TASKS, "skewed": [{**task, "partition": SKEWED} for task in TASKS]}
    for name, tasks in partitions.items():
        found = asyncio.run(measure_all(given.rounds, tasks, given.seeds))
        results[name] = {"summary": summary(found), "runs": found}
        show(name, results[name]["summary"])
        if given.save:
            save("federated", results)


if __name__ == "__main__":
    main()
