"""Each public format, on small files with made-up rows."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from carpool.core.model import JobId, JobSpec, Kind
from carpool.sim.traces.reader import FORMATS, MAYBE_CUT, detect, read_trace
from carpool.sim.traces.row_collector import ROUNDED_UP
from carpool.sim.traces.trace import Arrival, DroppedRow, Trace, WorkUnit

WriteFile = Callable[..., Path]

PAI_TASK_HEADER = "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type"
POD_HEADER = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"
)
HELIOS_HEADER = "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue"
GAVEL_ROW = 'LM (batch size 5)\tpython3 main.py "x"\trnn\t--steps\t1\t{steps}\t{scale}\t{weight}\t-1.000000\t{at}'
FIRST_LINES = {
    "canonical": "job,submit_s,gpus,work_s",
    "philly": "timestamp,duration,num_gpus,gpu_time,cluster",
    "helios": HELIOS_HEADER,
    "alibaba-2020": PAI_TASK_HEADER,
    "alibaba-2023": POD_HEADER,
    "gavel": GAVEL_ROW.format(steps=1, scale=1, weight=1, at=0),
    "pollux": "name,time,application,num_replicas,batch_size",
}
OTHER_FIRST_LINES = {
    "philly": "job_id,submit_time,num_gpus,duration,cluster",
    "alibaba-2020": "job_id,num_inst,submit_time,num_cpu,num_gpu,gpu_type,duration,user",
}


def job(name: str, gpus: int = 1, work: float | None = None, **more: object) -> JobSpec:
    return JobSpec(JobId(name), gpus, work, **more)  # type: ignore[arg-type]


def jobs(trace: Trace) -> list[Arrival]:
    return list(trace.arrivals)


def test_canonical_reads_required_columns(write_file: WriteFile) -> None:
    path = write_file("job,submit_s,gpus,work_s", "a,0,1,10", "b,2.5,8,0", "c,2.5,2.0,1e3")

    trace = read_trace(path)

    assert jobs(trace) == [(0.0, job("a", 1, 10.0)), (2.5, job("b", 8, 0.0)), (2.5, job("c", 2, 1000.0))]
    assert (trace.name, trace.format, trace.work_unit) == (str(path), "canonical", WorkUnit.SECONDS)
    assert (trace.dropped, trace.dropped_rows, trace.notes) == ({}, (), {})


def test_canonical_reads_optional_columns_in_any_order(write_file: WriteFile) -> None:
    path = write_file("user,weight,job,submit_s,gpus,work_s,model,batch", "ann,2.5,a,0,1,10,bert,32", ",,b,0,1,10,,")

    assert jobs(read_trace(path)) == [
        (0.0, job("a", 1, 10.0, model="bert", batch_size=32, weight=2.5, user="ann")),
        (0.0, job("b", 1, 10.0)),
    ]


def test_canonical_says_unknown_when_nobody_knows_the_length(write_file: WriteFile) -> None:
    assert jobs(read_trace(write_file("job,submit_s,gpus,work_s", "a,0,1,unknown"))) == [(0.0, job("a"))]


def test_jobs_come_in_order_of_submission_and_of_the_file_on_ties(write_file: WriteFile) -> None:
    path = write_file("job,submit_s,gpus,work_s", "z,5,1,1", "y,5,1,1", "late,9,1,1", "first,0,1,1", "x,5,1,1")

    assert [arrival.spec.id for arrival in read_trace(path).arrivals] == ["first", "z", "y", "x", "late"]


def test_times_in_seconds_stay_as_they_are(write_file: WriteFile) -> None:
    path = write_file("job,submit_s,gpus,work_s", "a,100,1,1", "b,107,1,1")

    assert [arrival.submit_s for arrival in read_trace(path).arrivals] == [100.0, 107.0]


def test_equal_names_are_one_object(write_file: WriteFile) -> None:
    rows = [f"{place},0,1,1,resnet,ann" for place in range(3)]
    first, *others = [
        arrival.spec for arrival in read_trace(write_file("job,submit_s,gpus,work_s,model,user", *rows)).arrivals
    ]

    assert all(spec.model is first.model and spec.user is first.user for spec in others)


def test_philly_with_dates_counts_from_the_earliest(write_file: WriteFile) -> None:
    path = write_file(
        "timestamp,duration,num_gpus,gpu_time,cluster",
        "2017-10-09 07:01:55,66.0,1,66.0,vc1",
        "2017-10-08 07:01:50,2951.0,4,11804.0,vc2",
    )

    trace = read_trace(path)

    assert trace.format == "philly"
    assert jobs(trace) == [(0.0, job("1", 4, 2951.0, user="vc2")), (86405.0, job("0", 1, 66.0, user="vc1"))]
    assert trace.notes == {}


def test_philly_with_dates_takes_zones(write_file: WriteFile) -> None:
    path = write_file("timestamp,duration,num_gpus", "2017-10-09T07:00:00+00:00,1,1", "2017-10-09T07:00:00-01:00,1,1")

    assert [arrival.submit_s for arrival in read_trace(path).arrivals] == [0.0, 3600.0]


def test_philly_with_seconds(write_file: WriteFile) -> None:
    path = write_file("job_id,submit_time,num_gpus,duration,cluster", "7,3,1,2533,vc1", "9,4,2,10,vc1")

    assert jobs(read_trace(path)) == [(3.0, job("7", 1, 2533.0, user="vc1")), (4.0, job("9", 2, 10.0, user="vc1"))]


def test_philly_drops_what_has_no_gpu_or_no_end(write_file: WriteFile) -> None:
    path = write_file(
        "job_id,submit_time,num_gpus,duration", "1,0,0,5", "2,0,1,", "3,0,1,None", "4,0,1,5", name="short.csv"
    )

    trace = read_trace(path)

    assert jobs(trace) == [(0.0, job("4", 1, 5.0))]
    assert trace.dropped == {"no GPU": 1, "no end time": 2}
    assert trace.dropped_rows == (DroppedRow(2, "no GPU"), DroppedRow(3, "no end time"), DroppedRow(4, "no end time"))
    assert trace.num_dropped == 3


def test_row_ids_are_places_in_the_file_even_after_drops(write_file: WriteFile) -> None:
    path = write_file(
        "timestamp,duration,num_gpus", "2017-10-09 07:00:00,1,0", "2017-10-09 07:00:00,1,1", "2017-10-09 07:00:01,1,1"
    )

    assert [arrival.spec.id for arrival in read_trace(path).arrivals] == ["1", "2"]


def test_helios(write_file: WriteFile) -> None:
    path = write_file(
        HELIOS_HEADER,
        "11,u1,vcA,8,48,1,COMPLETED,2020-04-01 00:00:10,2020-04-01 00:00:20,2020-04-01 00:01:00,40,10",
        "12,u2,vcA,0,4,1,COMPLETED,2020-04-01 00:00:00,2020-04-01 00:00:20,2020-04-01 00:01:00,40,20",
        "13,u2,vcA,1,4,1,RUNNING,2020-04-01 00:00:00,2020-04-01 00:00:20,,,20",
        "14,u2,vcB,1,4,1,FAILED,2020-04-01 00:00:11,2020-04-01 00:00:20,2020-04-01 00:00:21,1,9",
    )

    trace = read_trace(path)

    assert trace.format == "helios"
    assert jobs(trace) == [(0.0, job("11", 8, 40.0, user="u1")), (1.0, job("14", 1, 1.0, user="u2"))]
    assert trace.dropped == {"no GPU": 1, "no end time": 1}
    assert trace.notes == {}


@pytest.mark.parametrize("header", [[], [PAI_TASK_HEADER]], ids=["bare", "with header"])
def test_alibaba_2020_joins_the_tasks_of_a_job(write_file: WriteFile, header: list[str]) -> None:
    path = write_file(
        *header,
        "j1,worker,3.0,Terminated,1010.0,1200.0,600.0,29.3,100.0,V100",
        "j1,ps,1.0,Terminated,1000.0,1150.0,600.0,29.3,,",
        "j1,evaluator,1.0,Terminated,1020.0,1250.0,600.0,29.3,50.0,V100",
        "j2,tensorflow,1.0,Failed,1005.0,1006.0,600.0,29.3,25.0,MISC",
        "j3,tensorflow,1.0,Running,1005.0,,600.0,29.3,100.0,T4",
        "j4,tensorflow,1.0,Waiting,,,600.0,29.3,100.0,T4",
    )

    trace = read_trace(path)

    assert trace.format == "alibaba-2020"
    assert jobs(trace) == [(0.0, job("j2", 1, 1.0)), (5.0, job("j1", 4, 240.0))]
    assert trace.dropped == {"no GPU": 1, "no end time": 1, "never started": 1}
    assert trace.notes == {ROUNDED_UP: 2}
    assert [row.row - len(header) for row in trace.dropped_rows] == [2, 5, 6]


def test_alibaba_2020_as_its_simulator_has_it(write_file: WriteFile) -> None:
    path = write_file(
        "job_id,num_inst,submit_time,num_cpu,num_gpu,gpu_type,duration,user",
        "5,2,60,6.0,1.0,MISC,300,ab",
        "6,1,61,6.0,0.5,T4,0,ab",
        "7,1,62,6.0,0.0,CPU,300,cd",
    )

    trace = read_trace(path)

    assert jobs(trace) == [(0.0, job("5", 2, 300.0, user="ab")), (1.0, job("6", 1, 0.0, user="ab"))]
    assert trace.dropped == {"no GPU": 1}
    assert trace.notes == {ROUNDED_UP: 1}


def test_alibaba_2023(write_file: WriteFile) -> None:
    path = write_file(
        POD_HEADER,
        "pod-0,12000,16384,1,1000,,LS,Running,0,12537496,10",
        "pod-1,6000,12288,1,460,V100M16|V100M32,LS,Succeeded,427061,427161,427071",
        "pod-2,32000,65536,8,1000,,Burstable,Failed,427062,427063,427062",
        "pod-3,32000,65536,0,0,,LS,Running,8962274,12902960,8962277",
        "pod-4,18708,64512,1,1000,,LS,Pending,10019975,10020052,",
    )

    trace = read_trace(path)

    assert trace.format == "alibaba-2023"
    assert jobs(trace) == [
        (0.0, job("pod-0", 1, 12537486.0)),
        (427061.0, job("pod-1", 1, 90.0, kinds=(Kind("V100M16"), Kind("V100M32")))),
        (427062.0, job("pod-2", 8, 1.0)),
    ]
    assert trace.dropped == {"no GPU": 1, "never started": 1}
    assert trace.notes == {ROUNDED_UP: 1}


def test_gavel(write_file: WriteFile) -> None:
    path = write_file(
        GAVEL_ROW.format(steps=925982, scale=4, weight=2, at=51),
        GAVEL_ROW.format(steps=44, scale=1, weight=1, at=0),
        name="jobs.trace",
    )

    trace = read_trace(path)

    assert (trace.format, trace.work_unit) == ("gavel", WorkUnit.STEPS)
    assert jobs(trace) == [
        (0.0, job("1", 1, 44.0, model="LM (batch size 5)")),
        (51.0, job("0", 4, 925982.0, model="LM (batch size 5)", weight=2.0)),
    ]


def test_pollux(write_file: WriteFile) -> None:
    trace = read_trace(write_file("name,time,application,num_replicas,batch_size", "cifar10-0,53,cifar10,6,2048"))

    assert (trace.format, trace.work_unit) == ("pollux", WorkUnit.UNKNOWN)
    assert jobs(trace) == [(53.0, job("cifar10-0", 6, None, model="cifar10", batch_size=2048))]


def test_every_format_is_recognised_from_its_first_line(write_file: WriteFile) -> None:
    assert set(FIRST_LINES) == set(FORMATS)
    for name, line in [*FIRST_LINES.items(), *OTHER_FIRST_LINES.items()]:
        assert detect(write_file(line)) == name


def test_a_table_entry_has_the_name_of_its_formats() -> None:
    assert {name: {form.name for form in forms} for name, forms in FORMATS.items()} == {
        name: {name} for name in FORMATS
    }


def test_gzip_is_read_whatever_the_name(write_file: WriteFile) -> None:
    packed = gzip.compress(b"job,submit_s,gpus,work_s\na,0,1,1\n")

    assert jobs(read_trace(write_file(packed, name="a.csv.gz"))) == jobs(read_trace(write_file(packed, name="a.csv")))


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfjob,submit_s,gpus,work_s\na,0,1,1\n",
        b"job,submit_s,gpus,work_s\r\na,0,1,1\r\n",
        b"job, submit_s, gpus, work_s\na,0,1,1\n",
        b"\njob,submit_s,gpus,work_s\n\na,0,1,1\n  \n\n",
        b'"job","submit_s","gpus","work_s"\n"a","0","1","1"\n',
    ],
    ids=["byte order mark", "CRLF", "spaces in the header", "blank lines", "quotes"],
)
def test_forms_of_csv_that_mean_the_same(write_file: WriteFile, content: bytes) -> None:
    trace = read_trace(write_file(content))

    assert jobs(trace) == [(0.0, job("a", 1, 1.0))]
    assert trace.notes == {}


def test_a_last_line_without_end_is_read_and_noted(write_file: WriteFile) -> None:
    trace = read_trace(write_file(b"job,submit_s,gpus,work_s\na,0,1,1"))

    assert jobs(trace) == [(0.0, job("a", 1, 1.0))]
    assert trace.notes == {MAYBE_CUT: 1}


def test_a_column_that_nobody_knows_is_noted(write_file: WriteFile) -> None:
    trace = read_trace(write_file("job,submit_s,gpus,work_s,wieght", "a,0,1,1,5"))

    assert trace.notes == {"column 'wieght' is not used": 1}


def test_many_rows_are_read_alike_fast_and_with_care(write_file: WriteFile) -> None:
    rows = [
        f"j{place},{place % 77},{1 + place % 3},{place / 7},m{place % 5},8,{1 + place % 4},u" for place in range(9000)
    ]
    header = "job,submit_s,gpus,work_s,model,batch,weight,user"
    fast = read_trace(write_file(header, *rows, name="fast.csv"))

    # A blank line makes the careful reader take a block.
    spread = [line for row in rows for line in (row, "")]
    careful = read_trace(write_file(header, *spread, name="careful.csv"))

    assert len(fast) == 9000
    assert jobs(careful) == jobs(fast)


def test_the_philly_trace(shared_data: Path) -> None:
    trace = read_trace(shared_data / "traces" / "philly.csv")

    assert (len(trace), trace.format, trace.dropped, trace.notes) == (82_247, "philly", {}, {})
    assert sum(arrival.spec.devices for arrival in trace.arrivals) == 107_235


def test_the_dense_philly_trace(shared_data: Path) -> None:
    trace = read_trace(shared_data / "traces" / "philly_dense20k.csv")

    assert (len(trace), trace.format, trace.dropped) == (20_000, "philly", {})
    assert trace.arrivals[0] == (0.0, job("0", 1, 2533.0, user="6214e9"))
    assert trace.arrivals[-1] == (810_783.0, job("19999", 1, 2325.0, user="6214e9"))


def test_the_gavel_traces(shared_data: Path) -> None:
    trace = read_trace(shared_data / "gavel" / "max_min_fairness.trace")

    assert (len(trace), trace.format, trace.arrivals[-1].submit_s) == (96, "gavel", 46_317.0)
    assert sum(arrival.submit_s == 0 for arrival in trace.arrivals) == 36
    assert len(read_trace(shared_data / "gavel" / "gen1000_l360_m_s0.trace")) == 1000


def test_the_pollux_workload(shared_data: Path) -> None:
    trace = read_trace(shared_data / "pollux" / "workloads" / "workload-6.csv")

    assert (len(trace), trace.format) == (160, "pollux")
    assert {arrival.spec.model for arrival in trace.arrivals} == {
        "bert",
        "cifar10",
        "deepspeech2",
        "imagenet",
        "ncf",
        "yolov3",
    }


@pytest.mark.parametrize("name", sorted(set(FIRST_LINES) - {"gavel"}))
def test_cells_between_semicolons_are_detected(name: str, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(FIRST_LINES[name].replace(",", ";") + "\n")
    assert detect(tmp_path / "trace.csv") == name


def test_a_trace_between_semicolons_is_the_one_between_commas(tmp_path: Path) -> None:
    text = 'job,submit_s,gpus,work_s\n"a",1.5,2,30\nb,2,1,4\n'
    (tmp_path / "commas.csv").write_text(text)
    (tmp_path / "semicolons.csv").write_text(text.replace(",", ";"))
    assert read_trace(tmp_path / "semicolons.csv").arrivals == read_trace(tmp_path / "commas.csv").arrivals
