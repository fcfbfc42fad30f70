"""Forecast: simulates the scheduler and its policy on believed rates to predict starts and ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from random import Random

from carpool import __version__
from carpool.backends.job_accounting import JobAccount, JobAccounting, Json, allocation_json, finite_or_none
from carpool.backends.online_estimator import OnlineEstimator, initial_speeds
from carpool.core.host_resources import UNKNOWN, HostResources
from carpool.core.metrics import Summary
from carpool.core.model import JobId, JobSpec, Kind
from carpool.core.policy import Policy
from carpool.core.topology import Cluster, Placement
from carpool.jobs.devices import LocalDevice, as_cluster
from carpool.jobs.job_file import ListedJob
from carpool.predictors.profiles.profile import Costs
from carpool.predictors.profiles.rate_model import ProfileRateModel
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.estimated import EstimatorWorld

DEFAULT_COSTS = Costs(start_s=1.0, resize_s=0.2, end_s=0.1)  # of jobs of which that is not known
GUESSED_S = 120.0  # length on one device of a job of which nothing is known
_DRAWS = 40
_LOW, _HIGH = 0.1, 0.9  # quantiles of what is told as the range of an end
_LENGTH_UNKNOWN = 1.0  # spread of a guessed length, relative to it


@dataclass(frozen=True, slots=True)
class JobForecast:
    """One job of a plan."""

    account: JobAccount
    starts_at: float | None  # None: it never does
    range_s: tuple[float, float] | None  # of its end, ten to ninety in a hundred
    steps: float | None  # None: nobody knows
    steps_per_s: float | None  # on what it first gets
    spread: float  # of its rate, or of its length where that is a guess, relative
    basis: str


@dataclass(frozen=True, slots=True)
class Forecast:
    """A whole plan."""

    cluster: Cluster
    names: Mapping[int, str]
    jobs: tuple[JobForecast, ...]
    summary: Summary


def forecast_jobs(
    jobs: Sequence[ListedJob],
    devices: Sequence[LocalDevice],
    policy: Policy,
    profiles: Mapping[JobId, ProfileRateModel],
    seed: int = 0,
    *,
    left: Mapping[JobId, float] | None = None,
    draws: int = _DRAWS,
    supplies: HostResources = UNKNOWN,
) -> Forecast:
    """Let the policy decide over all jobs as if each ran as fast as is believed; then again, with luck good and bad.

    A job's luck is drawn once for its whole length, log-normal with the spread of its belief; the policy does not know
    of it. The draws tell how early and how late each job may end. `left` has the steps that are left of jobs that have
    begun.
    """
    cluster = as_cluster(devices, supplies)
    totals = {spec.id: profiles[spec.id].total_steps(spec) if spec.id in profiles else None for spec, _ in jobs}
    totals |= left or {}
    specs = [
        _with_length(spec, program.time_limit_s, totals[spec.id], cluster, devices, profiles) for spec, program in jobs
    ]

    costs = {job: belief.profile.costs for job, belief in profiles.items()}

    def run(luck: Mapping[JobId, float]) -> tuple[JobAccounting, Summary, OnlineEstimator]:
        live = OnlineEstimator(cluster, initial_speeds(devices), profiles)
        world = EstimatorWorld(live, luck, costs, DEFAULT_COSTS)
        ledger = JobAccounting(cluster)
        metrics = simulate([Arrival(0.0, spec) for spec in specs], cluster, policy, world, observers=(ledger,))
        return ledger, metrics.summary(), live

    ledger, summary, live = run({})
    grounds = {spec.id: _grounds(ledger.accounts[spec.id], live, totals[spec.id]) for spec in specs}
    ends: dict[JobId, list[float]] = {spec.id: [] for spec in specs}
    chance = Random(seed)
    for _ in range(draws):
        luck = {job: exp(chance.gauss(0.0, log(1.0 + spread))) for job, (_, spread, _) in grounds.items()}
        for job, account in run(luck)[0].accounts.items():
            if account.ended_at is not None:
                ends[job].append(account.ended_at)
    foreseen = [
        _job_forecast(ledger.accounts[spec.id], ends[spec.id], totals[spec.id], grounds[spec.id]) for spec in specs
    ]
    return Forecast(cluster, {device.id: device.name for device in devices}, tuple(foreseen), summary)


def _with_length(
    spec: JobSpec,
    time_limit_s: float,
    total: float | None,
    cluster: Cluster,
    devices: Sequence[LocalDevice],
    profiles: Mapping[JobId, ProfileRateModel],
) -> JobSpec:
    """The spec with a length in steps: known, or so many as make up the guessed time on one device."""
    if total is not None:
        return replace(spec, work=total)
    one = Placement(((Kind(devices[0].kind), spec.narrowest),))
    rate = OnlineEstimator(cluster, initial_speeds(devices), profiles).rate(spec, one).mean
    return replace(spec, work=rate * min(GUESSED_S, time_limit_s or GUESSED_S))


def _grounds(account: JobAccount, live: OnlineEstimator, total: float | None) -> tuple[float | None, float, str]:
    """The rate on what a job first gets, how unsure its time is, and on what grounds."""
    first = next((given.allocation for given in account.decisions if given.allocation is not None), None)
    if first is None:
        return None, 0.0, "it is never given a device"
    belief = live.first_belief(account.spec, live.cluster.placement(first))
    rate, std = belief.rate
    if total is None:
        return rate, _LENGTH_UNKNOWN, f"{belief.basis}; length guessed"
    return rate, std / rate, belief.basis


def _job_forecast(
    account: JobAccount, ends: list[float], total: float | None, grounds: tuple[float | None, float, str]
) -> JobForecast:
    starts = next((given.at for given in account.decisions if given.allocation is not None), None)
    rate, spread, basis = grounds
    ends = sorted(ends)
    span = None
    if ends and account.ended_at is not None:
        low, high = (ends[int(quantile * (len(ends) - 1))] for quantile in (_LOW, _HIGH))
        span = (min(low, account.ended_at), max(high, account.ended_at))
    is_guess = basis.startswith("guessed")
    return JobForecast(account, starts, span, total, None if is_guess else rate, spread, basis)


def forecast_json(forecast: Forecast, policy: str, devices: Sequence[LocalDevice]) -> Json:
    """What ``plan --json`` prints."""
    figures = forecast.summary
    return {
        "schema": 1,
        "version": __version__,
        "policy": policy,
        "devices": [{"name": device.name, "kind": device.kind} for device in devices],
        "makespan_s": finite_or_none(figures.makespan_s),
        "avg_jct_s": finite_or_none(figures.avg_jct_s),
        "weighted_jct_s": finite_or_none(figures.weighted_jct_s),
        "utilisation": {"device": finite_or_none(figures.utilisation)},
        "assumed": DEFAULT_COSTS._asdict(),
        "jobs": [_job(job, forecast.names) for job in forecast.jobs],
    }


def _job(job: JobForecast, names: Mapping[int, str]) -> Json:
    account = job.account
    return {
        "name": account.spec.id,
        "start_s": job.starts_at,
        "end_s": account.ended_at,
        **({"deadline_s": account.spec.deadline_s} if account.spec.deadline_s else {}),
        "end_range_s": None if job.range_s is None else list(job.range_s),
        "steps": job.steps,
        "steps_per_s": job.steps_per_s,
        "spread": job.spread,
        "basis": job.basis,
        "allocations": [allocation_json(given, account.spec.batch_size, names) for given in account.decisions],
    }
