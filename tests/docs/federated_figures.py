"""Figures of federated learning, on emulated devices and on Flower's processes of one machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import mean, stdev

from tests.docs.figures import Check, results

PAGE = "docs/how-to/federate.md"


def plans() -> Iterator[Check]:
    for name in ("imbalanced", "skewed"):
        for values in results("federated")[name]["summary"]["accuracy"].values():
            assert values["balanced"] >= values["alone"], "the page says that it is not below training alone"
    found = results("federated")["imbalanced"]["summary"]["plans"]
    ours, base = found["balanced"], found["equal-steps"]
    yield PAGE, "processed {} times the samples of `equal-steps`", [ours["samples"] / base["samples"]]
    yield PAGE, "They waited {} times as long at the barrier", [ours["idle_ratio"]]
    yield PAGE, "was {} times smaller", [ours["mismatch_ratio"]]


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


SOURCES: tuple[Callable[[], Iterator[Check]], ...] = (plans, accuracy, coordinator)
