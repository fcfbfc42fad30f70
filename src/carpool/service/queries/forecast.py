"""Forecast: simulates the scheduler and its policy with estimated rates to predict when jobs start and end."""

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

DEFAULT_COSTS = Costs(start_s=1.0, resize_s=0.2, end_s=0.1)  # of jobs without a profile
GUESSED_S = 120.0  # length on one device of a job of unknown length
_DRAWS = 40
_LOW, _HIGH = 0.1, 0.9  # quantiles of the range of an end
_GUESS_SPREAD = 1.0  # relative spread of a guessed length


@dataclass(frozen=True, slots=True)
class JobForecast:
    """The forecast of one job."""

    account: JobAccount
    starts_at: float | None  # None: never
    range_s: tuple[float, float] | None  # 10 % and 90 % quantiles of its end; None: unknown
    steps: float | None  # None: unknown
    steps_per_s: float | None  # on its first allocation
    spread: float  # relative standard deviation of its rate, or of a guessed length
    basis: str

    @property
    def ends_at(self) -> float | None:
        """When it ends; None: never, or its length is unknown."""
        return None if self.steps is None else self.account.ended_at


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast of all jobs."""

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
    """Simulate the jobs under a policy at their estimated rates, then `draws` more times at randomised rates.

    In each draw a job's rate is multiplied by one log-normal factor with the spread of its estimate, which the policy
    does not see; the draws give the range of each job's end. `left` holds the remaining steps of started jobs.
    """
    cluster = as_cluster(devices, supplies)
    totals = {spec.id: profiles[spec.id].total_steps(spec) if spec.id in profiles else None for spec, _ in jobs}
    totals |= left or {}
    specs = [
        _with_length(spec, program.time_limit_s, totals[spec.id], cluster, devices, profiles) for spec, program in jobs
    ]
    costs = {job: model.profile.costs for job, model in profiles.items()}

    def run(factors: Mapping[JobId, float]) -> tuple[JobAccounting, Summary, OnlineEstimator]:
        estimator = OnlineEstimator(cluster, initial_speeds(devices), profiles)
        world = EstimatorWorld(estimator, factors, costs, DEFAULT_COSTS)
        accounting = JobAccounting(cluster)
        metrics = simulate([Arrival(0.0, spec) for spec in specs], cluster, policy, world, observers=(accounting,))
        return accounting, metrics.summary(), estimator

    accounting, summary, estimator = run({})
    accounts = accounting.accounts
    rates = {spec.id: _first_rate(accounts[spec.id], estimator, totals[spec.id]) for spec in specs}
    ends: dict[JobId, list[float]] = {spec.id: [] for spec in specs}
    rng = Random(seed)
    for _ in range(draws):
        factors = {job: exp(rng.gauss(0.0, log(1.0 + spread))) for job, (_, spread, _) in rates.items()}
        for job, account in run(factors)[0].accounts.items():
            if account.ended_at is not None:
                ends[job].append(account.ended_at)
    forecasts = [_job_forecast(accounts[spec.id], ends[spec.id], totals[spec.id], rates[spec.id]) for spec in specs]
    return Forecast(cluster, {device.id: device.name for device in devices}, tuple(forecasts), summary)


def _with_length(
    spec: JobSpec,
    time_limit_s: float,
    total: float | None,
    cluster: Cluster,
    devices: Sequence[LocalDevice],
    profiles: Mapping[JobId, ProfileRateModel],
) -> JobSpec:
    """Set the length in steps: the known one, or the steps that fill the guessed time on the minimum allocation."""
    if total is not None:
        return replace(spec, work=total)
    one = Placement(((Kind(devices[0].kind), spec.narrowest),))
    rate = OnlineEstimator(cluster, initial_speeds(devices), profiles).rate(spec, one).mean
    return replace(spec, work=rate * min(GUESSED_S, time_limit_s or GUESSED_S))


def _first_rate(
    account: JobAccount, estimator: OnlineEstimator, total: float | None
) -> tuple[float | None, float, str]:
    """Return the estimated rate on a job's first allocation, its relative spread, and its basis."""
    first = next((given.allocation for given in account.decisions if given.allocation is not None), None)
    if first is None:
        return None, 0.0, "never allocated a device"
    belief = estimator.first_belief(account.spec, estimator.cluster.placement(first))
    rate, std = belief.rate
    if total is None:
        return rate, _GUESS_SPREAD, f"{belief.basis}; length guessed"
    return rate, std / rate, belief.basis


def _job_forecast(
    account: JobAccount, ends: list[float], total: float | None, first_rate: tuple[float | None, float, str]
) -> JobForecast:
    starts = next((given.at for given in account.decisions if given.allocation is not None), None)
    rate, spread, basis = first_rate
    ends = sorted(ends)
    span = None
    if ends and account.ended_at is not None and total is not None:
        low, high = (ends[int(quantile * (len(ends) - 1))] for quantile in (_LOW, _HIGH))
        span = (min(low, account.ended_at), max(high, account.ended_at))
    is_guess = basis.startswith("guessed")
    return JobForecast(account, starts, span, total, None if is_guess else rate, spread, basis)


def forecast_json(forecast: Forecast, policy: str, devices: Sequence[LocalDevice]) -> Json:
    """Build the document that ``carpool plan --json`` prints."""
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
        "jobs": [_job_json(job, forecast.names) for job in forecast.jobs],
    }


def _job_json(job: JobForecast, names: Mapping[int, str]) -> Json:
    account = job.account
    return {
        "name": account.spec.id,
        "start_s": job.starts_at,
        "end_s": job.ends_at,
        **({"deadline_s": account.spec.deadline_s} if account.spec.deadline_s else {}),
        **({"params": dict(account.spec.params)} if account.spec.params else {}),
        "end_range_s": None if job.range_s is None else list(job.range_s),
        "steps": job.steps,
        "steps_per_s": job.steps_per_s,
        "spread": job.spread,
        "basis": job.basis,
        "allocations": [allocation_json(given, account.spec.batch_size, names) for given in account.decisions],
    }
