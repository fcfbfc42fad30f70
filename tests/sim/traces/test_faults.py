"""What is wrong with a file is said once, with file, row, column, value and a way out."""

from __future__ import annotations

import gc
import gzip
import os
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from carpool.core.errors import InputError, UnknownName
from carpool.sim.traces.reader import FORMATS, detect, read_trace
from carpool.sim.traces.trace import LISTED_DROPS, DroppedRow

WriteFile = Callable[..., Path]

HEADER = "job,submit_s,gpus,work_s"
GOOD = "good,0,1,1"
SKIP = "Correct the row, or pass --skip-invalid to drop such rows."

BAD_CELLS = [  # row, column, problem, reason
    ("b,-1,1,1", "submit_s", "'-1' is negative", "submit_s is negative"),
    ("b,nan,1,1", "submit_s", "'nan' is not finite", "submit_s is not finite"),
    ("b,soon,1,1", "submit_s", "'soon' is not a number", "submit_s is not a number"),
    ("b,,1,1", "submit_s", "'' is empty", "submit_s is empty"),
    ("b,0,0,1", "gpus", "'0' is less than 1", "gpus is less than 1"),
    ("b,0,-2,1", "gpus", "'-2' is negative", "gpus is negative"),
    ("b,0,2.5,1", "gpus", "'2.5' is not a whole number", "gpus is not a whole number"),
    ("b,0,,1", "gpus", "'' is empty", "gpus is empty"),
    ("b,0,inf,1", "gpus", "'inf' is not finite", "gpus is not finite"),
    ("b,0,1,-0.5", "work_s", "'-0.5' is negative", "work_s is negative"),
    ("b,0,1,inf", "work_s", "'inf' is not finite", "work_s is not finite"),
    ("b,0,1,NaN", "work_s", "'NaN' is not finite", "work_s is not finite"),
    ("b,0,1,", "work_s", "'' is empty", "work_s is empty"),
    (",0,1,1", "job", "'' is empty", "job is empty"),
    ("good,0,1,1", "job", "'good' is the id of an earlier row too", "job is the id of an earlier row too"),
]


@pytest.mark.parametrize(("row", "column", "problem", "reason"), BAD_CELLS)
def test_a_bad_cell_stops_or_is_dropped(
    write_file: WriteFile, row: str, column: str, problem: str, reason: str
) -> None:
    path = write_file(HEADER, GOOD, row, "last,1,1,1")

    with pytest.raises(InputError) as caught:
        read_trace(path)

    assert (caught.value.where, caught.value.problem) == (f"{path}, row 3, column {column!r}", problem)
    assert caught.value.way_out == SKIP
    assert str(caught.value) == f"{path}, row 3, column {column!r}: {problem}. {SKIP}"
    trace = read_trace(path, skip_invalid=True)
    assert [arrival.spec.id for arrival in trace.arrivals] == ["good", "last"]
    assert (trace.dropped, trace.dropped_rows) == ({reason: 1}, (DroppedRow(3, reason),))


@pytest.mark.parametrize(
    ("cells", "column", "problem"),
    [
        ("m,1.5,1,u", "batch", "'1.5' is not a whole number"),
        ("m,-1,1,u", "batch", "'-1' is negative"),
        ("m,8,0,u", "weight", "'0' is not above 0"),
        ("m,8,nan,u", "weight", "'nan' is not finite"),
        ("m,8,heavy,u", "weight", "'heavy' is not a number"),
    ],
)
def test_a_bad_optional_cell(write_file: WriteFile, cells: str, column: str, problem: str) -> None:
    path = write_file(f"{HEADER},model,batch,weight,user", f"a,0,1,1,{cells}")

    with pytest.raises(InputError) as caught:
        read_trace(path)

    assert (caught.value.where, caught.value.problem) == (f"{path}, row 2, column {column!r}", problem)


@pytest.mark.parametrize(
    ("row", "problem", "reason"),
    [
        ("b,1", "the row 'b,1' has 2 of 4 cells; the file may be cut short", "too few cells"),
        ("b,1,1,1,9", "the row 'b,1,1,1,9' has 5 cells; the header has 4", "too many cells"),
    ],
)
def test_a_row_of_the_wrong_length(write_file: WriteFile, row: str, problem: str, reason: str) -> None:
    path = write_file(HEADER, GOOD, row.encode())

    with pytest.raises(InputError) as caught:
        read_trace(path)

    assert (caught.value.where, caught.value.problem) == (f"{path}, row 3", problem)
    trace = read_trace(path, skip_invalid=True)
    assert (trace.dropped, trace.dropped_rows) == ({reason: 1}, (DroppedRow(3, reason),))


