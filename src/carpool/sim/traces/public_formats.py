"""Public trace formats: Alibaba PAI 2020 and 2023 pods, Gavel, Helios, Philly and Pollux.

Jobs of the two Alibaba formats can request a fraction of a GPU. It is rounded up to whole devices, and the trace's
notes say how often.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

from carpool.core.model import Kind
from carpool.sim.traces import cells
from carpool.sim.traces.cells import NO_END, NO_GPU, NOT_STARTED, BadCell, Cells, UnusableRow
from carpool.sim.traces.format import Columns, RowBlock, TraceFormat, TraceRow, names, numbers, row_ids, shared, stamps
from carpool.sim.traces.trace import WorkUnit

_STATES = frozenset({"Terminated", "Failed", "Running", "Waiting"})


def _task_row(row: Cells) -> TraceRow:
    """Read one task of a job: `plan_gpu` is in percent of a GPU for each of `inst_num` instances.

    The table has no time of submission; a task's start stands in for it.
    """
    gpus = 0.0 if row.is_empty("plan_gpu") else row.number("plan_gpu") / 100
    if gpus == 0:
        raise UnusableRow(NO_GPU)
    if row.is_empty("start_time"):
        raise UnusableRow(NOT_STARTED)
    if row.is_empty("end_time") or row.text("status") in ("Running", "Waiting"):
        raise UnusableRow(NO_END)
    start_s = row.number("start_time")
    num_instances = 1 if row.is_empty("inst_num") else row.count("inst_num")
    job, task = row.name("job_name"), row.name("task_name")
    return TraceRow(start_s, job, gpus * num_instances, _between(row, start_s, "end_time"), part=task)


def _between(row: Cells, start_s: float, column: str) -> float:
    end_s = row.number(column)
    if end_s < start_s:
        raise BadCell(column, row.text(column), "is before the start")
    return end_s - start_s


def _join_tasks(rows: Iterable[TraceRow]) -> list[TraceRow]:
    """One row per job: its tasks hold GPUs together, from the first start to the last end."""
    jobs: dict[str, TraceRow] = {}
    for row in rows:
        other = jobs.get(row.id)
        if other is not None:
            start_s = min(row.submit_s, other.submit_s)
            end_s = max(row.submit_s + (row.work or 0.0), other.submit_s + (other.work or 0.0))
            row = other._replace(submit_s=start_s, gpus=row.gpus + other.gpus, work=end_s - start_s)
        jobs[row.id] = row
    return list(jobs.values())


def _is_task(first: Sequence[str]) -> bool:
    """Whether this is a row of the task table, whose header is in a separate file."""
    return len(first) == len(PAI_TASKS.columns) and first[3] in _STATES


def _job_row(row: Cells) -> TraceRow:
    """Read one job of the simulator's CSV: `num_gpu` GPUs (or a part of one) for each of `num_inst` instances."""
    gpus = 0.0 if row.is_empty("num_gpu") else row.number("num_gpu")
    if gpus == 0:
        raise UnusableRow(NO_GPU)
    if row.is_empty("duration"):
        raise UnusableRow(NO_END)
    num_instances = 1 if row.is_empty("num_inst") else row.count("num_inst")
    work_s = row.number("duration")
    return TraceRow(row.number("submit_time"), row.name("job_id"), gpus * num_instances, work_s, user=row.text("user"))


def _pod_row(row: Cells) -> TraceRow:
    """Read one pod: `num_gpu` GPUs, or `gpu_milli` thousandths of one, of the types in `gpu_spec`."""
    gpus = row.whole("num_gpu")
    if gpus == 0:
        raise UnusableRow(NO_GPU)
    if row.is_empty("scheduled_time"):
        raise UnusableRow(NOT_STARTED)
    if row.is_empty("deletion_time"):
        raise UnusableRow(NO_END)
    share = row.positive("gpu_milli") / 1000
    work_s = _between(row, row.number("scheduled_time"), "deletion_time")
    kinds = tuple([Kind(kind) for kind in row.text("gpu_spec").split("|") if kind])
    return TraceRow(row.number("creation_time"), row.name("name"), gpus * min(share, 1.0), work_s, kinds=kinds)


PAI_TASKS = TraceFormat(
    "alibaba-2020",
    (
        "job_name", "task_name", "inst_num", "status", "start_time", "end_time",
        "plan_cpu", "plan_mem", "plan_gpu", "gpu_type",
    ),
    _task_row,
    headerless=_is_task,
    regroup=_join_tasks,
    from_earliest=True,
)  # fmt: skip
PAI_JOBS = TraceFormat(
    "alibaba-2020",
    ("job_id", "num_inst", "submit_time", "num_gpu", "duration"),
    _job_row,
    ("user",),
    (
        "num_cpu", "gpu_type", "group", "wait_time", "user_dur", "user_gpu_dur", "group_dur", "group_gpu_dur",
        "model_name", "iterations", "interval",
    ),
    from_earliest=True,
)  # fmt: skip
PODS_2023 = TraceFormat(
    "alibaba-2023",
    ("name", "num_gpu", "gpu_milli", "creation_time", "deletion_time", "scheduled_time"),
    _pod_row,
    ("gpu_spec",),
    ("cpu_milli", "memory_mib", "qos", "pod_phase"),
)


