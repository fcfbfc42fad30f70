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

MAX_JOBS = 400  # of one forecast
_MAX_SIMULATED = 4000  # jobs over all draws
_MAX_DRAWS = 40

LoadProfiles = Callable[[Sequence[ListedJob]], Mapping[JobId, ProfileRateModel]]


class WhatIfPlanner:
    """Forecasts new jobs under the active policy, one request at a time, in a thread beside the daemon.

    Running jobs are simulated as if they started again with their remaining steps. That adds a start-up that they do
    not need, so the forecast of their ends is slightly late. Paused jobs are left out.
    """

    def __init__(
        self,
        service: SchedulerService,
        devices: Sequence[LocalDevice],
        policy: Callable[[], str],
        load_profiles: LoadProfiles,
    ) -> None:
        self._service = service
        self._devices = devices
        self._policy = policy
        self._load_profiles = load_profiles
        self._one_at_a_time = asyncio.Semaphore(1)

    async def plan(self, principal: Principal, jobs: Sequence[ListedJob]) -> Json:
        check_fit(jobs, self._service.cluster)
        async with self._one_at_a_time:
            queued = self._service.queued_jobs()
            if len(queued) + len(jobs) > MAX_JOBS:
                raise InputError(
                    f"{len(queued)} queued and {len(jobs)} new jobs; the limit of a forecast is {MAX_JOBS} jobs",
                    way_out="Submit them: the daemon then shows the expected end of each running job.",
                )
            remaining, new = self._service.remaining_steps(queued), self._service.as_submitted(principal, jobs)
            return await asyncio.to_thread(self._forecast, queued, remaining, new)

    def _forecast(
        self, queued: Sequence[ListedJob], remaining: Mapping[JobId, float], new: Sequence[ListedJob]
    ) -> Json:
        names = {job.spec.id for job in queued}
        jobs = [*(_without_ended_dependencies(job, names) for job in queued), *new]
        policy = self._policy()
        with attribute_errors(policy, strictly=True):
            forecast = forecast_jobs(
                jobs,
                self._devices,
                parse_policy(policy),
                self._load_profiles(jobs),
                left=remaining,
                draws=max(1, min(_MAX_DRAWS, _MAX_SIMULATED // len(jobs))),
                supplies=self._service.cluster.nodes[-1].resources,
            )
        requested = {job.spec.id for job in new}
        kept = tuple(job for job in forecast.jobs if job.account.spec.id in requested)
        document = forecast_json(replace(forecast, jobs=kept), policy, self._devices)
        return {**document, "behind": len(queued)}


def _without_ended_dependencies(job: ListedJob, active: set[JobId]) -> ListedJob:
    return ListedJob(replace(job.spec, after=tuple(name for name in job.spec.after if name in active)), job.program)
