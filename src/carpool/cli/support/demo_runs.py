"""Runs behind ``carpool demo``: four real trainings on this machine, or synthetic jobs in the simulator."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import click

from carpool import __version__
from carpool.backends.run_folder import RunFolder
from carpool.cli.render.comparison_table import print_comparison
from carpool.cli.render.live_table import RunDisplay
from carpool.cli.support.demo_by_hand import HandRun, run_at_once, run_in_turn
from carpool.cli.verbs.run import choose_display, default_policy, watch
from carpool.cli.verbs.simulate import write_report
from carpool.core.model import JobId, JobSpec, Phase
from carpool.jobs.devices import LocalDevice, as_cluster
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.service.daemon.batch_run import BatchRun, RunEnd, RunRequest
from carpool.service.fleet.executor_access import StartExecutor
from carpool.sim.comparison import SimulationRequest, compare
from carpool.sim.report import ReportHead, RunRecord, comparison_svg, node_spans, render, timeline_svg, write_page
from carpool.sim.report.recorder import RunRecorder
from carpool.sim.traces.generator import TraceGenerator
from carpool.sim.traces.summary import lines, summarise
from carpool.sim.traces.writer import write_trace

_POLICIES = ("fifo", "fifo:bypass=true", "sjf", "las", "srtf")
_CLUSTER = "8x8xV100"


def show_simulated_demo(folder: Path, jobs: int, seed: int) -> None:
    """Simulate the jobs under five policies, print the comparison, write trace, report and picture to the folder."""
    trace = TraceGenerator(
        jobs=jobs, seed=seed, load=0.95, devices=64, sizes=((1, 0.7), (2, 0.1), (4, 0.1), (8, 0.1))
    ).generate()
    path = folder / "demo.csv"
    write_trace(trace, path)
    click.echo(f"{jobs} synthetic jobs on {_CLUSTER}:")
    for line in lines(summarise(trace, 64)):
        click.echo(f"  {line}")
    requests = [SimulationRequest(str(path), _CLUSTER, policy, seed=seed, record=True) for policy in _POLICIES]
    results = compare(requests)
    click.echo()
    print_comparison(results)
    first, best = results[0], min(results, key=lambda result: result.summary.avg_jct_s)
    gain = first.summary.avg_jct_s / best.summary.avg_jct_s
    if gain > 1.0:
        click.echo(
            f"\nThe same jobs on the same devices: with {best.policy} the average job finishes {gain:.1f}x sooner "
            f"than with {first.policy}."
        )
    page, picture = folder / "demo.html", folder / "demo.svg"
    write_report(str(page), requests[0], results)
    runs = [RunRecord(r.policy, r.as_json(), r.recording) for r in results if r.recording is not None]
    write_page(picture, comparison_svg(runs))
    click.echo(f"Report: {page} (timelines, charts); picture: {picture}")


JOBS = ("mlp", "cnn", "resnet", "transformer")  # entries of runtime.demo_trainings
_MAX_SHARDS = 8


@dataclass(frozen=True, slots=True)
class DemoVariant:
    """One way to run the jobs."""

    name: str
    policy: str
    rigid: bool  # jobs run one after another, each on all devices it can use


Baselines = Callable[[Sequence[LocalDevice], float], dict[str, HandRun]]


def run_by_hand(devices: Sequence[LocalDevice], effort: float) -> dict[str, HandRun]:
    """Run the jobs as plain PyTorch loops in the two usual ways without a scheduler."""
    cores = sum(len(device.cores) for device in devices) or 1
    places = ["cpu"] if devices[0].cuda is None else [f"cuda:{device.cuda}" for device in devices]
    ways = {"one after another": run_in_turn, "all at once": run_at_once}
    found = {}
    for name, way in ways.items():
        click.echo(f"\nplain PyTorch, {name}:", err=True)
        found[name] = way(JOBS, places, cores, _epochs(effort))
        click.echo(f"  {found[name].makespan_s:.1f} s", err=True)
    return found


def show_live_demo(
    folder: Path,
    devices: Sequence[LocalDevice],
    start: StartExecutor,
    *,
    effort: float = 1.0,
    quiet: bool = False,
    by_hand: Baselines = run_by_hand,
) -> int:
    """Run the jobs by hand, alone and shared, compare weights and times; 0 if all weights are identical."""
    together = default_policy() if len(devices) > 1 else f"mps-equal:slots={len(JOBS)}"
    variants = (DemoVariant("one after another", "fifo", True), DemoVariant("shared", together, False))
    named = ", ".join(f"{device.name} ({device.kind})" for device in devices)
    click.echo(f"Four exact trainings ({', '.join(JOBS)}) on {named}.")
    runs: list[BatchRun] = []
    records: list[RunRecord] = []
    for variant in variants:
        click.echo(f"\n{variant.name} ({variant.policy}):", err=True)
        recorder = RunRecorder(as_cluster(devices))
        run = _run(variant, folder / variant.name.replace(" ", "-"), devices, start, recorder, effort)
        display: RunDisplay = choose_display(run, as_json=quiet)
        try:
            ending = watch(run, display)
        finally:
            run.close()
        if ending is RunEnd.INTERRUPTED:
            return 130
        runs.append(run)
        records.append(RunRecord(variant.name, _figures(variant, run), recorder.close(run.accounting.at)))
    _write(folder, devices, records)
    is_identical = _compare_jobs(*runs)
    _compare_times(by_hand(devices, effort), *runs)
    click.echo(f"Timelines: {folder / 'demo.svg'}; charts: {folder / 'demo.html'}")
    return 0 if is_identical else 1


def _run(
    variant: DemoVariant,
    place: Path,
    devices: Sequence[LocalDevice],
    start: StartExecutor,
    recorder: RunRecorder,
    effort: float,
) -> BatchRun:
    folder = RunFolder(place)
    if place.is_dir():
        folder.hold()
        shutil.rmtree(place)
        folder.let_go()
    jobs = demo_jobs(len(devices), rigid=variant.rigid, effort=effort)
    request = RunRequest(variant.name, jobs, tuple(devices), variant.policy, __version__, observers=(recorder,))
    return BatchRun.open(request, folder, start)


def demo_jobs(num_devices: int, *, rigid: bool, effort: float = 1.0) -> tuple[ListedJob, ...]:
    """The four jobs; each may use as many devices as it has shards."""
    shards = _MAX_SHARDS
    while shards // 2 >= max(2, num_devices):
        shards //= 2
    widest = min(num_devices, shards)
    jobs: list[ListedJob] = []
    for name in JOBS:
        least = widest if rigid else 1
        spec = JobSpec(JobId(name), least, model=name, min_devices=least, max_devices=widest, exact=True)
        if rigid and jobs:  # one job may leave devices free
            spec = replace(spec, after=(jobs[-1].spec.id,))
        args = {} if (epochs := _epochs(effort)) is None else {"epochs": epochs}
        entry = f"carpool.runtime.demo_trainings:{name}"
        jobs.append(ListedJob(spec, Program(entry=entry, args=args, folder=str(Path.cwd()), exact=True, shards=shards)))
    return tuple(jobs)


def _epochs(effort: float) -> int | None:
    """Epochs of every job; None for its own number."""
    return None if effort == 1.0 else max(1, round(effort * 4))


def _figures(variant: DemoVariant, run: BatchRun) -> dict[str, Any]:
    figures = {"policy": variant.name, **asdict(run.metrics.summary())}
    return {key: value if not isinstance(value, float) or isfinite(value) else None for key, value in figures.items()}


def _write(folder: Path, devices: Sequence[LocalDevice], records: Sequence[RunRecord]) -> None:
    cluster = as_cluster(devices)
    names = [device.name for device in devices]
    head = ReportHead(
        "the four trainings of the demo",
        "+".join(f"{count}x{kind}" for kind, count in cluster.capacity.items()),
        cluster.num_devices,
        node_spans(cluster),
        version=__version__,
        command="carpool demo",
    )
    write_page(folder / "demo.svg", timeline_svg(records, names))
    write_page(folder / "demo.html", render("One after another, and shared", head, records))


def _compare_jobs(alone: BatchRun, shared: BatchRun) -> bool:
    """Print each job's end in both runs. Returns whether all weights are identical."""
    click.echo(f"\n{'job':<12} {'alone, end at':>15} {'shared, end at':>16} {'accuracy':>9}  weights")
    is_identical = True
    for name, before in alone.accounting.accounts.items():
        after = shared.accounting.accounts[name]
        same = (
            before.outcome is not None and after.outcome is not None and before.outcome.digest == after.outcome.digest
        )
        is_identical = is_identical and same and before.phase is after.phase is Phase.FINISHED
        accuracy = after.outcome.metrics.get("accuracy") if after.outcome is not None else None
        words = "identical, bit for bit" if same else f"DIFFERENT {before.error or after.error}"
        click.echo(
            f"{name:<12} {_seconds(before.jct_s):>15} {_seconds(after.jct_s):>16} "
            f"{'–' if accuracy is None else f'{accuracy:.1%}':>9}  {words}"
        )
    return is_identical


def _compare_times(by_hand: Mapping[str, HandRun], alone: BatchRun, shared: BatchRun) -> None:
    """Print how long all jobs, and the average job, took in each of the ways."""
    ours = shared.metrics.summary()
    rows = {f"plain PyTorch, {name}": (run.makespan_s, run.avg_jct_s) for name, run in by_hand.items()}
    for name, run in (("carpool, one after another", alone), ("carpool, shared", shared)):
        summary = run.metrics.summary()
        rows[name] = summary.makespan_s, summary.avg_jct_s
    click.echo(f"\n{'':<34} {'all four':>9} {'average job':>12}")
    for name, (makespan_s, jct_s) in rows.items():
        gains = f"  shared is {_gain(makespan_s, ours.makespan_s)}, {_gain(jct_s, ours.avg_jct_s)}"
        click.echo(f"{name:<34} {makespan_s:>7.1f} s {jct_s:>10.1f} s{gains if name != 'carpool, shared' else ''}")


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"


def _gain(before: float, after: float) -> str:
    if not after > 0:
        return "–"
    return f"{before / after:.2f}x sooner" if before >= after else f"{after / before:.2f}x later"
