"""SenseTime's Helios clusters: `cluster_log.csv` of S-Lab-System-Group/HeliosData."""

from __future__ import annotations

from carpool.sim.traces.cells import NO_END, NO_GPU, Cells, Unusable
from carpool.sim.traces.format import Format, TraceRow


def _row(row: Cells) -> TraceRow:
    """Read one row; more than half of the log are CPU jobs, which no GPU scheduler sees.

    Jobs that failed or were cancelled held their GPUs all the same, so every final state is kept.
    """
    gpus = row.whole("gpu_num")
    if gpus == 0:
        raise Unusable(NO_GPU)
    if row.is_empty("end_time") or row.is_empty("duration"):
        raise Unusable(NO_END)
    return TraceRow(row.stamp("submit_time"), row.name("job_id"), gpus, row.number("duration"), user=row.text("user"))


HELIOS = Format(
    "helios",
    ("job_id", "user", "gpu_num", "state", "submit_time", "end_time", "duration"),
    _row,
    ignored=("vc", "jobname", "cpu_num", "node_num", "start_time", "queue"),
    from_earliest=True,
)