GAVEL_COLUMNS = (
    "job type", "command", "working dir", "step flag", "needs data dir", "total steps", "scale factor",
    "priority weight", "SLO", "arrival s",
)  # fmt: skip


def _gavel_row(row: Cells) -> TraceRow:
    """Read one row; the job type with its batch size is the model in Gavel's throughput table."""
    return TraceRow(
        submit_s=row.number("arrival s"),
        id=str(row.index),
        gpus=row.count("scale factor"),
        work=row.number("total steps"),
        model=row.name("job type"),
        weight=row.positive("priority weight"),
    )


GAVEL = TraceFormat(
    "gavel",
    GAVEL_COLUMNS,
    _gavel_row,
    delimiter="\t",
    has_own_ids=False,
    headerless=lambda first: len(first) == len(GAVEL_COLUMNS),
    work_unit=WorkUnit.STEPS,
)


def _helios_row(row: Cells) -> TraceRow:
    """Read one row; more than half of the log are CPU jobs, which a GPU scheduler never receives.

    Jobs that failed or were cancelled held GPUs, too, so every final state is kept.
    """
    gpus = row.whole("gpu_num")
    if gpus == 0:
        raise UnusableRow(NO_GPU)
    if row.is_empty("end_time") or row.is_empty("duration"):
        raise UnusableRow(NO_END)
    return TraceRow(row.stamp("submit_time"), row.name("job_id"), gpus, row.number("duration"), user=row.text("user"))


HELIOS = TraceFormat(
    "helios",
    ("job_id", "user", "gpu_num", "state", "submit_time", "end_time", "duration"),
    _helios_row,
    ignored=("vc", "jobname", "cpu_num", "node_num", "start_time", "queue"),
    from_earliest=True,
)


# The column `cluster` is Philly's virtual cluster, the tenant in whose queue a job waited: it becomes the job's user.


def _dated_row(row: Cells) -> TraceRow:
    return _philly_row(row, row.stamp("timestamp"), str(row.index))


def _timed_row(row: Cells) -> TraceRow:
    return _philly_row(row, row.number("submit_time"), row.name("job_id"))


def _philly_row(row: Cells, submit_s: float, job: str) -> TraceRow:
    gpus = row.whole("num_gpus")
    if gpus == 0:
        raise UnusableRow(NO_GPU)
    if row.is_empty("duration"):
        raise UnusableRow(NO_END)
    return TraceRow(submit_s, job, gpus, row.number("duration"), user=row.text("cluster"))


def _dated_block(columns: Columns, start: int) -> RowBlock:
    texts = columns["timestamp"]
    return _philly_block(columns, stamps(texts), row_ids(start, len(texts)))


def _timed_block(columns: Columns, start: int) -> RowBlock:
    return _philly_block(columns, numbers(columns["submit_time"]), columns["job_id"])


def _philly_block(columns: Columns, submits: Sequence[float], ids: Sequence[str]) -> RowBlock:
    """Read clean rows of both headers; a row without GPUs needs the row-by-row reader."""
    gpus = shared(columns["num_gpus"], "num_gpus", cells.count)
    works = numbers(columns["duration"])
    users = names(columns["cluster"]) if "cluster" in columns else repeat("")
    return RowBlock(submits, ids, gpus, works, (repeat(""), repeat(0), repeat(1.0), users))


PHILLY_DATED = TraceFormat(
    "philly",
    ("timestamp", "duration", "num_gpus"),
    _dated_row,
    ("cluster",),
    ("gpu_time",),
    block=_dated_block,
    has_own_ids=False,
    from_earliest=True,
)
PHILLY_TIMED = TraceFormat(
    "philly",
    ("job_id", "submit_time", "num_gpus", "duration"),
    _timed_row,
    ("cluster",),
    ("gpu_time",),
    block=_timed_block,
)


def _pollux_row(row: Cells) -> TraceRow:
    return TraceRow(
        submit_s=row.number("time"),
        id=row.name("name"),
        gpus=row.count("num_replicas"),
        work=None,
        model=row.name("application"),
        batch=row.count("batch_size"),
    )


POLLUX = TraceFormat(
    "pollux", ("name", "time", "application", "num_replicas", "batch_size"), _pollux_row, work_unit=WorkUnit.UNKNOWN
)
