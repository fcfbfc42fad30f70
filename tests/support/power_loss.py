"""Power loss: makes from the files of a store what a disk may hold afterwards, and checks what opening it finds.

A `SnapshotCommit` copies the store's files after each commit: their content was synced. What the next copy has beyond
them was being written. A `Damage` combines two such copies into damaged files, and `examine` opens these.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

from carpool.core.journal import Header
from carpool.core.messages import JobSubmitted
from carpool.core.model import JobId
from carpool.service.store.accept_log import read_log
from carpool.service.store.store import DATABASE, LOG, Store, parse_entry

WAL = f"{DATABASE}-wal"
FILES = (LOG, DATABASE, WAL)
_BLOCK = 4096  # bytes that a disk writes whole, or not

Files = Mapping[str, bytes]


class StoreSnapshot(NamedTuple):
    """The files of a store after a commit, and the jobs that each record submits."""

    files: Files
    accepted: Mapping[int, tuple[JobId, ...]]

    @property
    def jobs(self) -> frozenset[JobId]:
        """Every job that may have been acknowledged."""
        return frozenset(job for jobs in self.accepted.values() for job in jobs)


class SnapshotCommit:
    """Runs commits and copies the files after each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.pictures: list[StoreSnapshot] = []

    async def commit(self, work: Callable[[], None]) -> None:
        """Run a commit, then copy the files."""
        await asyncio.to_thread(work)
        files = {name: (self._folder / name).read_bytes() for name in FILES if (self._folder / name).exists()}
        self.pictures.append(StoreSnapshot(files, _accepted(files[LOG])))

    def pairs(self) -> list[tuple[StoreSnapshot, StoreSnapshot]]:
        """Successive copies between which files only grew."""
        found = zip(self.pictures, self.pictures[1:], strict=False)
        return [(now, then) for now, then in found if _has_grown(now.files, then.files)]


def _accepted(log: bytes) -> dict[int, tuple[JobId, ...]]:
    entries = [parse_entry(line) for number, line in read_log(log).lines.items() if number]
    return {
        entry.number: tuple(fact.spec.id for fact in entry.record.facts if isinstance(fact, JobSubmitted))
        for entry in entries
    }


def _has_grown(now: Files, then: Files) -> bool:
    return all(then[name].startswith(now[name]) for name in (LOG, WAL)) and now[DATABASE] == then[DATABASE]


# ------------------------------------------------------------------------------------------------------------ damage
@dataclass(frozen=True, slots=True)
class Damage:
    """One way in which files come out of a power loss; `may_lose`: only then may a record be gone, and is named."""

    name: str
    harm: Callable[[Random, StoreSnapshot, StoreSnapshot], dict[str, bytes]]
    may_lose: bool = False


def _cut_behind(chance: Random, now: StoreSnapshot, then: StoreSnapshot) -> dict[str, bytes]:
    return {name: then.files[name][: _behind(chance, now, then, name)] for name in FILES}


def _flip_behind(chance: Random, now: StoreSnapshot, then: StoreSnapshot) -> dict[str, bytes]:
    return {name: _flipped(chance, then.files[name], len(now.files[name]), 8) for name in FILES}


def _zero_behind(chance: Random, now: StoreSnapshot, then: StoreSnapshot) -> dict[str, bytes]:
    """Files that have their new length, but not all of what belongs there."""
    harmed = {}
    for name in FILES:
        whole, kept = then.files[name], _behind(chance, now, then, name)
        harmed[name] = whole[:kept] + bytes(len(whole) - kept)
    return harmed


def _flip_one(chance: Random, now: StoreSnapshot, then: StoreSnapshot) -> dict[str, bytes]:
    name = chance.choice(FILES)
    return {**now.files, name: _flipped(chance, now.files[name], 0, 8)}


def _blank_one(chance: Random, now: StoreSnapshot, then: StoreSnapshot) -> dict[str, bytes]:
    """A block of one file that reads as zeros."""
    name = chance.choice(FILES)
    content = bytearray(now.files[name])
    begin = chance.randrange(max(1, len(content))) // _BLOCK * _BLOCK
    content[begin : begin + _BLOCK] = bytes(len(content[begin : begin + _BLOCK]))
    return {**now.files, name: bytes(content)}


def _cut_one(chance: Random, now: StoreSnapshot, then: StoreSnapshot) -> dict[str, bytes]:
    name = chance.choice(FILES)
    return {**now.files, name: now.files[name][: chance.randrange(len(now.files[name]) + 1)]}


