"""Compares weighted JCT of `hare`, the default and baselines in Hare's setting, beside the lower bound.

    python benchmarks/hare.py [--seeds 4] [--workers 2] [--no-live] [--missing]

Five tables: 100, 200 and 300 jobs at once and over 900 s; 300 jobs with cold switches for the baselines; the number of
GPUs varied at 200 jobs; completion times; a live run with weights on heterogeneous CPU devices. Intervals are 95 %
over the seeds (Student's t). Exits with 1 when a required figure is missed. `--missing` completes an interrupted run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from grounds.hare import Case, Row, perform_all
from grounds.hare_live import live
from measured import RESULTS, save
from scipy.stats import t as student

GANGS = ("gavel-fifo", "sched-homo", "srtf", "wsrtf", "allox:gang=true")
BASELINES = (*GANGS, "allox", "hare-literal")
SWITCHING = (*GANGS, "allox")  # those of the text's comparison, which have nothing better than a cold switch
JUDGED = ("hare", "carpool")
OURS = (*JUDGED, "hare:lengths=unknown")
# How far below each baseline both of `JUDGED` have to be at 300 jobs, over both kinds of arrivals.
DUE = {"gavel-fifo": 0.50, "sched-homo": 0.30, "allox": 0.48, "srtf": 0.18, "allox:gang=true": 0.10, "wsrtf": 0.0}
SPANS_S = (0.0, 900.0)


def main() -> int:
    """Run everything, print as it goes, write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--jobs", type=int, nargs="+", default=[100, 200, 300])
    parser.add_argument("--no-live", action="store_true", help="leave the live run out")
    parser.add_argument("--missing", action="store_true", help="run only what the kept results lack")
    options = parser.parse_args()
    started = time.perf_counter()
    seeds, most = range(options.seeds), max(options.jobs)
    results: dict[str, Any] = {}
    rows: list[Row] = []
    if options.missing:
        rows, results["completes"] = kept()

    def keep(more: Sequence[Row]) -> None:
        rows.extend(more)
        save("hare", results | {"rows": [row.as_json() for row in rows]})

    def run(names: Sequence[str], **where: Any) -> None:
        if any(row.case == Case(names[0], seeds[-1], **where) for row in rows):
            return  # kept, as a whole: tables are saved when they are complete
        keep(table(names, seeds, options.workers, beside=rows, **where))

    def at(jobs: int, span_s: float) -> None:
        run(("", *OURS, *BASELINES), jobs=jobs, span_s=span_s)

    for span_s in SPANS_S:  # what has to be reached first: the rest may be cut short
        at(most, span_s)
    for span_s in SPANS_S:
        run(SWITCHING, jobs=most, span_s=span_s, switch="cold")
    completion_times(rows, most)
    for per_kind in (20, 30, 60):
        names = ("", *JUDGED, "gavel-fifo", "sched-homo", "allox:gang=true", "wsrtf")
        run(names, jobs=200, per_kind=per_kind)
    for jobs in sorted(set(options.jobs) - {most}):
        for span_s in SPANS_S:
            at(jobs, span_s)
    missed: list[str] = []
    results["due"] = {policy: due(policy, rows, most, missed) for policy in JUDGED}
    if not options.no_live:
        results["live"] = live()
        if not (results["live"]["in_order"] and results["live"]["finished"]):
            missed.append("live: the heaviest two jobs did not go first, or somebody did not finish")
    results["wall_s"] = round(time.perf_counter() - started, 1)
    results["cpu_s"] = round(sum(row.cpu_s for row in rows), 1)
    keep(())
    print(f"\n{results['cpu_s']:.0f} CPU s, {results['wall_s']:.0f} s in all")
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed else 0


def kept() -> tuple[list[Row], str]:
    """The rows of a run that was cut short, and the commit that they were measured with."""
    document = json.loads((RESULTS / "hare.json").read_text(encoding="utf-8"))
    of_case = {field.name for field in fields(Case)}
    rows = [
        Row(
            Case(**{name: value for name, value in row.items() if name in of_case}),
            **{name: value for name, value in row.items() if name not in of_case},
        )
        for row in document["results"]["rows"]
    ]
    return rows, document["commit"]


