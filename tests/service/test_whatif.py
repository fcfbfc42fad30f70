"""A plan before submitting is behind what is there already, and changes nothing."""

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


def sight(office: ServiceRig) -> WhatIfPlanner:
    devices = parse_devices("cpu:2", cores=[0, 1])
    return WhatIfPlanner(office.clerk, devices, lambda: office.clerk.policy, lambda jobs: {})


def test_jobs_wait_for_those_that_are_there(tmp_path: Path) -> None:
    async def play() -> None:
        async with open_service(tmp_path) as office:
            alone = await sight(office).foresee(ADA, [listed("c")])
            await office.clerk.submit(ADA, [listed("a"), listed("b"), listed("c")])
            behind = await sight(office).foresee(ADA, [listed("c")])
            (first,), (later,) = alone["jobs"], behind["jobs"]  # type: ignore[misc]
            assert (first["name"], later["name"]) == ("c", "c-2")  # type: ignore[has-type]
            assert first["end_s"] < later["end_s"]  # type: ignore[has-type]
            assert (alone["behind"], behind["behind"]) == (0, 3)
            assert office.clerk.jobs(ADA).total == 3

    asyncio.run(play())


def test_what_cannot_be_foreseen_is_told(tmp_path: Path) -> None:
    async def play() -> None:
        async with open_service(tmp_path) as office:
            with pytest.raises(InputError, match="asks 9 devices"):
                await sight(office).foresee(ADA, [listed("a", devices=9)])
            many = [listed(f"j{number}") for number in range(MAX_JOBS + 1)]
            with pytest.raises(InputError, match=f"the limit of a forecast is {MAX_JOBS}"):
                await sight(office).foresee(ADA, many)
            mine = tmp_path / "mine.py"
            mine.write_text(MINE, encoding="utf-8")
            fails = WhatIfPlanner(office.clerk, parse_devices("cpu:2"), lambda: f"{mine}:Mine", lambda jobs: {})
            with pytest.raises(InputError, match=r"KeyError: 'no' \(mine.py, line 9\)"):
                await fails.foresee(ADA, [listed("a")])

    asyncio.run(play())


class Careful(DeclaredEstimator):
    """An estimator that is asked too much where it is asked at all."""

    def remaining(self, job: Job, at: float) -> Estimate:
        raise AssertionError("the limit is checked first")


def test_behind_too_many_jobs_nothing_is_reckoned(tmp_path: Path) -> None:
    async def play() -> None:
        async with open_service(tmp_path) as office:
            await office.clerk.submit(ADA, [listed(f"j{number}") for number in range(MAX_JOBS)])
            clerk = SchedulerService(replace(office.read_model, estimates=Careful()))
            with pytest.raises(InputError, match=f"{MAX_JOBS} jobs are there and 1 are asked for"):
                await WhatIfPlanner(clerk, [], lambda: "fifo", lambda jobs: {}).foresee(ADA, [listed("a")])

    asyncio.run(play())