def test_a_quote_that_is_never_closed(write_file: WriteFile) -> None:
    path = write_file(HEADER, GOOD, '"b,1,1,1', "c,2,1,1")

    with pytest.raises(InputError, match=r"row 3: a quoted cell runs over 3 lines, from 'b,1,1,1\\nc,2,1,1\\n'"):
        read_trace(path)


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
def test_each_line_of_a_cell_that_runs_on_is_dropped(write_file: WriteFile, line_end: bytes) -> None:
    rows = write_file(HEADER, GOOD, b'"b' + line_end + b'c",1,1,1\n', "d,2,1,1", "e,3,0,1")

    trace = read_trace(rows, skip_invalid=True)

    assert [arrival.spec.id for arrival in trace.arrivals] == ["good", "d"]
    assert [row.row for row in trace.dropped_rows] == [3, 4, 6]
    assert trace.dropped == {"a quoted cell runs on": 2, "gpus is less than 1": 1}


def test_row_numbers_hold_after_blank_lines_and_in_later_blocks(write_file: WriteFile) -> None:
    rows = [f"j{place},0,1,1" for place in range(10_000)]
    path = write_file("", HEADER, "", *rows, "bad,0,x,1")

    with pytest.raises(InputError, match=r"row 10004, column 'gpus': 'x' is not a number"):
        read_trace(path)


def test_a_duplicate_in_a_later_block(write_file: WriteFile) -> None:
    path = write_file(HEADER, *[f"j{place},0,1,1" for place in range(9000)], "j17,0,1,1")

    with pytest.raises(InputError, match=r"row 9002, column 'job': 'j17' is the id of an earlier row too"):
        read_trace(path)


def test_the_same_task_twice(write_file: WriteFile) -> None:
    task = "j1,worker,1.0,Terminated,0.0,9.0,600.0,29.3,100.0,V100"

    with pytest.raises(InputError, match=r"row 2, column 'job_name': 'j1' is the id of an earlier row too"):
        read_trace(write_file(task, task))


def test_an_end_before_the_start(write_file: WriteFile) -> None:
    path = write_file("j1,worker,1.0,Terminated,10.0,9.0,600.0,29.3,100.0,V100")

    with pytest.raises(InputError, match=r"row 1, column 'end_time': '9.0' is before the start"):
        read_trace(path)


@pytest.mark.parametrize(
    ("date", "problem"),
    [("yesterday", "'yesterday' is not a date like 2017-10-09 07:01:55"), ("", "'' is empty")],
)
def test_a_bad_date(write_file: WriteFile, date: str, problem: str) -> None:
    path = write_file("timestamp,duration,num_gpus", f"{date},1,1")

    with pytest.raises(InputError) as caught:
        read_trace(path)

    assert (caught.value.where, caught.value.problem) == (f"{path}, row 2, column 'timestamp'", problem)


def test_bytes_that_are_not_utf8(write_file: WriteFile) -> None:
    path = write_file(HEADER, GOOD, b"caf\xe9,0,1,1\n", "last,1,1,1")

    with pytest.raises(InputError) as caught:
        read_trace(path)

    assert caught.value.where == f"{path}, row 3"
    assert caught.value.problem == r"byte 0xe9 in 'caf\\xe9,0,1,1' is not UTF-8"
    trace = read_trace(path, skip_invalid=True)
    assert [arrival.spec.id for arrival in trace.arrivals] == ["good", "last"]
    assert (trace.dropped, trace.dropped_rows) == ({"not UTF-8": 1}, (DroppedRow(3, "not UTF-8"),))


def test_a_first_line_that_is_not_text(write_file: WriteFile) -> None:
    with pytest.raises(InputError, match=r"row 1: byte 0xff in .* is not UTF-8"):
        detect(write_file("job,submit_s".encode("utf-16")))


def test_a_missing_column_is_named_with_the_nearest_format(write_file: WriteFile) -> None:
    path = write_file("job,submit_s,work_s", "a,0,1")

    with pytest.raises(InputError) as caught:
        read_trace(path)

    assert caught.value.where == f"{path}, row 1"
    assert caught.value.problem == (
        "the header 'job,submit_s,work_s' matches no known format; for canonical it lacks column 'gpus'"
    )


def test_an_unknown_header_lists_all_formats(write_file: WriteFile) -> None:
    with pytest.raises(InputError) as caught:
        read_trace(write_file("x,y,z", "1,2,3"))

    assert caught.value.problem == "the header 'x,y,z' matches no known format"
    for name, forms in FORMATS.items():
        for form in forms:
            assert f"{name}: {form.header}" in caught.value.way_out


