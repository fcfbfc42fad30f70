"""Job transfer: brings a job's code and checkpoints to another machine, and its log and checkpoints back."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from carpool.core.model import JobId
from carpool.jobs.code_archive import MAX_BYTES, CodeArchive, absolute_paths, pack
from carpool.jobs.program import Program
from carpool.jobs.untrusted_file import open_new_untrusted, open_untrusted, read_untrusted
from carpool.runtime.executor.job_folder import JobFolder
from carpool.runtime.remote.remote_link import FileChanged, RemoteFiles, Status

_LOG = "log"
_LOG_END = ".log.fetched"  # bytes of the member's log that were fetched, for the next daemon
_MAX_DIGITS = 20
_CHECKPOINTS = "checkpoints"
_STATE = re.compile(rf"{_CHECKPOINTS}/(step|mirror)-(\d+)\.ckpt")
_REST_SHARE = 9.0  # pause before the next mirror, in multiples of the time that one took: gradients need the links, too


class CodeArchives:
    """Archives of the jobs' folders, packed once for all jobs of a folder."""

    def __init__(self, state: Path, max_bytes: int = MAX_BYTES) -> None:
        self._state = state
        self._max_bytes = max_bytes
        self._packing: dict[str, asyncio.Task[CodeArchive]] = {}

    async def of(self, folder: str) -> CodeArchive:
        """The archive of a folder as it was when its first job started; InputError if it is too large."""
        if folder not in self._packing:
            pack_folder = asyncio.to_thread(pack, Path(folder), max_bytes=self._max_bytes, exclude=[self._state])
            self._packing[folder] = asyncio.create_task(pack_folder)
        return await asyncio.shield(self._packing[folder])


