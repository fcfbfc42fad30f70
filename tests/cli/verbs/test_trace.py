"""What is said of rows that were left out."""

from carpool.cli.verbs.trace import dropped_row_lines
from carpool.sim.traces.trace import DroppedRow


def test_rows_are_counted_and_the_first_of_them_named() -> None:
    rows = [*(DroppedRow(line, "no GPU") for line in range(2, 10)), DroppedRow(0, "too large", "wide")]
    assert list(dropped_row_lines({"no GPU": 9, "too large": 1, "after the first 80 jobs": 220}, rows)) == [
        "dropped 9 rows: no GPU (row 2, row 3, row 4, row 5, row 6, …)",
        "dropped 1 row: too large (job wide)",
        "dropped 220 rows: after the first 80 jobs",
    ]
