"""Entry checks in several threads, as in the daemon."""

import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from carpool.jobs.entry_file import check_entry


@pytest.fixture
def threads_in_turn() -> Iterator[None]:
    """Switch threads as often as possible, also in the middle of a parse: a garbage collection calls Python there."""

    def called(phase: str, told: dict[str, int]) -> None:
        pass

    threshold, interval_s = gc.get_threshold(), sys.getswitchinterval()
    gc.callbacks.append(called)
    gc.set_threshold(10, 2, 1_000_000)
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)
    gc.set_threshold(*threshold)
    gc.callbacks.remove(called)


def test_entries_can_be_checked_concurrently(tmp_path: Path, threads_in_turn: None) -> None:
    function = "def train{}(a, b=1):\n    return [x for x in range(a) if x > b]\n"
    (tmp_path / "train.py").write_text("".join(map(function.format, range(20))))
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(check_entry, "train.py:train7", ("a",), tmp_path, "job") for _ in range(30)]
    assert [look.exception() for look in asked] == [None] * 30
