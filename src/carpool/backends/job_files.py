"""Job files: writes each job's metrics, TensorBoard events, story and outcome."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial

from carpool.backends.run_folder import RunFolder
from carpool.core.messages import ProgressReported, Record
from carpool.core.model import JobId
from carpool.runtime.commands.tensorboard import EventFile
from carpool.runtime.executor.reports import Evaluation, Outcome, Report, Told


class JobFileWriter:
    """Follows records and reports, and writes them to files in the jobs' folders.

    `cut` returns a function that writes everything received so far; it is called after the commit, so these files are
    never ahead of the journal. Failed writes are skipped.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._events: dict[JobId, EventFile] = {}
        self._unwritten: list[Callable[[], None]] = []

    def record(self, record: Record) -> None:
        for fact in record.facts:
            if isinstance(fact, ProgressReported):
                row = {"at_s": round(record.at, 3), "step": fact.done, "loss": fact.loss, "steps_per_s": fact.rate}
                self._row(fact.job, "metrics.jsonl", row)
                curves = {"steps_per_s": fact.rate, **({} if fact.loss is None else {"loss": fact.loss})}
                self._curve(fact.job, int(fact.done), curves)

    def take(self, at: float, report: Report) -> None:
        match report:
            case Told(job=job, words=words):
                self._row(job, "story.jsonl", {"at_s": round(at, 3), "what": words})
            case Evaluation(job=job, step=step, metrics=metrics):
                self._row(job, "metrics.jsonl", {"at_s": round(at, 3), "step": step, "metrics": dict(metrics)})
                self._curve(job, step, dict(metrics))
            case Outcome(job=job):
                self._unwritten.append(partial(self._folder.write_outcome, report))
                self._events.pop(job, None)

    def cut(self) -> Callable[[], None]:
        unwritten, self._unwritten = self._unwritten, []

        def write() -> None:
            for each in unwritten:
                with contextlib.suppress(OSError):
                    each()

        return write

    def _row(self, job: JobId, file: str, row: Mapping[str, object]) -> None:
        self._unwritten.append(partial(self._folder.append, job, file, row))

    def _curve(self, job: JobId, step: int, values: dict[str, float]) -> None:
        self._unwritten.append(lambda: self._events_of(job).add(step, values))

    def _events_of(self, job: JobId) -> EventFile:
        if job not in self._events:
            self._events[job] = EventFile(self._folder.job(job))
        return self._events[job]
