"""``carpool trace``: generate, info, convert, and the report of dropped rows."""

import json
from pathlib import Path

import pytest

from carpool.cli.main import run
from carpool.cli.verbs.trace import dropped_row_lines
from carpool.sim.traces.trace import DroppedRow


def test_generate_info_and_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "made.csv"
    assert run(["trace", "generate", str(path), "--jobs", "50", "--devices", "8", "--load", "0.5", "--seed", "7"]) == 0
    again = tmp_path / "again.csv.gz"
    assert run(["trace", "convert", str(path), str(again)]) == 0
    capsys.readouterr()
    assert run(["trace", "info", str(again), "--devices", "8", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["jobs"] == 50
    assert run(["trace", "info", str(path), "--devices", "8"]) == 0
    assert "50 jobs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--jobs", "0"], "jobs"),
        (["--load", "0.5", "--rate", "2"], "rate"),
        (["--arrivals", "poison"], "Did you mean poisson"),
        (["--lengths", "lognormal:median=3"], "median_s"),
        (["--sizes", "x:1"], "x"),
    ],
)
def test_bad_options_write_nothing(
    tmp_path: Path, args: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "made.csv"
    assert run(["trace", "generate", str(path), *args]) == 2
    assert expected in capsys.readouterr().err
    assert not path.exists()


def test_dropped_rows_are_counted_and_the_first_ones_named() -> None:
    rows = [*(DroppedRow(line, "no GPU") for line in range(2, 10)), DroppedRow(0, "too large", "wide")]
    assert list(dropped_row_lines({"no GPU": 9, "too large": 1, "after the first 80 jobs": 220}, rows)) == [
        "dropped 9 rows: no GPU (row 2, row 3, row 4, row 5, row 6, …)",
        "dropped 1 row: too large (job wide)",
        "dropped 220 rows: after the first 80 jobs",
    ]
