"""What opening a store found: what was put right, and by name what could not be."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from carpool.core.model import JobId
from carpool.service.accept_log import Line, Reading

_NAME = re.compile(rb'"JobSubmitted","spec":\{"id":"([^"]*)"')


class Lost(NamedTuple):
    """A record that neither copy has any more; the jobs that were submitted in it, as far as they can be told."""

    number: int
    jobs: tuple[JobId, ...]


class Findings(NamedTuple):
    """What was found amiss when a store was opened, and what was done about it."""

    from_log: tuple[int, ...] = ()  # records the database had lost
    from_database: tuple[int, ...] = ()  # records the log had lost
    lost: tuple[Lost, ...] = ()
    set_aside: Path | None = None  # a database that could not be read
    cut: bool = False  # the log ended in the middle of a line, which was never acknowledged
    header_lost: bool = False

    @property
    def is_sound(self) -> bool:
        """Whether nothing that was acknowledged is gone."""
        return not self.lost and not self.header_lost

    def tell(self) -> tuple[str, ...]:
        """Each finding as a sentence; none where all was as it should be."""
        told = []
        if self.set_aside is not None:
            told.append(f"The database could not be read; it was set aside as {self.set_aside.name} and built anew.")
        if self.from_log:
            told.append(f"Records {_runs(self.from_log)} were missing in the database; the log had them.")
        if self.from_database:
            told.append(f"Records {_runs(self.from_database)} were damaged in the log; the database had them.")
        if self.cut:
            told.append("The log ended in the middle of a line; it was never acknowledged and is dropped.")
        if self.header_lost:
            told.append("What the journal is about was lost; the settings of this start take its place.")
        for number, jobs in self.lost:
            names = " and ".join(repr(str(job)) for job in jobs) if jobs else "no job that can be named"
            told.append(f"Record {number} is lost: damaged in the log and in the database. It accepted {names}.")
        return tuple(told)


def find_lost(lines: Mapping[int, Line], first: int, reading: Reading) -> tuple[Lost, ...]:
    """Every record from `first` on that neither copy has, with its jobs: the line after it names them, or its remains.

    `lines` are those of both copies together. Behind the last of them a loss shows only by its remains in the log.
    """
    last = max(lines)
    lost = []
    for number in range(max(1, first), last):
        if number not in lines:
            jobs = accepted_before(lines[number + 1]) if number + 1 in lines else _named(reading, number)
            lost.append(Lost(number, jobs))
    logged = max(reading.lines, default=-1)
    behind = [remains.text for remains in reading.damaged if remains.after == logged]
    for place, text in enumerate(behind[max(0, last - logged) :]):
        lost.append(Lost(last + 1 + place, _names_in(text)))
    return tuple(lost)


def accepted_before(line: Line) -> tuple[JobId, ...]:
    """The jobs that the line before this one accepted."""
    return tuple(map(JobId, json.loads(line.body).get("before", ())))


def _named(reading: Reading, number: int) -> tuple[JobId, ...]:
    """The jobs in what is left of a line, found by where it stands: behind the sound line before it."""
    before = max((sound for sound in reading.lines if sound < number), default=-1)
    texts = [remains.text for remains in reading.damaged if remains.after == before]
    place = number - before - 1
    return _names_in(texts[place]) if place < len(texts) else ()


def _names_in(piece: bytes) -> tuple[JobId, ...]:
    """Names of submitted jobs that can still be read in what is left of a line."""
    return tuple(JobId(name.decode("ascii", "replace")) for name in _NAME.findall(piece))


def _runs(numbers: Sequence[int]) -> str:
    """Ascending numbers as text: 3, 5–9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