def test_a_named_format_overrides_and_says_what_is_missing(write_file: WriteFile) -> None:
    path = write_file(HEADER, GOOD)

    with pytest.raises(InputError) as caught:
        read_trace(path, "pollux")

    assert caught.value.problem == (
        f"the header {HEADER!r} lacks columns "
        "'name', 'time', 'application', 'num_replicas', 'batch_size' of format pollux"
    )
    assert caught.value.way_out == "Expected: name,time,application,num_replicas,batch_size."
    assert read_trace(path, "canonical").format == "canonical"


def test_an_unknown_format_gets_a_suggestion(write_file: WriteFile) -> None:
    with pytest.raises(UnknownName, match=r"unknown trace format 'philli'\. Did you mean philly"):
        read_trace(write_file(HEADER, GOOD), "philli")


def test_a_column_named_twice(write_file: WriteFile) -> None:
    with pytest.raises(InputError, match="row 1: the header names column 'gpus' 2 times"):
        read_trace(write_file(f"{HEADER},gpus", "a,0,1,1,1"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ([], "the file is empty"),
        (["", ""], "the file is empty"),
        ([HEADER], "the trace has no rows"),
        ([HEADER, ""], "the trace has no rows"),
    ],
)
def test_a_trace_without_jobs(write_file: WriteFile, content: list[str], problem: str) -> None:
    path = write_file(*content)

    with pytest.raises(InputError) as caught:
        read_trace(path)

    assert (caught.value.where, caught.value.problem) == (str(path), problem)


def test_a_trace_whose_rows_are_all_dropped(write_file: WriteFile) -> None:
    path = write_file("job_id,submit_time,num_gpus,duration", "1,0,0,5", "2,0,0,5", "3,0,1,")

    with pytest.raises(InputError) as caught:
        read_trace(path)

    assert caught.value.problem == "no row is left; all 3 were dropped (no GPU: 2, no end time: 1)"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing\.csv: does not exist"):
        read_trace(tmp_path / "nothing.csv")


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is a folder, not a file"):
        read_trace(tmp_path)


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = Thread(target=pipe.write_text, args=(f"{HEADER}\n{GOOD}\n",))
    writer.start()

    trace = read_trace(pipe)

    writer.join()
    assert [arrival.spec.id for arrival in trace.arrivals] == ["good"]


def test_a_cut_gzip_file(write_file: WriteFile) -> None:
    packed = gzip.compress(b"job,submit_s,gpus,work_s\n" + b"".join(b"%d,0,1,%d\n" % (n, n * n) for n in range(999)))

    with pytest.raises(
        InputError, match=r"half.csv.gz: the gzip data is damaged or cut short .* Fetch the file again."
    ):
        read_trace(write_file(packed[: len(packed) // 2], name="half.csv.gz"))


def test_a_file_of_one_endless_line(write_file: WriteFile) -> None:
    with pytest.raises(InputError, match="matches no known format"):
        read_trace(write_file(b"x" * 200_000))


def test_a_cell_beyond_reason(write_file: WriteFile) -> None:
    with pytest.raises(InputError, match=r"is not CSV .*unclosed quote"):
        read_trace(write_file(HEADER, '"' + "x" * 200_000))


def test_only_the_first_drops_are_listed(write_file: WriteFile) -> None:
    trace = read_trace(write_file(HEADER, GOOD, *[f"{n},0,0,1" for n in range(LISTED_DROPS + 5)]), skip_invalid=True)

    assert trace.dropped == {"gpus is less than 1": LISTED_DROPS + 5}
    assert len(trace.dropped_rows) == LISTED_DROPS


def test_no_more_jobs_than_asked_for(write_file: WriteFile) -> None:
    trace = read_trace(write_file(HEADER, "late,9,1,1", GOOD, "b,1,1,1"), max_jobs=2)

    assert [arrival.spec.id for arrival in trace.arrivals] == ["good", "b"]
    assert trace.dropped == {"after the first 2 jobs": 1}


def test_a_long_value_is_cut_in_the_message(write_file: WriteFile) -> None:
    with pytest.raises(InputError) as caught:
        read_trace(write_file(HEADER, f"a,0,{'9x' * 500},1"))

    assert len(caught.value.problem) < 100


def test_garbage_collection_is_left_as_it_was(write_file: WriteFile) -> None:
    assert gc.isenabled()
    with pytest.raises(InputError):
        read_trace(write_file(HEADER))
    assert gc.isenabled()
