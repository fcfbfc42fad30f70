"""What-if planner: forecasts jobs as if they were submitted now, behind those already in the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from carpool.backends.job_accounting import Json
from carpool.core.errors import InputError
from carpool.core.model import JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.feasibility import check_fit
from carpool.jobs.job_file import ListedJob
from carpool.policies.registry import attribute_errors, parse_policy
from carpool.predictors.profiles.rate_model import ProfileRateModel
from carpool.service.auth import Principal
from carpool.service.queries.forecast import forecast_jobs, forecast_json
from carpool.service.service import SchedulerService

MAX_JOBS = 400  # jobs that are looked at together
_EFFORT = 4000  # jobs simulated for the ranges, over all draws
_MOST_DRAWS = 40

Beliefs = Callable[[Sequence[ListedJob]], Mapping[JobId, ProfileRateModel]]


class WhatIfPlanner:
    """Implements `Planner` with the scheduler's own policy; one forecast at a time, beside the daemon's work.

    What runs is taken to begin anew with what is left of it, so an end may come out somewhat late, never early by
    work that was forgotten. Jobs that are paused stay away.
    """

    def __init__(
        self, clerk: SchedulerService, devices: Sequence[LocalDevice], policy: Callable[[], str], beliefs: Beliefs
    ) -> None:
        self._clerk = clerk
        self._devices = devices
        self._policy = policy
        self._beliefs = beliefs
        self._one_at_a_time = asyncio.Semaphore(1)

    async def foresee(self, who: Principal, jobs: Sequence[ListedJob]) -> Json:
        """The plan of these jobs, as ``carpool plan --json`` prints it."""
        check_fit(jobs, self._clerk.cluster)
        async with self._one_at_a_time:
            before = self._clerk.standing()
            if len(before) + len(jobs) > MAX_JOBS:
                raise InputError(
                    f"{len(before)} jobs are there and {len(jobs)} are asked for; the limit of a forecast is {MAX_JOBS}",
                    way_out="Submit them, and look at what the daemon expects of each.",
                )
            left, asked = self._clerk.left(before), self._clerk.as_submitted(who, jobs)
            return await asyncio.to_thread(self._foresee, before, left, asked)

    def _foresee(self, before: Sequence[ListedJob], left: Mapping[JobId, float], asked: Sequence[ListedJob]) -> Json:
        there = [_without_ended(job, {other.spec.id for other in before}) for job in before]
        together = [*there, *asked]
        text = self._policy()
        draws = min(_MOST_DRAWS, _EFFORT // len(together))
        with attribute_errors(text, strictly=True):
            forecast = forecast_jobs(
                together,
                self._devices,
                parse_policy(text),
                self._beliefs(together),
                left=left,
                draws=max(1, draws),
                supplies=self._clerk.cluster.nodes[-1].resources,
            )
        mine = {job.spec.id for job in asked}
        wanted = tuple(job for job in forecast.jobs if job.account.spec.id in mine)
        document = forecast_json(replace(forecast, jobs=wanted), text, self._devices)
        return {**document, "behind": len(before)}


def _without_ended(job: ListedJob, there: set[JobId]) -> ListedJob:
    """The job without those it waits for that are over."""
    return ListedJob(replace(job.spec, after=tuple(name for name in job.spec.after if name in there)), job.program)
