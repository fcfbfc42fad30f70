"""What is written reads back the same, and a failure leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import InputError
from carpool.core.model import JobId, JobSpec, Kind
from carpool.sim.traces.reader import read_trace
from carpool.sim.traces.trace import Arrival, Trace, WorkUnit
from carpool.sim.traces.writer import WriteSummary, atomic_writer, convert, write_trace

WriteFile = Callable[..., Path]

NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), max_size=8)
TIMES = st.floats(0, allow_nan=False, allow_infinity=False)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Traces of jobs with all that our CSV can carry."""
    ids = draw(st.lists(NAMES.filter(bool), min_size=1, max_size=8, unique=True))
    arrivals = [
        Arrival(
            draw(TIMES),
            JobSpec(
                JobId(name),
                draw(st.integers(1, 10**6)),
                draw(st.none() | TIMES),
                draw(NAMES),
                draw(st.integers(0, 10**6)),
                draw(st.floats(0, exclude_min=True, allow_infinity=False)),
                draw(NAMES),
            ),
        )
        for name in ids
    ]
    return Trace("drawn", "canonical", tuple(sorted(arrivals, key=lambda arrival: arrival.submit_s)))


@given(traces(), st.sampled_from(["t.csv", "t.csv.gz"]))
def test_what_is_written_reads_back_the_same(trace: Trace, name: str) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        written = write_trace(trace, path)

        assert written == WriteSummary(path, len(trace), {})
        assert read_trace(path).arrivals == trace.arrivals
        assert [entry.name for entry in Path(folder).iterdir()] == [name]


def plain(*specs: JobSpec, work_unit: WorkUnit = WorkUnit.SECONDS) -> Trace:
    return Trace("t", "canonical", tuple([Arrival(1.0, spec) for spec in specs]), work_unit)


def test_columns_are_written_when_a_job_needs_them(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    write_trace(plain(JobSpec(JobId("a"), 2, 0.1), JobSpec(JobId("b,c"), 1, 1e20, weight=2.0)), path)

    assert path.read_text() == 'job,submit_s,gpus,work_s,weight\na,1,2,0.1,1\n"b,c",1,1,1e+20,2\n'


def test_what_cannot_be_carried_is_told(tmp_path: Path) -> None:
    written = write_trace(
        plain(JobSpec(JobId("a"), 1, 1.0, kinds=(Kind("T4"),)), JobSpec(JobId("b"), 1, 1.0, max_devices=4, retries=0)),
        tmp_path / "t.csv",
    )

    assert written.lost == {"max_devices": 1, "kinds": 1, "retries": 1}


def test_equal_traces_give_equal_files(tmp_path: Path) -> None:
    trace = plain(JobSpec(JobId("a"), 1, 1.0))
    for name in ("one.csv.gz", "two.csv.gz"):
        write_trace(trace, tmp_path / name)

    assert (tmp_path / "one.csv.gz").read_bytes() == (tmp_path / "two.csv.gz").read_bytes()


@pytest.mark.parametrize("name", ["two\nlines", "two\rlines", "\udcff"])
@pytest.mark.parametrize("target", ["t.csv", "t.csv.gz"])
def test_a_failure_leaves_the_old_file_and_no_draft(tmp_path: Path, name: str, target: str) -> None:
    path = tmp_path / target
    path.write_text("old")

    with pytest.raises(InputError, match="has a line end or is not Unicode"):
        write_trace(plain(JobSpec(JobId("a"), 1, 1.0), JobSpec(JobId("b"), 1, 1.0, user=name)), path)

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_job_without_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a job has the empty name"):
        write_trace(plain(JobSpec(JobId(""), 1, 1.0)), tmp_path / "t.csv")
    assert list(tmp_path.iterdir()) == []


def test_steps_are_not_written_as_seconds(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="its work is counted in steps, canonical CSV in seconds"):
        write_trace(plain(JobSpec(JobId("a"), 1, 1.0), work_unit=WorkUnit.STEPS), tmp_path / "t.csv")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_trace(plain(JobSpec(JobId("a"), 1, 1.0)), tmp_path / "none" / "t.csv")


def test_a_folder_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a regular file"):
        write_trace(plain(JobSpec(JobId("a"), 1, 1.0)), tmp_path)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target.csv", tmp_path / "link.csv"
    target.write_text("old")
    link.symlink_to(target)

    with atomic_writer(link) as file:
        file.write("new")

    assert (link.is_symlink(), target.read_text()) == (True, "new")


def test_converting(write_file: WriteFile, tmp_path: Path) -> None:
    source = write_file("name,time,application,num_replicas,batch_size", "cifar10-0,53,cifar10,6,2048")

    read = convert(source, tmp_path / "out.csv")

    assert (tmp_path / "out.csv").read_text() == (
        "job,submit_s,gpus,work_s,model,batch\ncifar10-0,53,6,unknown,cifar10,2048\n"
    )
    assert read_trace(tmp_path / "out.csv").arrivals == read.arrivals
