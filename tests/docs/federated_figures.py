"""Figures of federated learning, on emulated devices and on Flower's processes of one machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import mean, stdev

from tests.docs.figures import Check, results

PAGE = "docs/how-to/federate.md"


def plans() -> Iterator[Check]:
    for name in ("imbalanced", "skewed"):
        for values in results("federated")[name]["summary"]["accuracy"].values():
            for plan in ("balanced", "matched"):
                assert values[f"{plan}_same"], "the page says that it is not below training alone but for noise"
    found = results("federated")["imbalanced"]["summary"]["plans"]
    ours, base = found["balanced"], found["equal-steps"]
    yield PAGE, "processed {} times the samples of `equal-steps`", [ours["samples"] / base["samples"]]
    yield PAGE, "They waited {} times as long at the barrier", [ours["idle_ratio"]]
    yield PAGE, "was {} times smaller", [ours["mismatch_ratio"]]
    rates = [found[plan]["samples_per_s_ratio"] for plan in ("matched", "balanced")]
    yield "docs/results.md", "samples per second of {} times equal steps, {} with fixed batch sizes", rates


def accuracy() -> Iterator[Check]:
    names = {"cifar10": "CIFAR-10", "digits": "digits", "characters": "characters of a text"}
    rows = results("federated_transports")["rows"]
    assert all(each["same_digests"] for each in rows)
    for task, words in names.items():
        alone, embedded, flower = ([each[way][task] for each in rows] for way in ("alone", "embedded", "flower"))
        assert min(mean(embedded), mean(flower)) > mean(alone) - stdev(alone), "the page says: within the noise"
        values = [mean(alone), stdev(alone), mean(embedded), mean(flower)]
        yield PAGE, f"| {words} | {{}} ± {{}} | {{}} | {{}} |", values


def coordinator() -> Iterator[Check]:
    yield PAGE, "takes {} CPU seconds for 1,000 devices", [results("federated_scale")["cpu_s"]]


def over_flower() -> Iterator[Check]:
    medians = {part: results("federated_flower")[part]["median_s"].values() for part in ("overhead", "poll", "start")}
    ends = {part: [min(values), max(values)] for part, values in medians.items()}
    yield PAGE, "A cycle costs {} to {} s more than the training", ends["overhead"]
    yield PAGE, "({} to {} s of waiting)", ends["poll"]
    yield PAGE, "starts a Python process for each ({} to {} s)", ends["start"]
    message = [results("federated_flower")[part]["median_s"].values() for part in ("push", "relay")]
    assert max(push + relay for push, relay in zip(*message, strict=True)) < 0.05


def on_a_gpu() -> Iterator[Check]:
    page = "docs/results.md"
    fleets = results("federated_gpu")["mixes"]["R50+S2+D121"]["fleets"]
    rows = {
        "eager, in sequence or time-sliced, equal epochs (FedAvg)": ("equal-epochs", "eager"),
        "CUDA graphs, in sequence or time-sliced, equal epochs": ("equal-epochs", "graphs"),
        "lanes and graphs at equal shares (33, 50, 100 %), equal epochs": ("equal-epochs", "lanes"),
        "eager, equal steps": ("equal-steps", "eager"),
        "CUDA graphs, equal steps": ("equal-steps", "graphs"),
        "lanes and graphs at equal shares, equal steps": ("equal-steps", "lanes"),
    }
    best = {
        words: [each["against_best"][plan][group] for each in fleets.values()] for words, (plan, group) in rows.items()
    }
    for words, found in best.items():
        yield (
            page,
            f"| {words} | {{}}, {{}} | {{}}, {{}} |",
            [each[way] for each in found for way in ("average", "fairness")],
        )
    claims = [best[words][0][way] for words in list(rows)[:3] for way in ("fairness", "average")]
    yield page, "{} to {} times eager; {} to {} times graphs; {} to {} times equal lanes with graphs", claims
    equal = fleets["equal devices"]
    lanes = [each for each in equal["baselines"] if (each["group"], each["plan"]) == ("lanes", "equal-epochs")]
    idle = min(lanes, key=lambda each: each["average"])["idle_part"], equal["ours"]["idle_part"][-1]
    yield page, "best equal lanes wait {} % of the time, with ours {} %", [100 * part for part in idle]


SOURCES: tuple[Callable[[], Iterator[Check]], ...] = (plans, accuracy, coordinator, over_flower, on_a_gpu)
