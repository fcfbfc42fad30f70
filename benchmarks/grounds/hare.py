"""Hare's workload: weighted jobs of eight models on GPUs of four types, with steps in parts.

160 GPUs, 40 of each type; parts, slowdowns and switches as drawn by `PartsWorld`; a job has 1, 2, 4 or 8 parts, a
length alone on the fastest type from a lognormal (median 180 s, σ 1, 15 to 3,600 s), and a weight of 1 to 5; all jobs
arrive at once or evenly over 900 s. Types are in random order, so that a policy that ignores them gains nothing from
it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from carpool.core.topology import Cluster
from carpool.policies.registry import parse_policy
from carpool.sim.engine import simulate
from carpool.sim.traces.distributions import AtOnce, Lognormal, Uniform
from carpool.sim.traces.generator import TraceGenerator
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.parts import KINDS, PartsWorld
from carpool.sim.worlds.traits import MIXES
from grounds.ground import Ground, Limit
from grounds.ground import Row as TableRow

ARRIVALS = {"at once": 0.0, "over 900 s": 900.0}  # words for settings -> seconds
RIVALS = ("hare", "wsrtf", "srtf", "allox", "sched-homo", "gavel-fifo")
WITHIN_S = 25 * 60.0  # the span of the text's Fig. 8


@dataclass(frozen=True, slots=True)
class Case:
    """One policy on one draw of the ground; without a policy, the lower bound of that draw."""

    policy: str
    seed: int
    jobs: int = 300
    span_s: float = 0.0  # arrivals are spread over; 0: all at once
    switch: str = "fast"
    per_kind: int = 40  # devices


@dataclass(frozen=True, slots=True)
class Row:
    """What came of a case."""

    case: Case
    weighted_jct_s: float
    avg_jct_s: float = 0.0
    makespan_s: float = 0.0
    longest_wait_s: float = 0.0
    within: float = 0.0  # portion of the jobs that ended within `WITHIN_S`
    cdf_s: tuple[float, ...] = ()  # completion time of the first 10 %, 20 % … of the jobs
    cpu_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Flat, for a results file."""
        figures = asdict(self)
        return {**figures.pop("case"), **{k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}}


def setting(case: Case) -> tuple[Sequence[Arrival], Cluster, PartsWorld]:
    """Jobs, devices and the truth about them."""
    recipe = TraceGenerator(
        case.jobs,
        case.seed,
        Uniform() if case.span_s else AtOnce(),
        span_s=case.span_s or None,
        sizes=[(parts, 1.0) for parts in (1, 2, 4, 8)],
        lengths=Lognormal(median_s=180.0, sigma=1.0, min_s=15.0, max_s=3600.0),
        models=[(model, 1.0) for model in MIXES["unlike"].models],
        weights=[(float(weight), 1.0) for weight in range(1, 6)],
    )
    order = Random(f"{case.seed}/kinds").sample(KINDS, len(KINDS))
    cluster = Cluster.build([(1, case.per_kind, kind) for kind in order])
    world = PartsWorld.generate(case.seed, case.switch)
    arrivals, cluster = world.prepare(recipe.generate().arrivals, cluster)
    return arrivals, cluster, world


def perform(case: Case) -> Row:
    """Run one case in this process."""
    started = time.process_time()
    arrivals, cluster, world = setting(case)
    if not case.policy:
        return Row(case, world.weighted_jct_bound_s(arrivals, cluster), cpu_s=time.process_time() - started)
    metrics = simulate(arrivals, cluster, parse_policy(case.policy), world)
    summary = metrics.summary()
    assert summary.finished == case.jobs, f"{case}: {summary.finished} finished"
    ordered = sorted(metrics.jct_s)
    return Row(
        case,
        summary.weighted_jct_s,
        summary.avg_jct_s,
        summary.makespan_s,
        max(metrics.wait_s),
        sum(jct_s <= WITHIN_S for jct_s in ordered) / case.jobs,
        tuple(round(ordered[case.jobs * tenth // 10 - 1], 1) for tenth in range(1, 11)),
        time.process_time() - started,
    )


def perform_all(cases: Sequence[Case], workers: int = 2) -> Iterator[Row]:
    """Run cases side by side; rows in the order of the cases, as they come."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(perform, cases)


def run(
    policy_names: Sequence[str],
    seeds: Sequence[int],
    jobs: int = 300,
    *,
    span_s: float = 0.0,
    switch: str = "fast",
    per_kind: int = 40,
    workers: int = 2,
) -> list[Row]:
    """Every policy on every seed, and for each seed a row without policy: the lower bound."""
    names = ("", *policy_names)
    return list(
        perform_all([Case(name, seed, jobs, span_s, switch, per_kind) for seed in seeds for name in names], workers)
    )


def table(data: Path, quick: bool) -> Iterator[TableRow]:
    """The default and its rivals for the table of all grounds: means over seeds that nothing was tuned on."""
    jobs, seeds = (100, (11,)) if quick else (300, (11, 12))
    for words, span_s in ARRIVALS.items():
        for policy in ("", "carpool", *RIVALS):
            rows = [perform(Case(policy, seed, jobs, span_s)) for seed in seeds]
            figure, cpu_s = mean(row.weighted_jct_s for row in rows), sum(row.cpu_s for row in rows)
            yield TableRow(f"{jobs} jobs {words}", policy or "lower bound", figure, cpu_s)


GROUND = Ground(
    "hare",
    "weighted JCT in s",
    table,
    limits=[Limit(f"300 jobs {words}", "carpool", 1.0, "wsrtf") for words in ARRIVALS],
)
