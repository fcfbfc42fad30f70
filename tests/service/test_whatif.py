"""WhatIfPlanner: forecasts new jobs behind the queue without submitting them."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from carpool.core.errors import InputError
from carpool.core.estimates import DeclaredEstimator, Estimate
from carpool.core.model import Job
from carpool.jobs.devices import parse_devices
from carpool.service.auth import Principal
from carpool.service.service import SchedulerService
from carpool.service.whatif import MAX_JOBS, WhatIfPlanner
from tests.support.service_rig import ServiceRig, listed, open_service

ADA = Principal("ada")

MINE = """
from dataclasses import dataclass
from carpool.policies.baselines.nonpreemptive import Fifo


@dataclass(frozen=True)
class Mine(Fifo):
    def plan(self, view):
        return {}["no"]
"""


def planner(rig: ServiceRig) -> WhatIfPlanner:
    devices = parse_devices("cpu:2", cores=[0, 1])
    return WhatIfPlanner(rig.service, devices, lambda: rig.service.policy, lambda jobs: {})


def test_new_jobs_wait_behind_queued_ones(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_service(tmp_path) as rig:
            alone = await planner(rig).plan(ADA, [listed("c")])
            await rig.service.submit(ADA, [listed("a"), listed("b"), listed("c")])
            behind = await planner(rig).plan(ADA, [listed("c")])
            (first,), (later,) = alone["jobs"], behind["jobs"]  # type: ignore[misc]
            assert (first["name"], later["name"]) == ("c", "c-2")  # type: ignore[has-type]
            assert first["start_s"] < later["start_s"]  # type: ignore[has-type]
            assert first["end_s"] is None  # type: ignore[has-type]  # of unknown length
            assert (alone["behind"], behind["behind"]) == (0, 3)
            assert rig.service.jobs(ADA).total == 3

    asyncio.run(scenario())


def test_a_forecast_that_is_not_possible_is_rejected(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_service(tmp_path) as rig:
            with pytest.raises(InputError, match="9 devices"):
                await planner(rig).plan(ADA, [listed("a", devices=9)])
            many = [listed(f"j{number}") for number in range(MAX_JOBS + 1)]
            with pytest.raises(InputError, match=str(MAX_JOBS)):
                await planner(rig).plan(ADA, many)
            mine = tmp_path / "mine.py"
            mine.write_text(MINE, encoding="utf-8")
            failing = WhatIfPlanner(rig.service, parse_devices("cpu:2"), lambda: f"{mine}:Mine", lambda jobs: {})
            with pytest.raises(InputError, match=r"KeyError: 'no' \(mine.py, line 9\)"):
                await failing.plan(ADA, [listed("a")])

    asyncio.run(scenario())


class Unused(DeclaredEstimator):
    """An estimator that must not be called."""

    def remaining(self, job: Job, at: float) -> Estimate:
        raise AssertionError("the limit is checked first")


def test_the_limit_is_checked_before_anything_is_computed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_service(tmp_path) as rig:
            await rig.service.submit(ADA, [listed(f"j{number}") for number in range(MAX_JOBS)])
            service = SchedulerService(replace(rig.read_model, estimates=Unused()))
            with pytest.raises(InputError, match=f"{MAX_JOBS} queued and 1 new"):
                await WhatIfPlanner(service, [], lambda: "fifo", lambda jobs: {}).plan(ADA, [listed("a")])

    asyncio.run(scenario())