class JobTransfer:
    """Files of the jobs between this machine's state folder and one member."""

    def __init__(
        self,
        state: Path,
        files: RemoteFiles,
        codes: CodeArchives,
        *,
        continues: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._continues = continues  # continue fetches that an earlier daemon began
        self._files = files
        self._codes = codes
        self._clock = clock
        self._mirrors_from: dict[JobId, float] = {}  # when the next mirror of a job may be fetched
        self._seen: dict[tuple[JobId, str], Status] = {}  # what was fetched
        self._log_ends: dict[JobId, int] = {}  # bytes of each log that were fetched
        self._fetching: dict[JobId, asyncio.Lock] = {}

    async def bring(self, job: JobId, program: Program, *, resume: bool) -> Program:
        """Send code, and checkpoints to resume from. Returns the program as it runs there.

        InputError if it cannot run there.
        """
        await self.check_paths(job, program)
        folder = ""
        if program.folder:
            code = await self._codes.of(program.folder)
            await self._files.put_code(code.digest, code.content)
            folder = await self._files.unpack(job, code.digest, code.links)
        await self._send_checkpoints(job, resume=resume)
        return replace(program, folder=folder)

    async def check_paths(self, job: JobId, program: Program) -> None:
        """InputError if a path that the job names, or that its folder links to outside, is on this machine only."""
        values = [*program.args.values(), *program.command, *program.environment.values(), program.python]
        links = (await self._codes.of(program.folder)).links if program.folder else {}
        await self._files.require_paths(job, [*absolute_paths(values), *links.values()])

    async def _send_checkpoints(self, job: JobId, *, resume: bool) -> None:
        """Replace the member's files of a job with those of this machine: checkpoints of an earlier stay are stale."""
        await self._files.renew(job)
        folder = JobFolder(self._state, job).path
        self._forget_log(job)
        for path in _resumable(folder) if resume else ():
            await self._files.write(job, path.relative_to(folder).as_posix(), path)

    async def fetch(self, job: JobId) -> None:
        """Fetch the new files of a job: the end of its log, and complete files.

        One call per job at a time; files that the job replaces meanwhile are left to the next call.
        """
        async with self._fetching.setdefault(job, asyncio.Lock()):
            folder = JobFolder(self._state, job).path
            there = await self._files.list_files(job)
            skipped = self._unwanted_mirrors(job, there)
            for name, status in sorted(there.items()):
                if name in skipped:
                    continue
                if name == _LOG:
                    await self._fetch_log(job, folder / name, status[0])
                elif self._seen.get((job, name)) != status and await self._fetch_file(job, name, folder / name, status):
                    self._seen[job, name] = status
            _drop_older(folder, there)

    async def _fetch_log(self, job: JobId, path: Path, size: int) -> None:
        """Append the bytes that the log has gained, also during this call; each byte once."""
        end_file = path.with_name(_LOG_END)
        if job not in self._log_ends:
            self._log_ends[job] = _read_number(end_file) if self._continues else 0
        start = self._log_ends[job] if self._log_ends[job] <= size else 0
        if start == size:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_untrusted(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab", buffering=0) as file:
            async for chunk in self._files.read(job, _LOG, start):
                file.write(chunk)
                start += len(chunk)
                self._log_ends[job] = start
        with os.fdopen(open_new_untrusted(end_file), "w", encoding="ascii") as file:
            file.write(str(start))

    def _unwanted_mirrors(self, job: JobId, there: Iterable[str]) -> set[str]:
        """Copies of mirrors that need not be fetched: those older than a checkpoint, or all soon after the last one."""
        saved, is_early = _newest(there, "step"), self._clock() < self._mirrors_from.get(job, 0.0)
        return {name for name, (kind, step) in _states(there) if kind == "mirror" and (is_early or step <= saved)}

    async def _fetch_file(self, job: JobId, name: str, path: Path, status: Status) -> bool:
        """Fetch a file whole; False if the job has replaced or deleted it meanwhile."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft, began = path.with_name(f".{path.name}.part"), self._clock()
        try:
            with os.fdopen(open_new_untrusted(draft), "wb") as file:
                async for chunk in self._files.read(job, name, status=status):
                    file.write(chunk)
        except FileChanged:
            draft.unlink(missing_ok=True)
            return False
        draft.replace(path)
        if path.name.startswith("mirror-"):
            self._mirrors_from[job] = self._clock() + (self._clock() - began) * _REST_SHARE
        return True

    async def drop(self, job: JobId) -> None:
        """Delete a job's files on the member, after all were fetched."""
        async with self._fetching.setdefault(job, asyncio.Lock()):
            await self._files.drop(job)
            self._seen = {key: status for key, status in self._seen.items() if key[0] != job}
            self._forget_log(job)
        self._fetching.pop(job, None)

    def _forget_log(self, job: JobId) -> None:
        """The member begins a new log."""
        self._log_ends[job] = 0
        JobFolder(self._state, job).path.joinpath(_LOG_END).unlink(missing_ok=True)

    def close(self) -> None:
        self._files.close()


def _read_number(path: Path) -> int:
    try:
        return int(read_untrusted(path, _MAX_DIGITS))
    except (OSError, ValueError):
        return 0


def _resumable(folder: Path) -> list[Path]:
    """The files that a job needs to resume."""
    records = [folder / "cuts.jsonl", folder / "splits.jsonl"]
    found = [*records, *sorted((folder / _CHECKPOINTS).glob("[bms]*.ckpt"))]
    return [path for path in found if path.is_file() and not path.is_symlink()]


def _drop_older(folder: Path, there: Mapping[str, object]) -> None:
    """Delete checkpoints that the member has replaced by newer ones, and mirrors that newer states replace."""
    here = [path.relative_to(folder).as_posix() for path in (folder / _CHECKPOINTS).glob("*.ckpt")]
    saved, mirrored = _newest(here, "step"), _newest(here, "mirror")
    for name, (kind, step) in _states(here):
        is_replaced = kind == "step" and name not in there and step < _newest(there, "step")
        if is_replaced or (kind == "mirror" and (step <= saved or step < mirrored)):
            (folder / name).unlink(missing_ok=True)


def _states(names: Iterable[str]) -> list[tuple[str, tuple[str, int]]]:
    """Kind and step of the checkpoints and copies of mirrors among files."""
    return [(name, (match[1], int(match[2]))) for name in names if (match := _STATE.fullmatch(name))]


def _newest(names: Iterable[str], kind: str) -> int:
    """The step of the newest state of a kind; -1 if there is none."""
    return max((step for _, (each, step) in _states(names) if each == kind), default=-1)