def _flip_all(chance: Random, now: StoreSnapshot, then: StoreSnapshot) -> dict[str, bytes]:
    return {name: _flipped(chance, content, 0, 8) for name, content in now.files.items()}


def strike(chance: Random, picture: StoreSnapshot, number: int, bits: int) -> dict[str, bytes]:
    """Flip the same bits of one record in every copy there is."""
    body = read_log(picture.files[LOG]).lines[number].body.encode("ascii")
    struck = bytearray(body)
    for place in chance.sample(range(8 * len(body)), bits):
        struck[place // 8] ^= 1 << place % 8
    return {name: content.replace(body, bytes(struck)) for name, content in picture.files.items()}


def _strike_one(chance: Random, now: StoreSnapshot, then: StoreSnapshot) -> dict[str, bytes]:
    return strike(chance, now, chance.choice(_submitting(now)), 1)


def _strike_several(chance: Random, now: StoreSnapshot, then: StoreSnapshot) -> dict[str, bytes]:
    """Of a record that is not the newest: the line behind it has the names of its jobs."""
    older = [number for number in _submitting(now) if number + 1 in now.accepted]
    return strike(chance, now, chance.choice(older), chance.randint(2, 8)) if older else dict(now.files)


def _submitting(picture: StoreSnapshot) -> list[int]:
    return [number for number, jobs in picture.accepted.items() if jobs]


DAMAGES: Sequence[Damage] = (
    Damage("cut off behind the last sync", _cut_behind),
    Damage("bits flipped behind the last sync", _flip_behind),
    Damage("zeros behind the last sync", _zero_behind),
    Damage("bits flipped in one file", _flip_one),
    Damage("a block of one file is zeros", _blank_one),
    Damage("one file cut anywhere", _cut_one),
    Damage("one bit of a record, in all files", _strike_one, may_lose=True),
    Damage("more bits of it, in all files", _strike_several, may_lose=True),
    Damage("bits flipped in all files", _flip_all, may_lose=True),
)


def _behind(chance: Random, now: StoreSnapshot, then: StoreSnapshot, name: str) -> int:
    return chance.randint(len(now.files[name]), len(then.files[name]))


def _flipped(chance: Random, content: bytes, first: int, most: int) -> bytes:
    """Up to so many bits flipped, from a place on."""
    harmed = bytearray(content)
    if len(content) > first:
        for _ in range(chance.randint(1, most)):
            harmed[chance.randrange(first, len(content))] ^= 1 << chance.randrange(8)
    return bytes(harmed)


# ----------------------------------------------------------------------------------------------------------- looking
class Verdict(NamedTuple):
    """What became of what was synced."""

    kept: int  # records
    named: int  # records that are lost and said to be
    unnamed_jobs: frozenset[JobId]  # accepted, gone, and not among the names that were told
    silent: tuple[int, ...]  # records that are gone and of which nothing was said
    invented: frozenset[JobId]  # there, though nobody ever submitted them
    told: tuple[str, ...]  # by the store when it was opened
    told_again: tuple[str, ...]  # by the next opening, of what was put right: nothing, if it is right on the disk

    def is_fine(self, damage: Damage) -> bool:
        """Whether nothing was lost in silence, and nothing at all that this damage cannot take."""
        is_whole = damage.may_lose or not self.named
        return is_whole and not self.silent and not self.unnamed_jobs and not self.invented and not self.told_again


def lay_out(files: Files, folder: Path) -> Path:
    """A folder with these files, and an index of shared memory that means nothing any more."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / f"{DATABASE}-shm").write_bytes(b"\xa5" * 32768)
    return folder


def examine(folder: Path, header: Header, before: StoreSnapshot, then: StoreSnapshot) -> Verdict:
    """Open a store after a power loss, and once more."""
    with closing(Store.open(folder, header)) as store:
        there = {entry.number: entry for entry in store.entries()}
        lost = dict(store.findings.lost)
        told = store.findings.messages()
    with closing(Store.open(folder, header)) as again:
        told_again = again.findings._replace(lost=()).messages()  # what is lost stays so, and is said at every start
    gone = [number for number in before.accepted if number not in there]
    names = {job for jobs in lost.values() for job in jobs}
    jobs = {fact.spec.id for entry in there.values() for fact in entry.record.facts if isinstance(fact, JobSubmitted)}
    return Verdict(
        len(before.accepted) - len(gone),
        len([number for number in gone if number in lost]),
        frozenset(job for number in gone for job in before.accepted[number] if job not in names),
        tuple(number for number in gone if number not in lost),
        frozenset(jobs - then.jobs),
        told,
        told_again,
    )
