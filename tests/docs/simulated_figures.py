"""Figures of simulations, of policies and of predictors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from statistics import mean
from typing import Any

from tests.docs.figures import Check, off, results, row


def philly() -> Iterator[Check]:
    for cluster, policy, words in (
        ("1x512xV100", "fifo", "| 1 × 512 | fifo |"),
        ("1x512xV100", "fifo:bypass=true", "| 1 × 512 | fifo:bypass=true |"),
        ("64x8xV100", "fifo", "| 64 × 8 | fifo |"),
        ("1x512xV100", "srtf", "| 1 × 512 | srtf |"),
        ("1x512xV100", "las", "| 1 × 512 | las |"),
    ):
        found = row(results("replay_philly")[:6], cluster=cluster, policy=policy)
        yield "docs/results.md", words + " {} | {} | {} | {} |", [*found["reached"], found["cpu_s"]]
    for cluster, policy, words in (
        ("1x512xV100", "fifo", "| 512 pooled | head blocks |"),
        ("1x512xV100", "fifo:bypass=true", "| 512 pooled | later jobs may pass |"),
        ("64x8xV100", "fifo", "| 64 nodes of 8 | head blocks |"),
    ):
        found = row(results("replay_philly")[:6], cluster=cluster, policy=policy)
        assert found["wanted"] == found["reached"]
        yield "docs/policies/fifo.md", words + " {} | {} | {} |", found["reached"]
    first = results("replay_philly")[0]
    yield "README.md", "the run takes {} s of CPU time with `fifo`", [first["cpu_s"]]
    default = row(results("replay_philly"), policy="carpool")
    words = "an average JCT of {} s on 64 × 8 (wait {} s, makespan {} s) in {} CPU s"
    yield "docs/results.md", words, [*default["reached"], default["cpu_s"]]


def scale() -> Iterator[Check]:
    a, b, c, _ = results("scale")
    yield (
        "docs/results.md",
        "{} µs at 10,000 jobs on 1,000 devices, {} µs at 100,000 on 10,000 and {} µs at 1,000,000 on 100,000 ({} CPU s",
        [a["us_per_job"], b["us_per_job"], c["us_per_job"], c["cpu_s"]],
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
        listed, rounds, differs = each["listed"], each["rounds"], each["off"]
        yield (
            "docs/results.md",
            f"| {title} | `{policy}` | {{}} / {{}} | {{}} / {{}} | {{}} % / {{}} % |",
            [
                *(listed["avg_jct_s"], listed["makespan_s"], rounds["avg_jct_s"], rounds["makespan_s"]),
                *(100 * differs["avg_jct"], 100 * differs["makespan"]),
            ],
        )
    yield (
        "docs/results.md",
        "our versions reach, in order, {}, {}, {}, {}, {}, {} and {} s",
        [each["events"]["avg_jct_s"] for each in found],
    )
    for each in results("replay_gavel"):
        is_fifo, is_long = each["name"].startswith("fifo"), "1000" in each["trace"]
        page = "docs/policies/gavel-fifo.md" if is_fifo else "docs/policies/gavel.md"
        listed, rounds, differs = each["listed"], each["rounds"], each["off"]
        values = [listed["avg_jct_s"], listed["makespan_s"], rounds["avg_jct_s"], rounds["makespan_s"]]
        values += [100 * differs["avg_jct"], 100 * differs["makespan"]]
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
        difference = 100 * (reached / published - 1)
        yield (
            "docs/policies/pollux.md",
            words + " {} s | {} s ({} %) | {} |",
            [published, reached, difference, run["cpu_s"]],
        )
    difference = 100 * (optimus["avg_jct_s"] / optimus["published_avg_jct_s"] - 1)
    yield (
        "docs/policies/optimus.md",
        "| {} s | {} s | {} % | {} |",
        [optimus["published_avg_jct_s"], optimus["avg_jct_s"], difference, optimus["cpu_s"]],
    )


def oracles() -> Iterator[Check]:
    for power in (0.3, 0.5, 0.7, 0.9):
        policies = ("afs", "afs:optimism=1", "afs:ahead=true")
        found = [row(results("oracles"), p=power, jobs=16, policy=policy) for policy in policies]
        values = [each[key] for each in found for key in ("mean", "worst")]
        yield "docs/policies/afs.md", f"| {power} | {{}} ({{}}) | {{}} ({{}}) | {{}} ({{}}) |", values


def figure(ground: str, setting: str, policy: str) -> float:
    return float(row(results("policies")["grounds"][ground]["rows"], setting=setting, policy=policy)["figure"])


def default_policy() -> Iterator[Check]:
    pairs, whole = figure("gavel", "96 jobs", "carpool"), figure("gavel", "96 jobs", "carpool:together=1")
    allox = figure("gavel", "96 jobs", "allox:gang=true")
    sixteen, rival = figure("gavel", "1000 jobs on 16", "carpool"), figure("gavel", "1000 jobs on 16", "gavel")
    known, unknown = (
        figure("pollux", "workload-6", "carpool"),
        figure("pollux", "workload-6", "carpool:lengths=unknown"),
    )
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
    yield "README.md", "Gavel's 96 jobs: {} s (best other policy: {} s)", [whole, allox]
    yield "README.md", "Pollux's workload-6: {} s (Pollux: {} s", [known, pollux]
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


def hare_mean(policy: str, jobs: int, span_s: float, per_kind: int = 40, switch: str = "fast") -> float:
    wanted = {"policy": policy, "jobs": jobs, "span_s": span_s, "per_kind": per_kind, "switch": switch}
    found = [r for r in results("hare")["rows"] if all(r[key] == value for key, value in wanted.items())]
    assert len(found) == 4  # seeds
    return mean(float(each["weighted_jct_s"]) for each in found)


def hare() -> Iterator[Check]:
    page = "docs/policies/hare.md"
    due = results("hare")["due"]
    for policy in ("wsrtf", "allox:gang=true", "srtf", "sched-homo", "allox", "gavel-fifo"):
        pair = [due[mine][policy][switch] for switch in ("fast", "cold") for mine in ("hare", "carpool")]
        values = [100 * value for entry in pair for value in entry]
        once, spread = hare_mean(policy, 300, 0.0), hare_mean(policy, 300, 900.0)
        template = (
            f"| `{policy}` | {{}} ± {{}} | {{}} ± {{}} | {{}} ± {{}} % | {{}} ± {{}} % | {{}} ± {{}}, {{}} ± {{}} % |"
        )
        yield page, template, [once, None, spread, None, *values]
    for words, policy in (
        ("lower bound", ""),
        ("`hare`", "hare"),
        ("`carpool`", "carpool"),
        ("`hare-literal`", "hare-literal"),
    ):
        template = f"| {words} | {{}} ± {{}} | {{}} ± {{}} |"
        once, spread = hare_mean(policy, 300, 0.0), hare_mean(policy, 300, 900.0)
        yield page, template, [once, None, spread, None]
    sizes = [
        [hare_mean(policy, 200, 0.0, per_kind) for per_kind in (20, 30, 40, 60)]
        for policy in ("hare", "carpool", "wsrtf")
    ]
    yield (
        page,
        "`hare` {}, {}, {} and {} s, the default {}, {}, {} and {} s, `wsrtf` {}, {}, {} and {} s",
        [value for line in sizes for value in line],
    )
    small = [[hare_mean(policy, 100, span_s) for span_s in (0.0, 900.0)] for policy in ("hare", "carpool", "wsrtf", "")]
    yield (
        page,
        "`hare` {} and {} s, the default {} and {}, `wsrtf` {} and {}, the bound {} and {}",
        [value for line in small for value in line],
    )
    yield from hare_claims(due)


def hare_tasks_table() -> Iterator[Check]:
    means = {(row["policy"], row["span_s"]): mean(row["weighted_jct_s"]) for row in results("hare_tasks")["rows"]}
    for policy in ("per task", "hare-literal", "wsrtf", "hare"):
        words = "rule per task" if policy == "per task" else f"`{policy}`"
        values = [means[policy, span_s] for span_s in (0.0, 900.0)]
        yield "docs/policies/hare-literal.md", f"| {words} | {{}} | {{}} |", values


def hare_claims(due: Mapping[str, Any]) -> Iterator[Check]:
    page = "docs/results.md"
    ranges = [
        -100 * due[mine][policy][switch][0]
        for switch in ("cold", "fast")
        for mine in ("hare", "carpool")
        for policy in ("allox:gang=true", "gavel-fifo")
    ]
    yield page, "−47.6 … −75.3 % | {} … {} %; {} … {} % |", ranges[:4]
    yield page, "not stated | {} … {} %; {} … {} % | the same | 4 ms", ranges[4:]
    cold = [100 * due[mine][policy]["cold"][0] for mine in ("hare", "carpool") for policy in ("allox", "gavel-fifo")]
    yield page, "{} and {} % better; {} and {} %", cold
    slower = [
        1 / (1 - due[mine][policy]["fast"][0])
        for policy in ("allox", "allox:gang=true")
        for mine in ("hare", "carpool")
    ]
    yield page, "about 2× | {}×, {}× (single GPUs), {}×, {}× (gangs)", slower
    bound = [
        100 * (hare_mean(policy, 300, span_s) / hare_mean("", 300, span_s) - 1)
        for policy in ("hare", "carpool")
        for span_s in (0.0, 900.0)
    ]
    yield page, "not stated | {} % (at once), {} % (arrivals); {} and {} % | lower bound", bound
    rows = [each for each in results("hare")["rows"] if each["jobs"] == 300 and each["switch"] == "fast"]
    waits = [
        max(each["longest_wait_s"] for each in rows if each["policy"] == policy)
        for policy in ("hare", "carpool", "gavel-fifo")
    ]
    yield page, "longest wait {} s; {} s | `gavel-fifo` {} s", waits
    within = [
        100 * mean(e["within"] for e in rows if e["policy"] == policy and e["span_s"] == 0.0)
        for policy in ("hare", "allox", "sched-homo", "carpool")
    ]
    yield page, "90.5 %, 66.7 %, 56.5 % | {} %, {} %, {} %; the default {} %", within


def loss_phase() -> Iterator[Check]:
    two, page = results("loss_phase")["two"], "docs/policies/loss-phase.md"
    names = {"2-2": "2–2", "3-1": "3–1", "1-3": "1–3"}
    for scene, title in (("job", "512 per job"), ("device", "128 per device"), ("mixed", "ResNet-50 + VGG-16")):
        for each in two:
            if each["scene"] != scene or each["policy"] == "2-2":
                continue
            name = names.get(each["policy"], each["policy"])
            name = name if name in (*names.values(), "one after another") else f"`{name}`"
            values = [each["total"]["s"]] + [
                each[k][v] for k in ("total", "older", "younger", "mean") for v in ("pct", "ci")
            ]
            yield f"{page}#{title}", f"| {name} | {{}} | " + " | ".join(["{} ± {} %"] * 4) + " |", values
    for ground in dict.fromkeys(each["ground"] for each in results("loss_phase")["many"]):
        rows = [each for each in results("loss_phase")["many"] if each["ground"] == ground]
        order = (
            "fifo",
            "afs",
            "optimus",
            "loss-phase-literal",
            "loss-phase",
            "loss-phase:objective=total",
            "carpool",
            "carpool:objective=makespan",
        )
        values = [row(rows, policy=policy)[key] for policy in order for key in ("total_s", "mean_jct_s")]
        yield page, f"| {ground} | " + " | ".join(["{} / {}"] * 8) + " |", values
    kept = [
        each
        for each in two
        if each["policy"] != "2-2" and not (each["scene"] == "mixed" and each["policy"] == "loss-phase:objective=total")
    ]
    listed = ("3-1", "loss-phase-literal", "loss-phase", "carpool", "one after another")
    widest = max(
        each[key]["ci"] for each in kept if each["policy"] in listed for key in ("total", "older", "younger", "mean")
    )
    worst = row(two, scene="mixed", policy="loss-phase:objective=total")["older"]["ci"]
    yield (
        "docs/results.md",
        "intervals are at most ± {} points, but for `loss-phase:objective=total` in the third setting (± {} points",
        [widest, worst],
    )
    found = results("loss_phase")["predictor"]
    yield page, "the answer is off by {}, {}, {}, {}, {} and {} % of the run", [100 * each["error"] for each in found]
    yield (
        page,
        "two standard deviations in {}, {}, {}, {}, {} and {} %",
        [100 * each["within_two_std"] for each in found],
    )


def iadeep() -> Iterator[Check]:
    streams, page = results("iadeep")["streams"], "docs/policies/iadeep.md"
    for policy in (
        "fifo",
        "mps-equal",
        "antman",
        "kernel-est",
        "iadeep",
        "iadeep:predictor=false",
        "iadeep:tuner=false",
        "carpool",
    ):
        found = [row(streams, load=load, policy=policy) for load in (0.6, 1.2, 2.4)]
        values = [each[key] for each in found for key in ("avg_jct_s", "makespan_s")]
        last = found[-1]
        values += [100 * last["sm_use"], 100 * last["memory_use"], last["plan_cpu_ms"]]
        yield page, f"| `{policy}` | {{}} / {{}} | {{}} / {{}} | {{}} / {{}} | {{}}% | {{}}% | {{}} |", values
    gains = {
        policy: [
            [
                float(x)
                for x in re.findall(r"[+-]?\d+\.\d", row(streams, load=load, policy=policy)["against_best"]["CT"])
            ]
            for load in (0.6, 1.2, 2.4)
        ]
        for policy in ("iadeep", "carpool")
    }
    flat = [value for policy in ("iadeep", "carpool") for pair in gains[policy] for value in pair]
    yield (
        page,
        "{} ± {} % at load 0.6, {} ± {} % at 1.2, {} ± {} % at 2.4; the default {} ± {} %, {} ± {} % and {} ± {} %",
        flat,
    )
    for place, words in (
        (0, "load 0.6 | not stated | {} ± {} %; the default {} ± {} %"),
        (1, "… load 1.2 | not stated | {} ± {} %; {} ± {} %"),
        (2, "… load 2.4 | not stated | {} ± {} %; {} ± {} %"),
    ):
        yield "docs/results.md", words, gains["iadeep"][place] + gains["carpool"][place]
    bounds = results("iadeep_bounds")
    for load, template in (
        (0.6, "lower bound {} % | | … load 1.2"),
        (1.2, "lower bound {} % | | … load 2.4"),
        (2.4, "lower bound {} % | | makespan"),
    ):
        best = row(streams, load=load, policy="kernel-est")["avg_jct_by_seed_s"]
        least = [row(bounds, load=load, seed=seed)["least_s"] for seed in range(3)]
        yield "docs/results.md", template, [100 * mean(a / b - 1 for a, b in zip(least, best, strict=True))]
    at = {
        policy: row(streams, load=2.4, policy=policy)
        for policy in (
            "fifo",
            "mps-equal",
            "kernel-est",
            "iadeep",
            "carpool",
            "iadeep:predictor=false",
            "iadeep:tuner=false",
        )
    }
    jct = {policy: -100 * (1 - each["avg_jct_s"] / at["fifo"]["avg_jct_s"]) for policy, each in at.items()}
    span = {policy: -100 * (1 - each["makespan_s"] / at["mps-equal"]["makespan_s"]) for policy, each in at.items()}
    yield "docs/results.md", "−49 % | {} %; the default {} % | `fifo`", [jct["iadeep"], jct["carpool"]]
    yield "docs/results.md", "−67 % | {} %; the default {} % | `mps-equal`", [span["iadeep"], span["carpool"]]
    yield (
        "docs/results.md",
        "−45 %, −20 % | {} %, {} %",
        [jct["iadeep:predictor=false"], span["iadeep:predictor=false"]],
    )
    yield "docs/results.md", "−31 %, −28 % | {} %, {} %", [jct["iadeep:tuner=false"], span["iadeep:tuner=false"]]
    yield (
        "docs/results.md",
        "{} % of SMs, the default {} %, against {} %",
        [100 * at[policy]["sm_use"] for policy in ("iadeep", "carpool", "kernel-est")],
    )
    tuner = results("iadeep")["tuner"]["wrong a, b and φ believed"]
    yield (
        "docs/results.md",
        "{} measurements on average, {} at most",
        [tuner["mean_evaluations"], tuner["most_evaluations"]],
    )


def rest_of_default_page(page: str) -> Iterator[Check]:
    mine = [figure("gavel", "96 jobs", policy) for policy in ("carpool:together=1", "carpool")]
    allox = figure("gavel", "96 jobs", "allox:gang=true")
    differences = [off(each, allox) for each in mine]
    yield page, "with pairs, JCT | {} / {} s | `allox:gang=true` {} s | {} / {} %", [*mine, allox, *differences]
    settings = ("300 jobs at once", "300 jobs over 900 s")
    mine, hare, least = (
        [figure("hare", each, policy) for each in settings] for policy in ("carpool", "hare", "lower bound")
    )
    words = "{} / {} s | `hare` {} / {} s; lower bound {} / {} s | {} / {} %"
    yield page, "at once / over 900 s, weighted JCT | " + words, [*mine, *hare, *least, *map(off, mine, hare)]
    mine, hare, least = (
        [hare_mean(policy, 300, span_s) for span_s in (0.0, 900.0)] for policy in ("carpool", "hare", "")
    )
    yield page, "hare.json)) | " + words, [*mine, *hare, *least, *map(off, mine, hare)]
    both = ("carpool", "carpool:lengths=unknown")
    known, pollux = (
        [figure("pollux", "workload-6", policy) for policy in both],
        figure("pollux", "workload-6", "pollux"),
    )
    differences = [off(each, pollux) for each in known]
    yield page, "lengths known / unknown, JCT | {} / {} s | `pollux` {} s | {} / {} %", [*known, pollux, *differences]
    events = [figure("pollux", "workload-6, at events, 0.1 s a move", policy) for policy in both]
    yield page, "the same at events, 0.1 s a move | {} / {} s", events
    rigid, srtf = figure("rigid", "philly", "carpool"), figure("rigid", "philly", "srtf")
    yield page, "rigid jobs, JCT | {} s | `srtf` {} s | {} %", [rigid, srtf, off(rigid, srtf)]
    scenes, two = ("job", "device", "mixed"), results("loss_phase")["two"]
    mine, split = (
        [row(two, scene=scene, policy=policy)["mean"]["s"] for scene in scenes] for policy in ("carpool", "3-1")
    )
    words = "{} / {} / {} s | `loss-phase` the same; best fixed split (3–1) {} / {} / {} s | {} / {} / {} %"
    yield page, words, [*mine, *split, *map(off, mine, split)]
    streams, loads = results("iadeep")["streams"], (0.6, 1.2, 2.4)
    ours, theirs = ([row(streams, load=load, policy=policy) for load in loads] for policy in ("carpool", "iadeep"))
    pairs = [
        zip(a["avg_jct_by_seed_s"], b["avg_jct_by_seed_s"], strict=True) for a, b in zip(ours, theirs, strict=True)
    ]
    values = [each["avg_jct_s"] for each in (*ours, *theirs)] + [mean(off(a, b) for a, b in pair) for pair in pairs]
    yield page, "{} / {} / {} s | `iadeep` {} / {} / {} s | {} / {} / {} % (mean of the streams' ratios)", values


def claims_of_loss_phase() -> Iterator[Check]:
    two = results("loss_phase")["two"]
    order = ("3-1", "loss-phase-literal", "loss-phase", "carpool", "loss-phase:objective=total", "one after another")
    for scene, words in (("job", "−7.26 |"), ("device", "−4.03 |"), ("mixed", "−10.63 |")):
        found = [row(two, scene=scene, policy=policy) for policy in order]
        values = [each[key]["pct"] for each in found for key in ("total", "older", "younger")]
        yield "docs/results.md#Loss-phase", words + " {}, {}, {} |" * 6, values
    means = [
        row(two, scene=scene, policy=policy)["mean"]["pct"]
        for scene in ("job", "device", "mixed")
        for policy in order[:3:2]
    ]
    yield "docs/results.md", "the default alike: {} / {} %; {} / {} %; {} / {} %", means


def throughput() -> Iterator[Check]:
    pollux = results("throughput")["pollux"]
    methods = (
        "ours",
        "ours, formulas only",
        "Pollux's form, re-implemented",
        "nearest placement seen",
        "linear in devices",
    )
    for method in methods:
        found = [row(pollux, setting=f"{seen} of 108 placements seen", method=method) for seen in (10, 20, 54)]
        values = [100 * each[key] for each in found for key in ("mape", "within")] + [
            100 * found[-1]["wider_than_seen"]["mape"]
        ]
        yield "docs/throughput.md", f"| {method} | {{}} ± {{}} % | {{}} ± {{}} % | {{}} ± {{}} % | {{}} % |", values
    ours, form = (
        [row(pollux, setting=f"{n} of 108 placements seen", method=method) for n in (10, 20, 54)]
        for method in (methods[0], methods[2])
    )
    page = "docs/results.md"
    yield (
        page,
        '"accurate" | {}, {}, {} % MAPE | Pollux\'s form {}, {}, {} %',
        [100 * each["mape"] for each in (*ours, *form)],
    )
    yield (
        page,
        "not stated | {}, {}, {} % | Pollux's form {}, {}, {} %",
        [100 * each["wider_than_seen"]["mape"] for each in (*ours, *form)],
    )
    generated, never = results("throughput")["generated"], "groups never seen, several devices"
    alone = "trainings seen on one device only"
    mine, theirs, linear = (
        row(generated, setting=never, method=method) for method in ("ours", methods[2], "linear in devices")
    )
    yield (
        page,
        "{} ± {} % | Pollux's form {} %, linear {} %",
        [100 * v for v in (mine["mape"], mine["within"], theirs["mape"], linear["mape"])],
    )
    for method in (*methods, "ours, as if alone on the links"):
        each = row(generated, setting=never, method=method)
        single = [row(generated, setting=alone, method=method)] if method in ("ours", methods[-1]) else []
        template = f"| {method} | {{}} ± {{}} % | " + ("{} ± {} % | |" if single else "| |")
        values = [100 * one[key] for one in (each, *single) for key in ("mape", "within")]
        if method != "ours, as if alone on the links":  # the last row of its table
            yield "docs/throughput.md", template, values
    mine, linear = (row(generated, setting=alone, method=method) for method in ("ours", "linear in devices"))
    yield (
        page,
        "{} ± {} % | linear {} % | seen on one device only",
        [100 * v for v in (mine["mape"], mine["within"], linear["mape"])],
    )


def wired() -> Iterator[Check]:
    beliefs = ("learns links and moves", "learns links only", "believes in proportion")
    for policy, resize_s in (
        ("elastic", 1.0),
        ("carpool", 1.0),
        ("afs", 1.0),
        ("srtf", 1.0),
        ("elastic", 30.0),
        ("carpool", 30.0),
    ):
        found = [row(results("wired"), policy=policy, resize_s=resize_s, belief=belief) for belief in beliefs]
        values = [each[key] for each in found for key in ("to_told", "within")]
        yield (
            "docs/policies/elastic.md",
            f"| {resize_s:.0f} s | `{policy}` | {{}} ± {{}} | {{}} ± {{}} | {{}} ± {{}} |",
            values,
        )
    errors = [
        100 * each["move_price_mape"]
        for each in results("wired")
        if each["resize_s"] == 1.0 and "move_price_mape" in each
    ]
    for page in ("docs/results.md", "docs/policies/elastic.md"):
        yield page, "learned within {} to {} %, by policy", [min(errors), max(errors)]


def wired_claims() -> Iterator[Check]:
    found = [
        row(results("wired"), policy=policy, resize_s=1.0, belief=belief)["to_told"]
        for belief in ("learns links and moves", "believes in proportion")
        for policy in ("elastic", "carpool")
    ]
    yield "docs/results.md", "`elastic` {}, `carpool` {} of knowing all | linear scaling assumed: {} and {} (", found


def default_page() -> Iterator[Check]:
    page = "docs/policies/carpool.md"
    powers = ("batch k^0.3", "batch k^0.9")
    mine, best = ([figure("elastic", power, policy) for power in powers] for policy in ("carpool", "heSRPT"))
    yield page, "{} … {} s | optimum (heSRPT) {} … {} s", [*mine, *best]
    loads = ("load 0.3", "load 0.6", "load 0.9")
    mine, rival = ([figure("elastic", load, policy) for load in loads] for policy in ("carpool", "afs"))
    yield page, "{} / {} / {} s | `afs` {} / {} / {} s | {} / {} / {} %", [*mine, *rival, *map(off, mine, rival)]
    settings = ("1000 jobs on 16", "1000 jobs on 12")
    mine, rival = ([figure("gavel", each, policy) for each in settings] for policy in ("carpool", "gavel"))
    yield (
        page,
        "on 16 / 12 of a type, JCT | {} / {} s | `gavel` {} / {} s | {} / {} %",
        [*mine, *rival, *map(off, mine, rival)],
    )
    mine = [figure("gavel", "96 jobs, at events", policy) for policy in ("carpool:together=1", "carpool")]
    rival = [figure("gavel", "96 jobs, at events", "gavel")] * 2
    yield page, "the same at events | {} / {} s | `gavel` {} s | {} / {} %", [*mine, rival[0], *map(off, mine, rival)]
    workloads = ("generated 1", "generated 2", "generated 3")
    mine, rival = ([figure("pollux", each, policy) for each in workloads] for policy in ("carpool", "pollux"))
    yield (
        page,
        "lengths known, JCT | {} / {} / {} s | `pollux` {} / {} / {} s | {} / {} / {} %",
        [*mine, *rival, *map(off, mine, rival)],
    )
    one = [figure("iadeep", "load 1.2, one stream", policy) for policy in ("carpool", "iadeep", "kernel-est")]
    yield (
        page,
        "one stream, JCT | {} s | `iadeep` {} s; best of the text's baselines {} s | {} %",
        [*one, off(one[0], one[1])],
    )
    yield from rest_of_default_page(page)
    rows, live, elastic = (results("decision_time")[key] for key in ("rows", "live", "elastic"))
    big, small = row(rows, jobs=2000, devices=10000), row(rows, jobs=2000, devices=1000)
    yield (
        page,
        "take {} ms, median, worst {}, and {} for the first decision; on 1,000 devices {} ms",
        [1000 * v for v in (big["median_s"], big["worst_s"], big["first_s"], small["median_s"])],
    )
    yield (
        page,
        "{} ms with 4,000 jobs queued, {} ms with 10,000",
        [1000 * row(live, jobs=jobs)["median_s"] for jobs in (4000, 10000)],
    )
    yield page, "{} s at 100 jobs, {} at 1,000, {} at 2,000 and {} at 4,000", [each["median_s"] for each in elastic]


SOURCES = (
    philly,
    scale,
    replay_gavel,
    replay_pollux,
    oracles,
    default_policy,
    default_page,
    interference,
    hare,
    hare_tasks_table,
    loss_phase,
    claims_of_loss_phase,
    iadeep,
    throughput,
    wired,
    wired_claims,
)
