"""Three tasks on four heterogeneous devices, real trainings: balanced against (equal share, fixed batch), and alone.

    python benchmarks/federated.py [--save]

Tasks are the digits perceptron and two CNNs of examples/digits.py, with imbalanced data. Devices are emulated by CPU
seconds times 1, 2, 4 and 8, so that load on the machine hardly matters. For each of three seeds:

- balanced and equal-steps, all tasks together: accuracy, idle time at the barrier, residual of equation 1;
- each task alone, with the same rounds, devices and data (plan equal-epochs).

The accuracy of a task counts as the same if its mean is at most twice the seed noise below that of training alone; the
seed noise is the standard deviation over seeds of training alone. The noise of `balanced` itself does not count: a plan
that makes results erratic would excuse itself.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Any

from measured import ROOT, save

from carpool.backends.federation_run import EmbeddedFederation, fork_server
from carpool.backends.federation_store import FederationStore
from carpool.federated.federation_file import FederationFile, parse_federation
from carpool.federated.figures import FederationFigures
from carpool.runtime.process.forkserver import ForkServer

SEEDS = (0, 1, 2)
TASKS: tuple[dict[str, Any], ...] = (
    {"name": "mlp", "entry": "digits.py:mlp", "partition": {"sizes": [4, 3, 2, 1]}},
    {"name": "cnn", "entry": "digits.py:cnn", "args": {"channels": 8}, "partition": {"sizes": [1, 2, 3, 4]}},
    {"name": "small-cnn", "entry": "digits.py:cnn", "args": {"channels": 4}, "partition": {"sizes": [1, 8, 1, 8]}},
)
DEVICES = [{"name": f"device-{slowdown}x", "slowdown": slowdown} for slowdown in (1, 2, 4, 8)]


def description(seed: int, plan: str, tasks: tuple[dict[str, Any], ...], rounds: int) -> FederationFile:
    """The federation of these tasks."""
    data = {"rounds": rounds, "plan": plan, "seed": seed, "task": list(tasks), "device": DEVICES}
    return parse_federation(data, ROOT / "examples", "benchmark")


async def measure(file: FederationFile, forks: ForkServer) -> dict[str, Any]:
    """Run a federation; its figures and the accuracy of each task."""
    figures = FederationFigures(file.federation)
    with tempfile.TemporaryDirectory() as folder:
        run = EmbeddedFederation(file, FederationStore(Path(folder)), [figures])
        tasks = await run.run(forks)
    return {
        "seconds": sum(each.seconds for each in figures.cycles),
        "idle_s": figures.idle_s,
        "idle_part": figures.idle_part,
        "mismatch": figures.mean_mismatch,
        "samples": sum(each.samples for each in figures.cycles),
        "accuracy": {name: task.metrics[-1][1]["accuracy"] for name, task in tasks.items()},
    }


async def measure_all(rounds: int) -> dict[str, list[dict[str, Any]]]:
    """All runs of all seeds."""
    found: dict[str, list[dict[str, Any]]] = {"balanced": [], "equal-steps": [], "alone": []}
    async with fork_server() as forks:
        for seed in SEEDS:
            for plan in ("balanced", "equal-steps"):
                found[plan].append(await measure(description(seed, plan, TASKS, rounds), forks))
            alone: dict[str, float] = {}
            for task in TASKS:
                one = await measure(description(seed, "equal-epochs", (task,), rounds), forks)
                alone |= one["accuracy"]
            found["alone"].append({"accuracy": alone})
    return found


def summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Means over seeds, and the three claims."""

    def mean(plan: str, name: str) -> float:
        return statistics.fmean(run[name] for run in found[plan])

    accuracy: dict[str, Any] = {}
    for task in TASKS:
        values = {plan: [run["accuracy"][task["name"]] for run in runs] for plan, runs in found.items()}
        noise = statistics.stdev(values["alone"])
        means = {plan: statistics.fmean(each) for plan, each in values.items()}
        accuracy[task["name"]] = {
            **means,
            "seed_noise": noise,
            "same": means["balanced"] >= means["alone"] - 2 * noise,
        }
    return {
        "idle_ratio": mean("balanced", "idle_s") / mean("equal-steps", "idle_s"),
        "idle_part": {plan: mean(plan, "idle_part") for plan in ("balanced", "equal-steps")},
        "mismatch": {plan: mean(plan, "mismatch") for plan in ("balanced", "equal-steps")},
        "mismatch_ratio": mean("equal-steps", "mismatch") / max(mean("balanced", "mismatch"), 1e-12),
        "samples_per_s_ratio": mean("balanced", "samples")
        / mean("balanced", "seconds")
        / (mean("equal-steps", "samples") / mean("equal-steps", "seconds")),
        "accuracy": accuracy,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    found = asyncio.run(measure_all(given.rounds))
    shown = summary(found)
    print(f"idle time at the barrier, balanced over equal-steps: {shown['idle_ratio']:.3f} (target: at most 0.333)")
    print(f"residual of equation 1, equal-steps over balanced:   {shown['mismatch_ratio']:.1f} (target: at least 10)")
    print(f"samples per second, balanced over equal-steps:       {shown['samples_per_s_ratio']:.2f}")
    for name, values in shown["accuracy"].items():
        means = ", ".join(f"{plan} {values[plan]:.4f}" for plan in found)
        print(f"{name:10} {means}, seed noise {values['seed_noise']:.4f}: {'same' if values['same'] else 'WORSE'}")
    if given.save:
        save("federated", {"rounds": given.rounds, "summary": shown, "runs": found})


if __name__ == "__main__":
    main()
