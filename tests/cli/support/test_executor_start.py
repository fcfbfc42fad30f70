"""The entry check of a run names every distinct error once, with the jobs that have it."""

import asyncio

import pytest

from carpool.cli.support.executor_start import check_entries
from carpool.core.errors import InputError
from carpool.core.model import JobId, JobSpec
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.runtime.executor.client import ExecutorClient


class Checker(ExecutorClient):
    """An executor whose entry check has these errors."""

    def __init__(self, errors: dict[str, str]) -> None:
        self._errors = errors

    async def check(self, programs: object, timeout_s: float) -> dict[str, str]:  # type: ignore[override]
        return self._errors


def checked(errors: dict[str, str]) -> str:
    jobs = [ListedJob(JobSpec(JobId(name)), Program(entry="t.py:f")) for name in errors]
    with pytest.raises(InputError) as raised:
        asyncio.run(check_entries(Checker(errors), jobs))
    return str(raised.value)


def test_every_distinct_error_is_listed_with_its_jobs_only() -> None:
    lines = checked({"fine": "", "b1": "no data", "b2": "no data", "b3": "no lr"}).splitlines()
    assert len(lines) == 2
    assert "'b1', 'b2'" in lines[0]
    assert lines[0].endswith("no data")
    assert "'b3'" in lines[1]
    assert not any("fine" in line for line in lines)


def test_every_one_of_many_errors_is_listed_the_later_ones_on_one_short_line_each() -> None:
    lines = checked({f"j{number}": f"error {number}\n" + "detail " * 100 for number in range(14)}).splitlines()
    assert len(lines) == 2 * 10 + 4
    assert all(f"'j{number}'" in line and f"error {number}" in line for number, line in enumerate(lines[20:], 10))
    assert max(map(len, lines[20:])) <= 200


def test_entries_without_errors_pass() -> None:
    asyncio.run(check_entries(Checker({"a": ""}), [ListedJob(JobSpec(JobId("a")), Program(entry="t.py:f"))]))
