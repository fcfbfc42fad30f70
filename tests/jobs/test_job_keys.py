"""A job file and the HTTP API accept the same numbers for every key of a job."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from carpool.core.errors import InputError
from carpool.jobs.job_file import parse_jobs
from carpool.jobs.job_keys import KEYS
from carpool.service.http.schemas import JobTable

_BESIDE: dict[str, dict[str, object]] = {
    "at_most": {"sweep": {"n": [1, 2]}},
    "shards": {"exact": True},
    "max_devices": {},
    "min_devices": {},
}
_NUMBERS = sorted(name for name, key in KEYS.items() if key.type in ("integer", "number"))


def in_file(key: str, value: float, folder: Path) -> bool:
    (folder / "t.py").write_text("def f(n=0): ...\n")
    table = {"name": "a", "entry": "t.py:f", **_BESIDE.get(key, {}), key: value}
    try:
        parse_jobs({"job": [table]}, folder, "a request")
    except InputError:
        return False
    return True


def in_request(key: str, value: float) -> bool:
    try:
        JobTable(name="a", entry="t.py:f", **{key: value})
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize("key", _NUMBERS)
def test_limits_of_a_number_are_equal_in_job_files_and_requests(key: str, tmp_path: Path) -> None:
    least, most = KEYS[key].least, KEYS[key].most
    for value in (least, most if key != "shards" else 1 << 16):
        assert in_file(key, value, tmp_path), value
        assert in_request(key, value), value
    for value in (least - 1, -1, most + 1, most * 2, True):
        assert not in_file(key, value, tmp_path), value
        assert not in_request(key, value), value
