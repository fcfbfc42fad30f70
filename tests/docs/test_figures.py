"""Figures on the pages agree with the result files, and every result file says which version it measured.

A check names a page, a piece of its text with ``{}`` for each number, and the values those numbers must show. A printed
number agrees with a value if it is the value rounded to the printed digits.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
NUMBER = r"([+−-]?\d[\d,]*(?:\.\d+)?)"

Check = tuple[str, str, Sequence[float]]


@cache
def document(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def results(name: str) -> Any:
    return document(name)["results"]


@cache
def text_of(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def printed(page: str, template: str) -> list[str]:
    """The numbers that a page shows in the places of ``{}``."""
    pattern = NUMBER.join(re.escape(piece) for piece in " ".join(template.split()).split("{}"))
    found = re.findall(f"(?=(?:^|(?<=[^\\d.])){pattern})", text_of(page))
    assert found, f"{page} does not say: {template}"
    assert len(found) == 1, f"{page} says it {len(found)} times: {template}"
    return [found[0]] if isinstance(found[0], str) else list(found[0])


def agrees(shown: str, value: float) -> bool:
    digits = len(shown.partition(".")[2])
    return abs(float(shown.replace(",", "").replace("−", "-")) - value) <= 0.505 * 10**-digits


def row(rows: Sequence[Mapping[str, Any]], **wanted: Any) -> Mapping[str, Any]:
    """The one row with these values; the last one where a benchmark was repeated."""
    found = [each for each in rows if all(each.get(key) == value for key, value in wanted.items())]
    assert found, wanted
    return found[-1]


# ------------------------------------------------------------------------------------------------------------ simulated
def philly() -> Iterator[Check]:
    for page in ("docs/results.md", "docs/policies/fifo.md"):
        for cluster, policy, words in (
            ("1x512xV100", "fifo", {"docs/results.md": "| 1 × 512 | fifo |", "docs/policies/fifo.md": "| 512 pooled | head blocks |"}),
            ("1x512xV100", "fifo:bypass=true", {"docs/results.md": "| 1 × 512 | fifo:bypass=true |", "docs/policies/fifo.md": "| 512 pooled | later jobs may pass |"}),
            ("64x8xV100", "fifo", {"docs/results.md": "| 64 × 8 | fifo |", "docs/policies/fifo.md": "| 64 nodes of 8 | head blocks |"}),
        ):  # fmt: skip
            reached = row(results("replay_philly")[:6], cluster=cluster, policy=policy)
            assert reached["wanted"] == reached["reached"]
            yield page, words[page] + " {} | {} | {} |", reached["reached"]
    for cluster, policy, words in (
        ("1x512xV100", "fifo", "1 × 512 | fifo"),
        ("1x512xV100", "fifo:bypass=true", "1 × 512 | fifo:bypass=true"),
        ("64x8xV100", "fifo", "64 × 8 | fifo"),
        ("1x512xV100", "srtf", "1 × 512 | srtf"),
        ("1x512xV100", "las", "1 × 512 | las"),
    ):
        found = row(results("replay_philly")[:6], cluster=cluster, policy=policy)
        yield "docs/results.md", f"| {words} | {{}} | {{}} | {{}} | {{}} |", [*found["reached"], found["cpu_s"]]


def scale() -> Iterator[Check]:
    a, b, c, _ = results("scale")
    yield (
        "docs/results.md",
        "A job costs {} µs at 10,000 jobs on 1,000 devices, {} µs at 100,000 on 10,000 and {} µs at 1,000,000 on 100,000 "
        "({} CPU s, {} GB)",
        [a["us_per_job"], b["us_per_job"], c["us_per_job"], c["cpu_s"], c["peak_mb"] / 1000],
    )


GAVEL = {
    "fifo": ("fifo", "gavel-fifo:perf=false"),
    "fifo_perf": ("fifo (perf)", "gavel-fifo"),
    "LAS": ("LAS", "gavel:perf=false"),
    "max-min (perf)": ("max-min (perf)", "gavel"),
    "FTF (perf)": ("finish-time fairness (perf)", "gavel:objective=ftf"),
    "makespan (perf)": ("makespan (perf)", "gavel:objective=makespan"),
    "max throughput": ("max throughput", "gavel:objective=throughput"),
}


def replay_gavel() -> Iterator[Check]:
    rows = [each for each in results("replay_gavel") if each["trace"] == "max_min_fairness.trace"]
    found = [row(rows, name=name) for name in GAVEL]
    for each, (title, policy) in zip(found, GAVEL.values(), strict=True):
        listed, rounds, off = each["listed"], each["rounds"], each["off"]
        yield (
            "docs/results.md",
            f"| {title} | `{policy}` | {{}} / {{}} | {{}} / {{}} | {{}} % / {{}} % |",
            [listed["avg_jct_s"], listed["makespan_s"], rounds["avg_jct_s"], rounds["makespan_s"]]
            + [100 * off["avg_jct"], 100 * off["makespan"]],
        )
    yield (
        "docs/results.md",
        "our versions reach, in order, {}, {}, {}, {}, {}, {} and {} s",
        [each["events"]["avg_jct_s"] for each in found],
    )
    for each in results("replay_gavel"):
        is_fifo, is_long = each["name"].startswith("fifo"), "1000" in each["trace"]
        page = "docs/policies/gavel-fifo.md" if is_fifo else "docs/policies/gavel.md"
        listed, rounds, off = each["listed"], each["rounds"], each["off"]
        values = [listed["avg_jct_s"], listed["makespan_s"], rounds["avg_jct_s"], rounds["makespan_s"]]
        values += [100 * off["avg_jct"], 100 * off["makespan"]]
        start = f"| {each['name']} |" if is_long and not is_fifo else f"| {each['name']} | `{GAVEL[each['name']][1]}` |"
        if is_fifo:
            start = f"| {'1,000' if is_long else '96'} jobs {start}"
        end = " {} / {} |" if each.get("events") else ""
        events = [each["events"]["avg_jct_s"], each["events"]["makespan_s"]] if each.get("events") else []
        yield page, start + " {} / {} | {} / {} | {} % / {} % |" + end, values + events


def replay_pollux() -> Iterator[Check]:
    runs = results("replay_pollux")["runs"]
    tiresias, optimus = row(runs, name="tiresias"), row(runs, name="optimus")
    seeds = {run["avg_jct_s"]: run for run in runs if run["name"] == "pollux"}
    middle = seeds[results("replay_pollux")["pollux_median_s"]]
    for run, words in (
        (tiresias, "tiresias = `las:thresholds=57600:promote=0:placement=emptiest` |"),
        (optimus, "`optimus` |"),
        (middle, "`pollux` (its objective, our optimiser), median of seeds 0–2 |"),
    ):
        values = [run["published_avg_jct_s"], run["avg_jct_s"], run["cpu_s"]]
        yield "docs/results.md", f"| {words} {{}} | {{}} | {{}} |", values
    for run, words in (
        (tiresias, "| tiresias | `las:thresholds=57600:promote=0:placement=emptiest` |"),
        (optimus, "| optimus | [`optimus`](optimus.md) |"),
        (middle, "| pollux | `pollux`, median of seeds 0–2 |"),
    ):
        published, reached = run["published_avg_jct_s"], run["avg_jct_s"]
        off = 100 * (reached / published - 1)
        yield "docs/policies/pollux.md", words + " {} s | {} s ({} %) | {} |", [published, reached, off, run["cpu_s"]]
    off = 100 * (optimus["avg_jct_s"] / optimus["published_avg_jct_s"] - 1)
    yield (
        "docs/policies/optimus.md",
        "| {} s | {} s | {} % | {} |",
        [optimus["published_avg_jct_s"], optimus["avg_jct_s"], off, optimus["cpu_s"]],
    )


def oracles() -> Iterator[Check]:
    for power in (0.3, 0.5, 0.7, 0.9):
        policies = ("afs", "afs:optimism=1", "afs:ahead=true")
        found = [row(results("oracles"), p=power, jobs=16, policy=policy) for policy in policies]
        values = [each[key] for each in found for key in ("mean", "worst")]
        yield "docs/policies/afs.md", f"| {power} | {{}} ({{}}) | {{}} ({{}}) | {{}} ({{}}) |", values


def figure(ground: str, setting: str, policy: str) -> float:
    return float(row(results("policies")["grounds"][ground]["rows"], setting=setting, policy=policy)["figure"])


def off(one: float, other: float) -> float:
    return 100 * (one / other - 1)


def default_policy() -> Iterator[Check]:
    pairs, whole = figure("gavel", "96 jobs", "carpool"), figure("gavel", "96 jobs", "carpool:together=1")
    allox = figure("gavel", "96 jobs", "allox:gang=true")
    sixteen, rival = figure("gavel", "1000 jobs on 16", "carpool"), figure("gavel", "1000 jobs on 16", "gavel")
    known, unknown = figure("pollux", "workload-6", "carpool"), figure("pollux", "workload-6", "carpool:lengths=unknown")
    pollux = figure("pollux", "workload-6", "pollux")
    once, spread = "300 jobs at once", "300 jobs over 900 s"
    mine = [figure("hare", setting, "carpool") for setting in (once, spread)]
    hare = [figure("hare", setting, "hare") for setting in (once, spread)]
    busy, afs = figure("elastic", "load 0.9", "carpool"), figure("elastic", "load 0.9", "afs")
    rigid, srtf = figure("rigid", "philly", "carpool"), figure("rigid", "philly", "srtf")
    page = "docs/results.md"
    yield page, "(`together=1`), avg JCT | {} s | `allox:gang=true` {} s | {} %", [whole, allox, off(whole, allox)]
    yield page, "two jobs may share devices | {} s | `allox:gang=true` {} s | {} %", [pairs, allox, off(pairs, allox)]
    yield page, "16 devices of each type | {} s | `gavel` {} s | {} %", [sixteen, rival, off(sixteen, rival)]
    yield (
        page,
        "lengths known / unknown | {} / {} s | `pollux` {} s | {} / {} %",
        [known, unknown, pollux, off(known, pollux), off(unknown, pollux)],
    )
    yield (
        page,
        "at once / over 900 s, weighted JCT | {} / {} s | `hare` {} / {} s | {} / {} %",
        [*mine, *hare, *map(off, mine, hare)],
    )
    yield page, "load 0.9, elastic jobs | {} s | `afs` {} s | {} %", [busy, afs, off(busy, afs)]
    yield page, "Philly, rigid jobs | {} s | `srtf` {} s | {} %", [rigid, srtf, off(rigid, srtf)]
    yield "README.md", "Gavel's 96 jobs {} s (best other policy {} s)", [whole, allox]
    yield "README.md", "Pollux's workload-6 {} s (Pollux {} s", [known, pollux]
    best = [
        each["distance"] for ground in results("policies")["grounds"].values() for each in ground["summary"]
    ]  # of the default to the best other policy
    assert max(best) < 0.01, "the pages say: first, or within 1 % of first"


def interference() -> Iterator[Check]:
    own, gavel = results("interference")["own"], results("interference")["gavel"]
    found = own["after_135_groups"]
    percent = [100 * found[method]["mape"] for method in ("gp", "forest", "both")]
    page = "docs/results.md"
    yield page, "| own table, 135 of 365 groups | {} % | {} % | {} % |", percent
    yield page, "mixes never measured | | | {} % |", [100 * own["mixes_never_measured"]]
    worst = max(own["models_never_seen"].values())
    yield page, "(mean of 16, worst {} %) | | | {} % |", [100 * worst, 100 * own["models_never_seen_mean"]]
    values = [
        100 * gavel[kind]["after_135_pairs"][method]["mape"]
        for method in ("gp", "forest", "both")
        for kind in ("v100", "p100", "k80")
    ]
    yield page, "V100 / P100 / K80 | {} / {} / {} % | {} / {} / {} % | {} / {} / {} % |", values
    yield page, "predictor error after 135 samples | 27.8 % | {} % |", percent[:1]


# ------------------------------------------------------------------------------------------------------- sharing a GPU
def total(rates: Sequence[float], bases: Sequence[float]) -> float:
    return sum(rate / base for rate, base in zip(rates, bases, strict=True))


def fair(rates: Sequence[float], bases: Sequence[float]) -> float:
    product = 1.0
    for rate, base in zip(rates, bases, strict=True):
        product *= rate / base
    return float(product ** (1 / len(rates)))


def sharing(mix: str, deterministic: bool, call: int = 12) -> dict[str, Mapping[str, Any]]:
    rows = [each for each in results("gpu_sharing") if each.get("mix") == mix and each["call"] == call]
    return {each["mode"]: each for each in rows if each.get("deterministic", True) == deterministic and "rates" in each}


def chosen_of(found: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    (chosen,) = [each for mode, each in found.items() if mode.startswith("carpool run")]
    return chosen


MIXES = ("V16+R18+M3", "R50+S2+D121")


def best_equal(found: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    equal = [each for mode, each in found.items() if mode.startswith("MPS") and mode.endswith("graph")]
    return max(equal, key=lambda each: float(each["sum"]))


def gpu_sharing() -> Iterator[Check]:
    for deterministic, start in ((True, "**deterministic**: Σ rate / (graph alone), "), (False, "**`deterministic = false`**: ")):
        mixes = [sharing(mix, deterministic) for mix in MIXES]
        best = [best_equal(found) for found in mixes]
        sums = [total(chosen_of(found)["rates"], found["alone, graph"]["rates"]) for found in mixes]
        words = start + "best equal share set by hand | {} ({} %) | {} ({} %) |"
        shares = [(each["sum"], float(re.findall(r"\d+", each["mode"])[0])) for each in best]
        yield "docs/results.md", words, [value for pair in shares for value in pair]
        words = "… chosen by `carpool run` (`competitive`)" if deterministic else "… chosen by `carpool run`"
        ratios = [value / each["sum"] for value, each in zip(sums, best, strict=True)]
        yield "docs/results.md", words + " | {} ({} of it) | {} ({} of it) |", [sums[0], ratios[0], sums[1], ratios[1]]
        eager = [found["alone, eager"]["rates"] for found in mixes]
        sliced = [total(found["time slicing, eager"]["rates"], base) for found, base in zip(mixes, eager, strict=True)]
        gains = [
            total(chosen_of(found)["rates"], base) / one for found, base, one in zip(mixes, eager, sliced, strict=True)
        ]
        words = "(eager, time-sliced), Σ rate / (eager alone)" if deterministic else "… against starting all at once, eager"
        yield "docs/results.md", words + (" | {} | {} |" if deterministic else " | {} | {} | | `carpool run`"), gains
        if deterministic:
            yield "docs/results.md", "no-interference limit of 3 | {} | {} |", [value / 3 for value in sums]
            measuring = [chosen_of(found)["measuring_s"] for found in mixes]
            yield "docs/results.md", "seconds of measuring for the choice | {} | {} |", measuring
            yield "docs/results.md", '"baseline methods" | {} and {} times', gains
    yield from against_baselines()


def against_baselines() -> Iterator[Check]:
    mixes = [sharing(mix, True) for mix in MIXES]
    bases: dict[str, Callable[[Mapping[str, Any]], list[float]]] = {
        "against running sequentially, eager: raw, fair": lambda found: [r / 3 for r in found["alone, eager"]["rates"]],
        "… against running sequentially with CUDA graphs": lambda found: [r / 3 for r in found["alone, graph"]["rates"]],
        "… against starting all at once, eager": lambda found: found["time slicing, eager"]["rates"],
        "… against MPS at 33 % each, eager": lambda found: found["MPS 33 % each, eager"]["rates"],
        "… against MPS at 33 % each with CUDA graphs": lambda found: found["MPS 33 % each, graph"]["rates"],
    }
    for words, base in bases.items():
        values = []
        for found in mixes:
            rates, others = chosen_of(found)["rates"], base(found)
            values += [sum(rates) / sum(others), fair(rates, others)]
        yield "docs/results.md", words + " | {}, {} | {}, {} |", values
        if words.startswith("against running sequentially, eager"):
            yield "README.md", "{} and {} times running them sequentially (eager)", [values[0], values[2]]
        elif words == "… against starting all at once, eager":
            yield "README.md", "{} and {} times starting all at once (eager)", [values[0], values[2]]
        elif words.endswith("sequentially with CUDA graphs"):
            yield "README.md", "{} and {} times running them sequentially with CUDA graphs", [values[1], values[3]]


def many() -> Iterator[Check]:
    rows = [each for each in results("gpu_sharing") if each["call"] == 13 and "rates" in each]
    eight, six = (chosen_of({e["mode"]: e for e in rows if e["mix"] == mix}) for mix in ("8 x R18", "six unlike"))
    page = "docs/results.md"
    yield (
        page,
        "eight ResNet18 reach {} times sequential with graphs and {} times sequential eager ({} % each); six different "
        "trainings {} and {} times ({} % each)",
        [eight["sum"], eight["sum_of_eager"], 15, six["sum"], six["sum_of_eager"], 25],
    )
    hand = [row(rows, mix="8 x R18", share=20), row(rows, mix="six unlike", share=33)]
    yield (
        page,
        "set by hand reaches {} and {}, and {} and {}",
        [value for each in hand for value in (each["sum"], each["sum_of_eager"])],
    )
    yield (
        "README.md",
        "eight ResNet18, or six different trainings | {} and {} times sequential with CUDA graphs, {} and {} times",
        [eight["sum"], six["sum"], eight["sum_of_eager"], six["sum_of_eager"]],
    )
    aside = {each["model"]: each for each in results("gpu_sharing") if each["stage"] == "mirrors"}
    vgg, resnet, mobile = (aside[name] for name in ("vgg16@128", "resnet18@128", "mobilenet_v3@128"))
    yield (
        page,
        "stalls its training for {} ms ({} ms when written by the training itself), ResNet18's for {} ms ({}), "
        "MobileNetV3's for {} ms ({})",
        [each[key] for each in (vgg, resnet, mobile) for key in ("aside_ms", "by_itself_ms")],
    )


CHECKS = [
    check
    for source in (
        philly, scale, replay_gavel, replay_pollux, oracles, default_policy, interference, gpu_sharing, many,
    )
    for check in source()
]  # fmt: skip


@pytest.mark.parametrize(("page", "template", "values"), CHECKS, ids=lambda part: part if isinstance(part, str) else "")
def test_the_page_shows_what_was_measured(page: str, template: str, values: Sequence[float]) -> None:
    shown = printed(page, template)
    assert len(shown) == len(values)
    assert [(text, value) for text, value in zip(shown, values, strict=True) if not agrees(text, value)] == []
