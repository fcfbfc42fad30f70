"""Figures of real trainings, on CPU cores and on an H200."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from tests.docs.figures import Check, document, results, row, text_of


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
    for deterministic, start in (
        (True, "**deterministic**: Σ rate / (graph alone), "),
        (False, "**`deterministic = false`**: "),
    ):
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
        words = (
            "(eager, time-sliced), Σ rate / (eager alone)" if deterministic else "… against starting all at once, eager"
        )
        yield "docs/results.md", words + (" | {} | {} |" if deterministic else " | {} | {} | | `carpool run`"), gains
        if deterministic:
            yield "docs/results.md", "no-interference limit of 3 | {} | {} |", [value / 3 for value in sums]
            measuring = [chosen_of(found)["measuring_s"] for found in mixes]
            yield "docs/results.md", "seconds of measuring for the choice | {} | {} |", measuring
            yield "docs/results.md", '"baseline methods" | {} and {} times', gains
            modes = [f"MPS {share} % each, graph" for share in (33, 50, 100)]
            values = [found[mode]["sum"] for found in mixes for mode in modes]
            values += [found["time slicing, graph"]["sum"] for found in mixes]
            yield "docs/results.md", "{}, {}, {} and {}, {}, {}; time-sliced {} and {}", values
    yield from against_baselines()


def against_baselines() -> Iterator[Check]:
    mixes = [sharing(mix, True) for mix in MIXES]
    bases: dict[str, Callable[[Mapping[str, Any]], list[float]]] = {
        "against running sequentially, eager: raw, fair": lambda found: [r / 3 for r in found["alone, eager"]["rates"]],
        "… against running sequentially with CUDA graphs": lambda found: [
            r / 3 for r in found["alone, graph"]["rates"]
        ],
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
            yield "README.md", "{}× and {}× compared with one after another in eager mode; ", [values[0], values[2]]
        elif words == "… against starting all at once, eager":
            yield "README.md", "{}× and {}× compared with starting all at once in eager mode", [values[0], values[2]]
        elif words.endswith("sequentially with CUDA graphs"):
            yield (
                "README.md",
                "two sets of jobs: {}× and {}× compared with running them one after another with CUDA graphs;",
                [values[1], values[3]],
            )


def many() -> Iterator[Check]:
    rows = [each for each in results("gpu_sharing") if each["call"] == 13 and "rates" in each]
    eight, six = (chosen_of({e["mode"]: e for e in rows if e["mix"] == mix}) for mix in ("8 x R18", "six unlike"))
    page = "docs/results.md"
    yield (
        page,
        "eight ResNet18 reach {} times sequential with graphs and {} times sequential eager ({} % each)",
        [eight["sum"], eight["sum_of_eager"], eight["shares"][0]],
    )
    yield (
        page,
        "six different trainings {} and {} times ({} % each)",
        [six["sum"], six["sum_of_eager"], six["shares"][0]],
    )
    hand = [row(rows, mix="8 x R18", share=20), row(rows, mix="six unlike", share=33)]
    yield (
        page,
        "set by hand reaches {} and {}, and {} and {}",
        [value for each in hand for value in (each["sum"], each["sum_of_eager"])],
    )
    yield (
        "README.md",
        "training jobs | speedup: {}× and {}× over one after another with CUDA graphs; {}× and {}× over one",
        [eight["sum"], six["sum"], eight["sum_of_eager"], six["sum_of_eager"]],
    )
    aside = {each["model"]: each for each in results("gpu_sharing") if each["stage"] == "mirrors"}
    vgg, resnet, mobile = (aside[name] for name in ("vgg16@128", "resnet18@128", "mobilenet_v3@128"))
    yield (
        page,
        "{} ms ({} ms when written by the training itself), ResNet18's for {} ms ({}), MobileNetV3's for {} ms ({})",
        [each[key] for each in (vgg, resnet, mobile) for key in ("aside_ms", "by_itself_ms")],
    )


def unequal_shares(page: str) -> Iterator[Check]:
    for mix, call, words in (
        ("V16@512+2", 7, "VGG16 at 512, MobileNetV3 and ShuffleNetV2 at 64"),
        ("V16@512+2s", 7, "VGG16 at 512, MobileNetV3 and ShuffleNetV2 at 32"),
        ("R101@256+2", 3, "ResNet101 at 256 (stem for small images), MobileNetV3 and ShuffleNetV2 at 32"),
    ):
        rows = [each for each in results("gpu_sharing") if each.get("mix") == mix and each["call"] == call]
        equal = max((each for each in rows if "each, graph" in each["mode"]), key=lambda each: float(each["fair"]))
        unequal = row(rows, mode="MPS 60/33 %, graph")["fair"]
        share = float(re.findall(r"\d+", equal["mode"])[0])
        values = [equal["fair"], share, unequal, 100 * (unequal / equal["fair"] - 1)]
        yield page, f"| {words} | {{}} ({{}} %) | {{}} (60/33/33 %): {{}} %", values
    gains = [
        total(chosen_of(found)["rates"], found["alone, eager"]["rates"])
        / total(found["time slicing, eager"]["rates"], found["alone, eager"]["rates"])
        for found in settled_runs()
    ]
    first, second = gains[: len(gains) // 2], gains[len(gains) // 2 :]
    yield (
        "docs/results.md",
        "was {} to {} for the first mix and {} to {} for the second",
        [
            *(min(first), max(first)),
            *(min(second), max(second)),
        ],
    )
    ratios = [
        total(chosen_of(found)["rates"], found["alone, graph"]["rates"]) / best_equal(found)["sum"]
        for found in settled_runs()
        if chosen_of(found)["call"] < 12
    ]
    yield (
        "docs/results.md",
        "`carpool run` reached {} to {} of the best equal share; one run",
        [min(ratios), max(ratios)],
    )


def settled_runs() -> list[dict[str, Mapping[str, Any]]]:
    """All runs of both mixes whose shares settled, first mix first."""
    found = [sharing(mix, exact, call) for mix in MIXES for call in (6, 8, 10, 11, 12) for exact in (True, False)]
    return [
        rows
        for rows in found
        if any(mode.startswith("carpool run") and each["is_settled"] for mode, each in rows.items())
    ]


def loss_phase_real() -> Iterator[Check]:
    page = "docs/policies/loss-phase.md"
    names = {"2-2": "2–2", "3-1": "3–1", "1-3": "1–3", "1-1": "1–1", "one after another": "one after another"}
    for file, scene, words in (
        ("gpu_loss_phase_job", "job", "per job, alone 4.9 s"),
        ("gpu_loss_phase", "device", "per device, alone 4.8 s"),
        ("gpu_loss_phase_device", "device", "per device, later run, alone 5.0 s"),
        ("gpu_loss_phase_job", "device", "per device, another run, alone 5.5 s"),
        ("gpu_loss_phase_mixed", "mixed", "ResNet-50, then VGG-16, per job, alone 9.4 and 4.9 s"),
    ):
        for each in results(file)["scenes"][scene]["rows"]:
            if "error" not in each:
                name = names.get(each["policy"], f"`{each['policy']}`")
                yield (
                    f"{page}#Real jobs on an H200",
                    f"| {words} | {name} | {{}} | {{}} | {{}} |",
                    [each[k] for k in ("total", "older", "younger")],
                )
    runs = [
        results(file)["scenes"][scene]["rows"]
        for file, scene in (
            ("gpu_loss_phase_job", "job"),
            ("gpu_loss_phase", "device"),
            ("gpu_loss_phase_mixed", "mixed"),
        )
    ]
    for policy, words in (
        ("loss-phase", "total time changes by {}, {} and {} % for `loss-phase`"),
        ("carpool", "and by {}, {} and {} % for the default"),
    ):
        yield (
            page,
            words,
            [100 * (row(rows, policy=policy)["total"] / row(rows, policy="2-2")["total"] - 1) for rows in runs],
        )
    for scene, words in (("job", "per job, alone 18.1 s"), ("device", "per device, alone 16.6 s")):
        for each in results("loss_phase_live")[scene]["runs"]:
            name = names.get(each["policy"], f"`{each['policy']}`")
            yield (
                f"{page}#Real jobs on CPU",
                f"| {words} | {name} | {{}} | {{}} | {{}} |",
                [each[k] for k in ("total", "older", "younger")],
            )
    for scene, words in (("job", "per job, alone 4.9 s"), ("device", "per device, alone 5.3 s")):
        rows = results("loss_phase_lanes_cpu")["scenes"][scene]["rows"]
        for policy in dict.fromkeys(each["policy"] for each in rows):
            both = [each for each in rows if each["policy"] == policy]
            totals = [each["total"] for each in both]
            name = names.get(policy, f"`{policy}`")
            yield (
                f"{page}#Real jobs on CPU",
                f"| {words} | {name} | {{}} ({{}}–{{}}) |",
                [mean(totals), min(totals), max(totals)],
            )


def switching() -> Iterator[Check]:
    page, rows = "docs/switching.md", {each["model"]: each for each in results("gpu_switching")}
    names = {
        "VGG19": "vgg19",
        "BERT base": "bert_base",
        "ResNet50": "resnet50",
        "Transformer": "transformer",
        "Inception v3": "inception_v3:32",
        "FastGCN": "fastgcn",
        "GraphSAGE": "graphsage",
        "DeepSpeech": "deepspeech",
    }
    for name, model in names.items():
        each = rows[model]
        one, ten = each["turns_of_1"], each["turns_of_10"]
        assert each["turns_of_1_against_plain"]["equal_losses"]
        assert each["turns_of_1_against_plain"]["equal_weights"]
        values = [
            one["step_ms"]["all"],
            one["gap_ms"]["median"],
            one["gap_ms"]["p99"],
            100 * one["share"],
            100 * ten["share"],
        ]
        theirs = (None, None)
        values += [*theirs, each["streamed"]["switch_ms"], each["cold_start_s"]]
        yield page, f"| {name} | {{}} | {{}} | {{}} | {{}} % | {{}} % | {{}} ({{}} %) | {{}} | {{}} |", values
    models = [rows[model] for model in names.values()]
    gaps, shares = (
        [each["turns_of_1"]["gap_ms"]["median"] for each in models],
        [100 * each["turns_of_1"]["share"] for each in models],
    )
    tens = [100 * each["turns_of_10"]["share"] for each in models]
    yield "docs/results.md", "0.96 to 5.79 ms | {} to {} ms, medians", [min(gaps), max(gaps)]
    yield (
        "docs/results.md",
        "1.13 to 4.53 % | {} to {} % with turns of one step, {} to {} % with ten",
        [min(shares), max(shares), min(tens), max(tens)],
    )
    shown = [min(gaps), max(gaps), min(shares), max(shares), max(tens)]
    switching = "{} to {} ms; overhead {} to {} % when jobs switch after every step, at most {} % when they"
    yield "README.md", switching, shown
    switches = rows["all"]["turns_of_1"]["gap_ms"]["count"]
    yield "README.md", "losses and weights bit-identical after {} switches", [switches]
    yield "docs/comparison.md", "time slicing with {} to {} ms a switch (H200)", [min(gaps), max(gaps)]
    yield (
        "docs/results.md",
        "idle for {} to {} ms (medians) between two of them, at most {} ms in 99 of 100 cases",
        [min(gaps), max(gaps), max(each["turns_of_1"]["gap_ms"]["p99"] for each in models)],
    )
    cold = [each["cold_start_s"] for each in models]
    yield "docs/results.md", "Eight cold starts at a time took {} to {} s", [min(cold), max(cold)]
    thousand = [each["turns_of_1"] for each in results("gpu_switching_thousand")[:3]]
    yield (
        page,
        "{}, {} and {} ms, 99th percentiles {}, {} and {}, longest of 2,991 gaps {} ms, {}, {} and {} % of the time",
        [each["gap_ms"]["median"] for each in thousand]
        + [each["gap_ms"]["p99"] for each in thousand]
        + [max(each["gap_ms"]["max"] for each in thousand)]
        + [100 * each["share"] for each in thousand],
    )


def memory() -> Iterator[Check]:
    page, rows = "docs/switching.md", results("gpu_memory_eight")
    free, eight = row(rows, case="without a cap"), row(rows, case="eight")
    assert eight["equal_to_uncapped"]
    assert eight["memory"]["samples_above_cap"] == 0
    yield (
        page,
        "they take {} GiB and {} s, with it {} s. The peak is {} GiB, none of {} samples",
        [
            free["memory"]["peak_gib"],
            free["seconds"],
            eight["seconds"],
            eight["memory"]["peak_gib"],
            eight["memory"]["samples"],
        ],
    )
    gaps = eight["all_gaps_ms"]
    yield (
        page,
        "{} of the turns found the state in place. The median gap is {} ms; {} of {} are above 1 ms, the longest {} ms",
        [eight["hit_rate"], gaps["median"], eight["gaps_above_1_ms"], gaps["count"], gaps["max"]],
    )
    yield (
        "docs/results.md",
        "take {} GiB together run under a cap of {} GiB with a peak of {} GiB",
        [free["memory"]["peak_gib"], eight["cap_gib"], eight["memory"]["peak_gib"]],
    )
    yield (
        "docs/results.md",
        "The median gap is {} ms, but {} of {} gaps are above 1 ms, the longest {} ms",
        [gaps["median"], eight["gaps_above_1_ms"], gaps["count"], gaps["max"]],
    )
    for each in (each for each in rows if each["case"] == "two"):
        words = " | ".join("yes" if each[key] else "no" for key in ("speculates", "leaves_early"))
        found = each["all_gaps_ms"]
        yield (
            page,
            f"| {words} | {{}} | {{}} | {{}} | {{}} |",
            [each["hit_rate"], found["median"], found["max"], each["seconds"]],
        )
    for each, name in zip(
        (each for each in rows if each["case"] == "parked"),
        ("VGG16", "ResNet50", "BERT base", "MobileNetV3"),
        strict=True,
    ):
        keys = ("state_megabytes", "copy_ms", "begin_ms", "whole_ms", "ratio")
        yield page, f"| {name} | {{}} MB | {{}} ms | {{}} ms | {{}} ms | {{}} |", [each[key] for key in keys]
    three = row(results("gpu_memory_three"), case="three")
    yield (
        page,
        "none of {} samples above the cap, state in place in {} of the turns, median of {} gaps {} ms, longest {}",
        [
            three["memory"]["samples"],
            three["hit_rate"],
            three["all_gaps_ms"]["count"],
            three["all_gaps_ms"]["median"],
            three["all_gaps_ms"]["max"],
        ],
    )
    tiny = [each for each in results("memory_cpu") if each["cap_gib"]]
    for each in tiny:
        words = " | ".join("yes" if each[key] else "no" for key in ("speculates", "leaves_early"))
        yield "docs/results.md", f"| {words} | {{}} |", [each["hit_rate"]]


def warm() -> Iterator[Check]:
    rows, fresh = results("gpu_warm"), results("gpu_warm_fresh")
    names = {
        "transformer, 63 M parameters": "transformer",
        "BERT base, 109 M parameters, batch 128": "bert_base",
        "VGG16, 134 M parameters": "vgg16",
        "ResNet18": "resnet18",
        "MobileNetV3": "mobilenet_v3",
        "ResNet50": "resnet50",
        "CNN of the examples, CIFAR-10 shapes": "examples/cifar10_cnn.py:cnn",
        "CNN of the examples, digits": "examples/digits.py:cnn",
    }
    for name, model in names.items():
        each = row(rows, model=model, start="warm seat")
        yield "docs/results.md", f"| {name} | {{}} s | {{}} s |", [each["first_step_s"], each["entry_s"]]
        if any(other["model"] == model and other["start"] == "fresh process" for other in fresh):
            template = f"| {name} | {{}} s | {{}} s | " + ("{} s | {} s |" if model == "resnet18" else "| {} s |")
            forked = [row(rows, model=model, start="forked")["first_step_s"]] if model == "resnet18" else []
            values = [
                each["first_step_s"],
                each["entry_s"],
                *forked,
                row(fresh, model=model, start="fresh process")["first_step_s"],
            ]
            yield "docs/results.md", template, values
    start = [row(rows, model="resnet18", start=start)["first_step_s"] for start in ("warm seat", "forked")]
    yield (
        "docs/how-to/share-a-gpu.md",
        "first step {} s after the order, {} s in a process forked for it, and {} s in a fresh one",
        [*start, row(fresh, model="resnet18", start="fresh process")["first_step_s"]],
    )


def resize() -> Iterator[Check]:
    plain, exact, torchrun = (results("runtime_resize")[key] for key in ("default", "exact", "torchrun"))
    page = "docs/results.md"
    yield (
        page,
        "for {} ms (default mode) and {} ms (exact), medians of {}, worst {} both, where a step takes {} and {} ms",
        [
            plain["median_stall_ms"],
            exact["median_stall_ms"],
            plain["resizes"],
            plain["worst_stall_ms"],
            plain["median_step_ms"],
            exact["median_step_ms"],
        ],
    )
    yield page, "restarting it on the same model takes {} s", [torchrun["median_restart_ms"] / 1000]
    yield (
        "README.md",
        "stalls it for {} ms (exact mode {} ms); killing and restarting torchrun takes {} s",
        [plain["median_stall_ms"], exact["median_stall_ms"], torchrun["median_restart_ms"] / 1000],
    )


def correctness() -> Iterator[Check]:
    found = results("runtime_exact")
    answers = {
        part: [answer for case in found[part].values() for answer in case["jobs"].values()]
        for part in ("exact", "default", "default_2_devices")
    }
    assert {answer for part in answers.values() for answer in part} == {"equal"}
    exact, rest = len(answers["exact"]), len(answers["default"]) + len(answers["default_2_devices"])
    yield "docs/results.md", "equal in {} of {} cases", [exact + rest] * 2
    yield (
        "docs/results.md",
        "resumed ({} of {}); default mode on unchanged devices likewise ({} of {})",
        [exact, exact, rest, rest],
    )
    yield "README.md", "equal digests in {} of {} cases", [exact + rest] * 2
    worst = max(each["largest_relative_error"] for each in found["gradients"].values())
    yield "docs/results.md", "gradient is within {}e-7 of the one-device gradient", [1e7 * worst]
    faults = results("runtime_faults")
    assert faults["same_weights"] == faults["jobs"] == 20
    yield (
        "README.md",
        "after {} random faults over {} jobs",
        [sum(faults["runs"][0]["faults"].values()), faults["jobs"]],
    )
    daemon = row(results("service_crashes"), name="daemon")
    assert daemon["ended_once"] == daemon["equal_digests"] == daemon["jobs"]
    yield "README.md", "daemon killed {} times with {} jobs", [daemon["kills"], daemon["jobs"]]
    graphs = results("gpu_graphs")
    assert all(each["same_weights"] and each["same_losses"] for each in graphs)
    yield "docs/results.md", "bit-identical in all {} cases", [len(graphs)]


def fleet() -> Iterator[Check]:
    page, found = "docs/results.md", results("fleet_faults")
    labels = (
        ("executor stopped for 30 s", "hosts", 0),
        ("agent and executor stopped for 30 s", "hosts", 1),
        ("link cut for 20 s", "hosts", 2),
        ("machine killed", "hosts", 3),
        ("link cut for 20 s, lease of 30 s", "short", 0),
        ("raylet killed and reaped", "ray", 0),
        ("raylet killed, left as a zombie", "ray", 1),
        ("Ray's head away for 20 s, tables in Redis", "head", 0),
        ("the same, driver killed as well", "head", 1),
        ("Ray's head away for 20 s, started anew", "head", 2),
    )
    for label, part, place in labels:
        each = found[part][place]
        assert each["ended_once"]
        assert each["is_digest_equal"]
        times = [each["detected_s"], each["first_step_s"]] if each["is_lost"] else []
        words = "{} s | {} s" if each["is_lost"] else "never | –"
        has_others = each["longest_pause_s"] >= 0.0
        pause, others = ([each["longest_pause_s"]], "{} s") if has_others else ([], "–")
        again = [*pause, each["steps_again"], each["again_s"]]
        after = [each["steps_after_loss"], each["files_after_loss"]]
        yield page, f"| {label} | {words} | {others} | {{}} ({{}} s) | {{}} and {{}} |", [*times, *again, *after]
    for engine, label in (("hosts", "hosts, 10 s"), ("ray", "Ray, 30 s")):
        for words, each in zip(("", ", longer than the lease"), results("fleet_restarts")[engine], strict=True):
            assert each["ended_once"]
            assert each["are_digests_equal"]
            assert each["processes"] == 1
            values = [each["down_s"], each["longest_pause_s"], each["resumed_s"], each["steps_again"]]
            yield page, f"| {label}{words} | {{}} s | {{}} s | {{}} s | {{}} |", values


def overhead() -> Iterator[Check]:
    page, rows = "docs/results.md", document("runtime_overhead")["overhead"]
    for name, model in (
        ("small CNN", "cnn"),
        ("CNN with BatchNorm", "norm_cnn"),
        ("MLP", "mlp"),
        ("MLP, short step", "mlp_short"),
        ("MLP, long step", "mlp_long"),
    ):
        each = row(rows, model=model)
        yield (
            page,
            f"| {name} | {{}} | {{}} | {{}} |",
            [each["step_ms"], each["worker_to_bare_core"], each["worker_to_like_core"]],
        )
    yield (
        page,
        "a worker adds {} µs, and {} µs with cold caches",
        [row(rows, model=model)["hooks_us"] for model in ("tiny", "tiny_cold")],
    )
    gpu = document("runtime_overhead_gpu")["overhead"]
    yield (
        page,
        "{} for an MLP ({} ms a step), {} for a transformer ({} ms) and {} for a CNN with BatchNorm ({} ms)",
        [value for each in gpu for value in (each["worker_to_bare_clock"], each["step_ms"])],
    )


def data_parallel() -> Iterator[Check]:
    page = "docs/results.md"
    for job, name in (("cnn", "CNN with BatchNorm, SGD"), ("lstm", "LSTM, Adam, clipped")):
        for cores, words, file in (
            ([8, 8], "2 × 8 cores", "runtime_ddp"),
            ([4, 4, 4, 4], "4 × 4 cores", "runtime_ddp" if job == "cnn" else "runtime_ddp_lstm"),
            ([8, 4], "8 and 4 cores", "runtime_ddp_unlike" if job == "cnn" else "runtime_ddp_lstm_unlike"),
        ):
            each = row(results(file)["rows"], job=job, cores_of_devices=cores)
            yield (
                page,
                f"| {name} | {words} | {{}} | {{}} | {{}}",
                [each["carpool_samples_per_s"], each["ddp_samples_per_s"], each["ratio"]],
            )
    small = [
        each["ratio"]
        for file in ("runtime_ddp_two_cores_cnn", "runtime_ddp_two_cores")
        for each in results(file)["rows"]
    ]
    yield page, "the CNN is at {} and {} of DDP's throughput and the LSTM at {} and {}", small
    wide = results("span_ddp"), results("span_ddp_1gbit")
    yield (
        page,
        "takes {} times as long as DDP's (median of {} pairs,",
        [wide[0]["ratio"], wide[0]["repeats"]],
    )
    yield (
        page,
        "and {} times with 2.1 million parameters over 1 Gbit/s ({} pairs)",
        [wide[1]["ratio"], wide[1]["repeats"]],
    )
    for name, file, job in (
        ("CNN, 192 samples | 4 and 2", "runtime_unlike_cnn_192", "cnn"),
        ("CNN, 96 samples | 4 and 2", "runtime_unlike_cnn_four_two", "cnn"),
        ("perceptron, 4096 samples | 4 and 2", "runtime_unlike_four_two", "perceptron"),
        ("perceptron, 4096 samples | 6 and 3", "runtime_unlike", "perceptron"),
        ("CNN, 384 samples | 8 and 4", "runtime_unlike_cnn", "cnn"),
        ("perceptron, 8192 samples | 8 and 4", "runtime_unlike_8192", "perceptron"),
    ):
        each = results(file)[job]
        fast, slow = each["alone"]["samples_per_s"]
        yield page, f"| {name} | {{}} | {{}} | {{}} (", [fast / slow, each["alone"]["possible"], each["times_faster"]]
    times = results("runtime_updates")["median_step_ms"]
    yield (
        page,
        "takes {} ms a step, all on the first device {} ms, evenly split {} ms, every device updating everything {} ms",
        [times[key] for key in ("chosen", "first", "even", "all")],
    )
    errors = [case["worst_error"] for case in results("runtime_memory")["cases"]]
    yield page, "worst error of memory in use is {} %", [100 * max(errors)]
    yield "docs/how-to/profile-and-plan.md", "at unseen batch sizes was {} %", [100 * max(errors)]


def live_against_simulated() -> Iterator[Check]:
    for scene, words in (
        ("default", "default | `carpool`"),
        ("in order", "in order | `fifo`"),
        ("elastic", "elastic | `afs`"),
        ("shared", "shared | `mps-equal:slots=2`"),
    ):
        found = results("live_vs_simulated")["scenes"][scene]
        values = [
            100 * value
            for key in ("before", "learned")
            for value in (found[key]["worst_error"], found[key]["makespan_s"]["error"])
        ]
        yield "docs/results.md", f"| {words} | {{}} %, {{}} % | {{}} %, {{}} % |", values
    scenes = results("live_vs_simulated_paced")["scenes"].values()
    worst = [[100 * scene[key]["worst_error"] for scene in scenes] for key in ("before", "learned")]
    yield (
        "docs/results.md",
        "was {} to {} % off before, and {} to {} % with learned profiles",
        [edge for each in worst for edge in (min(each), max(each))],
    )


def service() -> Iterator[Check]:
    page, found = "docs/service.md", results("service_load")
    for policy, runs in found["policies"].items():
        for each in runs["submissions"]:
            yield (
                page,
                f"| `{policy}` | {each['clients']} | {{}} | {{}} ms | {{}} ms |",
                [each["per_s"], each["p99_ms"], each["list_p99_ms"]],
            )
    yield page, "SQLite alone writes {} rows/s", [found["sqlite_rows_per_s"]]
    sizes = [each["bytes"] / 2**20 for each in found["policies"]["carpool"]["memory"]]
    yield page, "stays between {} and {} MiB", [min(sizes), max(sizes)]
    yield page, "`carpool ps` takes {} s of CPU", [results("service_cold_start")["cpu_s"]["median"]]
    losses = results("service_power_loss")["rows"]
    for each in losses:
        yield (
            page,
            f"| {each['damage']} | {{}} | {{}} | {{}} | {{}} | {{}} |",
            [each[key] for key in ("cases", "synced", "kept", "named", "silent")],
        )
    assert not any(each["unnamed_jobs"] or each["invented_jobs"] for each in losses)
    yield (
        page,
        "all {} daemons opened, and the {} that were started ran all {} remaining jobs",
        [sum(each[key] for each in losses) for key in ("opened", "daemons", "jobs_ended")],
    )
    large = row(results("dashboard"), jobs=1000, devices=504, page="cluster")
    yield "docs/dashboard.md", "at 1,000 jobs the cluster page is {} kB", [large["bytes"] / 1000]


def competitive() -> Iterator[Check]:
    page = "docs/policies/competitive.md"
    names = dict(
        zip(
            (each["mix"] for each in results("competitive")["mixes"]),
            (
                "VGG16 + ResNet18 + MobileNetV3",
                "ResNet50 + ShuffleNetV2 + DenseNet121",
                "VGG16 at 512, ResNet18 at 64, MobileNetV3 at 32",
                "ResNet101 at 256, MobileNetV3 and ShuffleNetV2 at 32",
                "BERT-base at 8, NCF, GCN, LSTM",
                "VGG16 at 512, ShuffleNetV2 at 32, NCF, BERT-small",
            ),
            strict=True,
        )
    )
    for each in results("competitive")["mixes"]:
        values = [each["sum"]["best equal"], each["sum"]["chosen"]] + [
            each["fair"][key] for key in ("best equal", "chosen", "with batches")
        ]
        yield page, f"| {names[each['mix']]} | {{}} | {{}} | {{}} | {{}} | {{}} |", values
    streams = results("competitive")["stream"]
    below = [
        [
            100 * (1 - each["competitive"]["avg_jct_s"] / min(each[rival]["avg_jct_s"] for rival in rivals))
            for each in streams
        ]
        for rivals in (("mps-equal", "kernel-est", "antman"), ("fifo",))
    ]
    yield (
        page,
        "{} to {} % below the best of `mps-equal`, `kernel-est` and `antman`, and {} to {} % below `fifo`",
        [edge for each in below for edge in (min(each), max(each))],
    )
    for deterministic, words in (
        (True, "seconds until settled, and of these measuring"),
        (False, "the same with `deterministic = false`"),
    ):
        found = [chosen_of(sharing(mix, deterministic)) for mix in MIXES]
        yield (
            page,
            f"| {words} | {{}}, {{}} | {{}}, {{}} |",
            [each[key] for each in found for key in ("settled_s", "measuring_s")],
        )
    for call, deterministic, words in (
        (6, True, "6, deterministic"),
        (11, True, "11, deterministic"),
        (11, False, "11, `deterministic = false`"),
    ):
        values = []
        for rows in (sharing(mix, deterministic, call) for mix in MIXES):
            best = best_equal(rows)["sum"]
            values += [best, total(chosen_of(rows)["rates"], rows["alone, graph"]["rates"]) / best]
        yield page, f"| {words} | {{}}, {{}} | {{}}, {{}} |", values
    yield from unequal_shares(page)
    fed = results("gpu_sharing_fed")
    for mix, words in (
        ("LSTM+R18 fed", "ResNet18 at 512, fed 12,000/s"),
        ("LSTM+R50 fed", "ResNet50 at 128 (stem for small images), fed 2,900/s"),
        ("LSTM+M3 fed", "MobileNetV3 at 512, fed 21,000/s"),
    ):
        rates = row(fed, mix=mix, call=4, policy="competitive")["rates"]
        compared = row(fed, mix=mix, call=4, stage="live, compared")
        equal = row(fed, mix=mix, call=4, share=compared["best_equal"])["rates"]
        (listed,) = re.findall(re.escape(words) + r" \| 100/33 % \| [\d, and]+ \| \d+ % of ([\d, ]+) \|", text_of(page))
        yield (
            page,
            f"| {words} | 100/33 % | {{}} and {{}} | {{}} % of {listed} | {{}} and {{}} | {{}} % (",
            [*rates, compared["best_equal"], *equal, 100 * compared["ahead"]],
        )


def tuned() -> Iterator[Check]:
    rows = results("live_policies")["tuned"]
    for own in (8, 64):
        for policy in ("carpool:interval_s=2", "iadeep:settle_s=0.5"):
            found = [row(rows, own=own, policy=policy, batches=batches) for batches in ("as written", "tuned")]
            values = [value for each in found for value in (each["avg_jct_s"], *(job["steps"] for job in each["jobs"]))]
            yield (
                "docs/policies/iadeep.md",
                f"| {own} | `{policy}` | {{}}, {{}} and {{}} | {{}}, {{}} and {{}} |",
                values,
            )
    steps = [
        [job["steps"] for each in rows if each["batches"] == batches for job in each["jobs"]]
        for batches in ("tuned", "as written")
    ]
    portions = [100 * tuned / written for tuned, written in zip(*steps, strict=True)]
    yield "docs/results.md", "all eight, in {} to {} % of the steps", [min(portions), max(portions)]
    weighted = results("live_policies")["weighted"]
    for policy in ("carpool", "hare", "wsrtf", "fifo"):
        values = [row(weighted, policy=policy, run=run)["weighted_jct_s"] for run in (1, 2)]
        yield "docs/policies/hare.md", f"| `{policy}` | {{}} | {{}} | " + ("no" if policy == "fifo" else "yes"), values


def halving() -> Iterator[Check]:
    rows = results("halving")["rows"]
    page = "docs/how-to/sweeps.md"
    portions = {
        task: [100 * row(rows, task=task, seed=seed)["fraction"] for seed in (1, 2, 3)] for task in ("digits", "noisy")
    }
    yield page, "in {}, {} and {} % of the grid's steps", portions["digits"]
    yield page, "it took {}, {} and {} % of the steps", portions["noisy"]
    seconds = {
        (task, kind): [row(rows, task=task, seed=seed)[kind] for seed in (1, 2, 3)]
        for task in portions
        for kind in ("halving_s", "grid_s")
    }
    noisy, digits = ([*seconds[task, "halving_s"], *seconds[task, "grid_s"]] for task in ("noisy", "digits"))
    yield page, "the noisy sweeps took {}, {} and {} s against {}, {} and {} s of the grid", noisy
    yield page, "scikit-learn, {}, {} and {} s against {}, {} and {} s.", digits
    below = [each for each in rows if not each["same"]]
    assert [each["task"] for each in below] == ["noisy"]
    gap = 100 * (below[0]["grid_best"]["val_acc"] - below[0]["halving_best"]["val_acc"])
    yield page, "with one {} percentage points below it", [gap]
    assert all(each["found"] and each["equal_bits"] and each["fraction"] <= 0.4 for each in rows)


def plain_scripts() -> Iterator[Check]:
    page, measured = "docs/results.md", results("newcomer_gpu")
    sets = [measured["vision"], measured["language"]]
    yield page, "| `python train.py …` one after another | {} | |", [sets[0]["in_turn"]["wall_s"]]
    rows = {
        "all at once with `&`": "at_once",
        "all at once under MPS, set up by hand": "at_once_mps",
        "**`carpool run jobs.toml`**, the same as trainings, no options": "carpool",
        "`carpool run jobs.toml`, unmodified scripts as commands": "carpool_commands",
    }
    for words, way in rows.items():
        mark = "**" if way == "carpool" else ""
        cells = f"| {mark}{{}}{mark} | {mark}{{}}{mark} |"
        yield page, f"| {words} {cells}", [each[way]["wall_s"] for each in sets]
    parts = [sets[0]["of_best_by_hand"], sets[0]["of_in_turn"], sets[1]["of_best_by_hand"]]
    words = "{} of the best time by hand and {} of one after another; the language models {} of the best by hand."
    yield page, words, [each["carpool"] for each in parts]
    yield page, "As commands they take {} and {} of it.", [each["of_best_by_hand"]["carpool_commands"] for each in sets]
    vision = [sets[0][way]["wall_s"] for way in ("carpool", "in_turn", "at_once", "at_once_mps")]
    shown = (
        "{} s from the command to its exit; the same four as plain scripts:"
        " {} s one after another, {} s all at once, {} s under MPS"
    )
    yield "README.md", shown, vision


SOURCES = (
    halving,
    gpu_sharing,
    many,
    competitive,
    loss_phase_real,
    switching,
    memory,
    warm,
    resize,
    correctness,
    fleet,
    overhead,
    data_parallel,
    live_against_simulated,
    service,
    tuned,
    plain_scripts,
)
