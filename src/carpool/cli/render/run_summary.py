"""Result of a run: the JSON document and the text summary."""

from __future__ import annotations

import os
from dataclasses import asdict
from math import isfinite

import click

from carpool import __version__
from carpool.backends.job_accounting import JobAccount, Json, allocation_json, finite_or_none
from carpool.cli.render.live_table import ending
from carpool.cli.render.results_table import results_lines
from carpool.core.model import Phase
from carpool.service.daemon.batch_run import BatchRun, RunEnd
from carpool.service.queries.results import results_view

_MAX_ROWS = 20  # of the results of a sweep


def as_document(run: BatchRun) -> Json:
    """The document that ``run --json`` prints."""
    figures = run.metrics.summary()
    return {
        "schema": 1,
        "version": __version__,
        "policy": run.request.policy,
        "backend": "hosts" if run.request.members else "local",
        "devices": [
            {
                "name": run.names.get(device.id, device.name),
                "kind": device.kind,
                "cores": list(device.cores),
                "memory_bytes": device.memory_bytes,
            }
            for device in run.devices
        ],
        "makespan_s": finite_or_none(figures.makespan_s),
        "avg_jct_s": finite_or_none(figures.avg_jct_s),
        "weighted_jct_s": finite_or_none(figures.weighted_jct_s),
        "utilisation": {
            "device": finite_or_none(figures.utilisation) if _is_over(run) else None,
            "memory": _memory(run, figures.makespan_s) if _is_over(run) else None,
        },
        "jobs": [_job(account, run.names) for account in _accounts(run)],
    }


def print_summary(run: BatchRun, end: RunEnd) -> None:
    """Print the totals and the jobs that did not finish."""
    accounts = run.accounting.accounts.values()
    finished = [account for account in accounts if account.phase is Phase.FINISHED]
    figures = run.metrics.summary()
    num_jobs = len(accounts) or len(run.request.jobs)  # none is submitted before the executor starts
    words = f"{len(finished)} of {num_jobs} jobs finished"
    if stopped := sum(account.is_stopped for account in accounts):
        words += f", {stopped} stopped by halving"
    if finished:
        words += f" in {figures.makespan_s:.1f} s, on average after {figures.avg_jct_s:.1f} s"
        words += f"; devices held {figures.utilisation:.0%} of the time" if _is_over(run) else ""
    click.echo(words)
    for account in accounts:
        if account.phase in (Phase.FAILED, Phase.CANCELLED) and not account.is_stopped:
            click.echo(f"{account.spec.id} {ending(account)}")
            click.echo(f"  log: {run.folder.job(account.spec.id) / 'log'}")
    if any(account.spec.params for account in accounts):
        view = results_view(run.request.name, list(accounts), run.accounting.at)
        for line in results_lines(asdict(view), _MAX_ROWS):
            click.echo(line)
    if end is RunEnd.INTERRUPTED:
        click.echo(f"interrupted; resume with: carpool run --resume {run.folder.path}")
    else:
        click.echo(f"kept in {run.folder.path}; weights and metrics: carpool get JOB --run {run.folder.path}")


def _accounts(run: BatchRun) -> list[JobAccount]:
    """The account of every job; one that was never submitted has an empty one."""
    known = run.accounting.accounts
    return [*known.values(), *(JobAccount(spec, 0.0) for spec, _ in run.request.jobs if spec.id not in known)]


def _is_over(run: BatchRun) -> bool:
    """Whether every job has ended: before that, utilisation is undefined."""
    return all(account.phase.is_over for account in _accounts(run))


def _job(account: JobAccount, names: dict[int, str]) -> Json:
    outcome = account.outcome
    own_batch = account.spec.batch_size or account.own_batch
    return {
        "name": account.spec.id,
        "state": str(account.phase) if account.phase.is_over else "interrupted",
        "steps": account.steps,
        "epochs": None if outcome is None else outcome.epochs,
        "loss": finite_or_none(account.loss if outcome is None else outcome.loss),
        "metrics": {name: finite_or_none(value) for name, value in account.last_metrics.items()},
        "jct_s": account.jct_s,
        "wait_s": account.wait_s,
        "samples_per_s": None if outcome is None else finite_or_none(outcome.samples_per_s),
        "digest": None if outcome is None else outcome.digest,
        "allocations": [allocation_json(given, own_batch, names) for given in account.decisions],
        "error": account.error or None,
        "params": dict(account.spec.params),
    }


def _memory(run: BatchRun, makespan_s: float) -> float | None:
    """Memory utilisation: Σ a job's peak bytes · its device-seconds / (total bytes · makespan).

    All CPU devices together have the host's memory.
    """
    total = sum(device.memory_bytes for device in run.devices if device.cuda is not None)
    if any(device.cuda is None for device in run.devices):
        total += os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    measured = [
        (account.outcome.memory_bytes, account.device_s)
        for account in run.accounting.accounts.values()
        if account.outcome is not None and account.outcome.memory_bytes is not None
    ]
    if not measured or not isfinite(makespan_s) or makespan_s * total <= 0.0:
        return None
    return sum(held * device_s for held, device_s in measured) / (total * makespan_s)