def table(
    names: Sequence[str], seeds: Sequence[int], workers: int, *, beside: Sequence[Row] = (), **where: Any
) -> list[Row]:
    """Run every policy on every seed of one setting and print a line for each policy."""
    key = Case("", 0, **where)
    arrivals = f"over {key.span_s:.0f} s" if key.span_s else "at once"
    print(f"\n{key.jobs} jobs {arrivals}, {4 * key.per_kind} GPUs, switches {key.switch}")
    against = "".join(f"{policy + ' against it':>23}" for policy in JUDGED)
    print(f"{'':22}{'weighted JCT s':>20} {'over bound':>11}{against} {'longest wait s':>15}")
    rows: list[Row] = []
    for row in perform_all([Case(name, seed, **where) for name in names for seed in seeds], workers):
        rows.append(row)
        if row.case.seed == seeds[-1]:
            _print_line(row.case.policy, rows[-len(seeds) :], [*beside, *rows])
    return rows


def _print_line(name: str, rows: Sequence[Row], known: Sequence[Row]) -> None:
    at = {row.case: row.weighted_jct_s for row in known}

    def beside(policy: str) -> list[float]:
        """Each row over that policy's with fast switches, as far as that is known."""
        rivals = [Case(policy, c.seed, c.jobs, c.span_s, "fast", c.per_kind) for c in (row.case for row in rows)]
        return [row.weighted_jct_s / at[rival] for row, rival in zip(rows, rivals, strict=True) if rival in at]

    mean, half = interval([row.weighted_jct_s for row in rows])
    line = f"{name or 'lower bound':22}{mean:11.1f} ± {half:6.1f}"
    if name:
        line += f" {statistics.mean(beside('')) - 1.0:+11.1%}"
        for policy in JUDGED:
            found = [1.0 / ratio - 1.0 for ratio in beside(policy)]
            line += "{:+14.1%} ± {:5.1%} ".format(*interval(found)) if found else " " * 23
        line += f"{max(row.longest_wait_s for row in rows):15.0f}"
    print(line, flush=True)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5


def completion_times(rows: Sequence[Row], jobs: int) -> None:
    """The distribution of completion times at the most jobs, all at once."""
    print(f"\ncompletion times of {jobs} jobs at once: seconds until 10, 20 … 100 % are done; within 25 min")
    for name in (*BASELINES, *OURS):
        found = [row for row in rows if row.case == Case(name, row.case.seed, jobs) and row.case.per_kind == 40]
        tenths = [statistics.mean(times) for times in zip(*[row.cdf_s for row in found], strict=True)]
        within = statistics.mean(row.within for row in found)
        print(f"{name:22}{' '.join(f'{tenth:6.0f}' for tenth in tenths)}  {within:6.1%}")


def due(policy: str, rows: Sequence[Row], jobs: int, missed: list[str]) -> dict[str, Any]:
    """How far a policy is below each baseline; what was to be reached and was not is added to `missed`."""
    at = {row.case: row.weighted_jct_s for row in rows}

    def gains(name: str, keep: Callable[[Case], bool], switch: str = "fast") -> list[float]:
        return [
            1.0 - jct_s / at[other]
            for case, jct_s in at.items()
            if case.policy == policy and keep(case)
            if (other := Case(name, case.seed, case.jobs, case.span_s, switch, case.per_kind)) in at
        ]

    found: dict[str, Any] = {}
    below = f"{policy} below"
    print(f"\n{below:22}{'due':>6} {'fast switches':>18} {'cold switches':>18}   ({jobs} jobs, both arrivals)")
    for name, least in DUE.items():
        fast, cold = (interval(gains(name, lambda case: case.jobs == jobs, switch)) for switch in ("fast", "cold"))
        found[name] = {"due": least, "fast": fast, "cold": cold}
        print(f"{name:22}{least:6.0%} {fast[0]:11.1%} ± {fast[1]:4.1%} {cold[0]:11.1%} ± {cold[1]:4.1%}")
        if fast[0] < least:
            missed.append(f"{policy}: {fast[0]:.1%} below {name}, {least:.0%} due")
    worst = min(gains("wsrtf", lambda case: True))
    found["worst against wsrtf"] = worst
    print(f"worst single case against wsrtf: {worst:+.1%}")
    if worst < 0.0:
        missed.append(f"{policy}: in one case {-worst:.1%} behind wsrtf")
    return found


if __name__ == "__main__":
    sys.exit(main())
