"""Alibaba's GPU traces: PAI 2020 (the task table, or the csv of its simulator) and the 2023 pod lists.

Both let a job ask for a fraction of a GPU. Our traces count whole devices, so the fraction is rounded up, and the
trace's notes say how often.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from carpool.core.model import Kind
from carpool.sim.traces.cells import NO_END, NO_GPU, NOT_STARTED, BadCell, Cells, Unusable
from carpool.sim.traces.format import Format, TraceRow

_STATES = frozenset({"Terminated", "Failed", "Running", "Waiting"})


def _task_row(row: Cells) -> TraceRow:
    """Read one task of a job: `plan_gpu` is in percent of a GPU for each of `inst_num` instances.

    The table has no time of submission; a task's start stands in for it.
    """
    gpus = 0.0 if row.is_empty("plan_gpu") else row.number("plan_gpu") / 100
    if gpus == 0:
        raise Unusable(NO_GPU)
    if row.is_empty("start_time"):
        raise Unusable(NOT_STARTED)
    if row.is_empty("end_time") or row.text("status") in ("Running", "Waiting"):
        raise Unusable(NO_END)
    start_s = row.number("start_time")
    num_instances = 1 if row.is_empty("inst_num") else row.count("inst_num")
    job, task = row.name("job_name"), row.name("task_name")
    return TraceRow(start_s, job, gpus * num_instances, _between(row, start_s, "end_time"), part=task)


def _between(row: Cells, start_s: float, column: str) -> float:
    """Seconds from a start to the end in `column`."""
    end_s = row.number(column)
    if end_s < start_s:
        raise BadCell(column, row.text(column), "is before the start")
    return end_s - start_s


def _join_tasks(rows: Iterable[TraceRow]) -> list[TraceRow]:
    """One row per job: its tasks (workers, evaluators …) hold GPUs together, from the first start to the last end."""
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
    """Whether this is a row of the task table, whose header is published as a separate file."""
    return len(first) == len(PAI_TASKS.columns) and first[3] in _STATES


def _job_row(row: Cells) -> TraceRow:
    """Read one job of the simulator's csv: `num_gpu` GPUs (or a part of one) for each of `num_inst` instances."""
    gpus = 0.0 if row.is_empty("num_gpu") else row.number("num_gpu")
    if gpus == 0:
        raise Unusable(NO_GPU)
    if row.is_empty("duration"):
        raise Unusable(NO_END)
    num_instances = 1 if row.is_empty("num_inst") else row.count("num_inst")
    work_s = row.number("duration")
    return TraceRow(row.number("submit_time"), row.name("job_id"), gpus * num_instances, work_s, user=row.text("user"))


def _pod_row(row: Cells) -> TraceRow:
    """Read one pod: `num_gpu` GPUs, or `gpu_milli` thousandths of one, of the kinds `gpu_spec` allows."""
    gpus = row.whole("num_gpu")
    if gpus == 0:
        raise Unusable(NO_GPU)
    if row.is_empty("scheduled_time"):
        raise Unusable(NOT_STARTED)
    if row.is_empty("deletion_time"):
        raise Unusable(NO_END)
    share = row.positive("gpu_milli") / 1000
    work_s = _between(row, row.number("scheduled_time"), "deletion_time")
    kinds = tuple([Kind(kind) for kind in row.text("gpu_spec").split("|") if kind])
    return TraceRow(row.number("creation_time"), row.name("name"), gpus * min(share, 1.0), work_s, kinds=kinds)


PAI_TASKS = Format(
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
PAI_JOBS = Format(
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
PODS_2023 = Format(
    "alibaba-2023",
    ("name", "num_gpu", "gpu_milli", "creation_time", "deletion_time", "scheduled_time"),
    _pod_row,
    ("gpu_spec",),
    ("cpu_milli", "memory_mib", "qos", "pod_phase"),
)
