"""Job files: writes each job's metrics, TensorBoard events, story and outcome.

A TensorBoard file is a sequence of records: length (8 bytes, little-endian), its masked CRC, data, masked CRC. The data
is a protocol-buffer ``Event``: 1 wall_time (double), 2 step (int64), 3 file_version (string), 5 summary; a summary
holds values (1) of tag (1, string) and simple_value (2, float).
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from pathlib import Path
from time import time

from carpool.backends.run_folder import RunFolder
from carpool.core.messages import ProgressReported, Record
from carpool.core.model import JobId
from carpool.jobs.untrusted_file import append_untrusted
from carpool.runtime.executor.reports import Evaluation, Outcome, Report, Told

_POLYNOMIAL = 0x82F63B78  # CRC-32C, reversed
_MASK = 0xA282EAD8


class EventFile:
    """A TensorBoard event file of one job."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time) -> None:
        self._clock = clock
        self._path = folder / f"events.out.tfevents.{clock():.6f}.carpool"
        self._append(_field(3, b"brain.Event:2"))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        tagged = [_field(1, tag.encode("utf-8", "replace")) + b"\x15" + _float(value) for tag, value in values.items()]
        summary = b"".join(_field(1, value) for value in tagged)
        self._append(b"\x10" + _varint(step) + _field(5, summary))

    def _append(self, event: bytes) -> None:
        data = b"\x09" + struct.pack("<d", self._clock()) + event
        length = struct.pack("<Q", len(data))
        append_untrusted(self._path, length + _masked(length) + data + _masked(data))


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _float(value: float) -> bytes:
    """A number in four bytes; one that is too large becomes infinite."""
    try:
        return struct.pack("<f", value)
    except (OverflowError, struct.error):  # struct.error: an integer too large for a float
        return struct.pack("<f", inf if value > 0 else -inf)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    """The CRC-32C (Castagnoli) checksum."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ _POLYNOMIAL if byte & 1 else byte >> 1
        table.append(byte)
    return table


_TABLE = _table()


class JobFileWriter:
    """Follows records and reports, and writes them to files in the jobs' folders.

    `cut` returns the writing of what came so far, to be run after the commit: these files are never ahead of the
    journal. What cannot be written is skipped.
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
