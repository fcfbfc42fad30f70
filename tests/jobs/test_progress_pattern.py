"""Progress in lines of output."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import InputError
from carpool.jobs.progress_pattern import Progress, ProgressPattern


@pytest.mark.parametrize(
    ("pattern", "line", "found"),
    [
        (r"step (\d+)/(\d+)", "step 3/10 loss 0.5", Progress(3, 10)),
        (r"step (\d+)/(\d+) loss (\S+)", "step 3/10 loss 0.5", Progress(3, 10, 0.5)),
        (r"step (\d+)/(\d+) loss (\S+)", "step 3/10 loss nan", Progress(3, 10)),
        (r"(?P<loss>[\d.e-]+) at (?P<step>[\d,]+)", "1e-3 at 12,000", Progress(12000, None, 0.001)),
        (r"Epoch (?P<epoch>\d+)/(?P<total>\d+)", "Epoch 2/20", Progress(2, 20)),
        (r"(\d+)it", "1it 2it 3it", Progress(3)),
        (r"(\d+)/(\d+)", "9/3", Progress(9)),
        ("tqdm", "  4%|▍         | 12/300 [00:01<00:30,  9.51it/s]", Progress(12, 300)),
        (r"step (\d+)", "nothing", None),
        (r"step (\S+)", "step x", None),
        (r"step (\S+)", "step -1", None),
        (r"step (\d+)", "step " + "9" * 400, None),
        (r"step (\d+)", "x" * 2000 + "step 1", None),
    ],
)
def test_lines(pattern: str, line: str, found: Progress | None) -> None:
    assert ProgressPattern(pattern).find(line.encode()) == found


@pytest.mark.parametrize(
    "pattern", ["(", "step", "(?P<steps>x)", "(?P<loss>x)", "x" * 1001, "(a)" * 90 + "{9999999999}"]
)
def test_wrong_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(InputError):
        ProgressPattern(pattern)


@given(st.binary(max_size=300))
def test_no_line_raises(line: bytes) -> None:
    ProgressPattern(r"(\S+)\D+(\S+)\D+(\S+)\D+(\S+)").find(line)
