"""Files that an agent keeps for jobs: code archives by digest, and the jobs' folders."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Collection, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from carpool.core.errors import InputError
from carpool.jobs.code_archive import unpack
from carpool.jobs.untrusted_file import open_new_untrusted, open_untrusted
from carpool.runtime.executor.job_folder import JobFolder
from carpool.runtime.remote.remote_protocol import CHUNK_BYTES

_DIGEST = re.compile(r"[0-9a-f]{64}")
_CODE = "code"  # archives by digest
_WORK = "work"  # unpacked, one folder per job
# Files that a scheduler fetches.
_SYNCED = re.compile(r"log|cuts\.jsonl|splits\.jsonl|checkpoints/((step|mirror)-\d+|best)\.ckpt")
_LOG = "log"
_RECORDS = ("cuts.jsonl", "splits.jsonl")
_CHECKPOINTS = "checkpoints"


# requests that other hosts of a fleet may send
CODE_REQUESTS = frozenset({"missing", "has_code", "put_code", "unpack"})


class JobCode(NamedTuple):
    """The code archive that a job was unpacked from, and its links out of the folder."""

    digest: str
    archive: Path
    links: dict[str, str]


def code_of(state: Path, job: str) -> JobCode | None:
    """The code of a job in an agent's state folder; None if it has none."""
    return FileService(state).code_of(job)


def work_folder(state: Path, job: str) -> Path:
    """The folder that a job's code is unpacked to."""
    return state / _WORK / JobFolder(state, job).path.name


class FileService:
    """Answers requests for files in an agent's state folder; nothing outside it is read or written."""

    def __init__(self, state: Path, allowed: Collection[str] | None = None) -> None:
        self._state = state
        self._allowed = allowed  # requests; None: all

    def code_of(self, job: str) -> JobCode | None:
        mark = self._mark(job)
        if not mark.is_file():
            return None
        digest, links = mark.read_text(encoding="ascii"), mark.with_suffix(".links")
        return JobCode(digest, self._archive(digest), json.loads(links.read_text("utf-8")) if links.is_file() else {})

    async def answer(self, request: Mapping[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        """The answer to a request; errors of the file system and of the request are part of it."""
        try:
            return await asyncio.to_thread(self._answer, request, payload)
        except OSError as error:
            return {"error": f"{error.strerror or error}: {error.filename or ''}"}, b""
        except InputError as error:
            return {"error": str(error)}, b""
        except (KeyError, TypeError, ValueError) as error:
            return {"error": f"invalid request {request.get('do')!r}: {error!r}"}, b""

    def _answer(self, request: Mapping[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        if self._allowed is not None and request["do"] not in self._allowed:
            raise ValueError("not allowed with the token for peers")
        match request["do"]:
            case "missing":
                return {"missing": [path for path in request["paths"] if not Path(path).exists()]}, b""
            case "has_code":
                return {"has": self._archive(request["digest"]).is_file()}, b""
            case "put_code":
                self._put_code(request["digest"], request["size"], request["start"], payload)
            case "unpack":
                return {"folder": str(self._unpack(request["job"], request["digest"], request["links"]))}, b""
            case "jobs":
                return {"jobs": self._jobs()}, b""
            case "list":
                return {"files": self._list(self._folder(request["job"]))}, b""
            case "read":
                return self._read(self._file(request["job"], request["path"]), request["start"])
            case "write":
                self._write(self._file(request["job"], request["path"]), request["start"], request["size"], payload)
            case "renew":
                self._renew(self._folder(request["job"]))
            case "drop":
                shutil.rmtree(self._folder(request["job"]), ignore_errors=True)
                shutil.rmtree(self._work(request["job"]), ignore_errors=True)
                self._mark(request["job"]).unlink(missing_ok=True)
                self._mark(request["job"]).with_suffix(".links").unlink(missing_ok=True)
            case other:
                raise ValueError(other)
        return {}, b""

    def _archive(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise ValueError(digest)
        return self._state / _CODE / f"{digest}.tar.gz"

    def _folder(self, job: str) -> Path:
        return JobFolder(self._state, job).path

    def _work(self, job: str) -> Path:
        return work_folder(self._state, job)

    def _mark(self, job: str) -> Path:
        """The file that names the archive of a job's code."""
        work = self._work(job)
        return work.with_name(f"{work.name}.digest")

    def _file(self, job: str, path: str) -> Path:
        if not _SYNCED.fullmatch(path):
            raise ValueError(path)
        return self._folder(job) / path

    def _put_code(self, digest: str, size: int, start: int, payload: bytes) -> None:
        path = self._archive(digest)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _append(path, start, size, payload, digest)

    def _write(self, path: Path, start: int, size: int, payload: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _append(path, start, size, payload)

    def _unpack(self, job: str, digest: str, links: Mapping[str, str]) -> Path:
        """Unpack the job's copy of the code; a copy with another digest is replaced."""
        folder = self._work(job)
        mark = self._mark(job)
        if mark.is_file() and mark.read_text(encoding="ascii") == digest and folder.is_dir():
            return folder
        for path, target in links.items():
            if not Path(target).exists():
                raise InputError(f"{path} is a link to {target}, which does not exist there")
        shutil.rmtree(folder, ignore_errors=True)
        unpack(self._archive(digest).read_bytes(), folder)
        for path, target in links.items():
            link = folder / path
            if ".." in Path(path).parts or Path(path).is_absolute():
                raise ValueError(path)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)
        mark.with_suffix(".links").write_text(json.dumps(dict(links)), encoding="utf-8")
        mark.write_text(digest, encoding="ascii")
        return folder

    def _jobs(self) -> list[str]:
        folder = self._state / "jobs"
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def _list(self, folder: Path) -> list[tuple[str, int, int]]:
        found = []
        for path in (*folder.glob("*"), *folder.glob("checkpoints/*")) if folder.is_dir() else ():
            name = path.relative_to(folder).as_posix()
            if _SYNCED.fullmatch(name):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):  # the job can replace it
                    found.append((name, status.st_size, status.st_mtime_ns))
        return found

    def _read(self, path: Path, start: int) -> tuple[dict[str, Any], bytes]:
        """A part of a file, with size and time of change: parts of two versions must not be joined."""
        try:
            with os.fdopen(open_untrusted(path), "rb") as file:
                file.seek(start)
                content, status = file.read(CHUNK_BYTES), os.fstat(file.fileno())
        except FileNotFoundError:
            return {"status": None}, b""
        return {"status": [status.st_size, status.st_mtime_ns]}, content

    def _renew(self, folder: Path) -> None:
        """Give a job that moves to this host a new log and checkpoint folder, without the files of its earlier stay.

        A worker left over from that stay has the old log and folder open and cannot write to the new ones. If its
        folder were deleted before the new one exists, it would create the folder again; so the old one is deleted last.
        """
        for name in (_LOG, *_RECORDS):
            (folder / name).unlink(missing_ok=True)
        checkpoints = folder / _CHECKPOINTS
        if checkpoints.is_dir():
            checkpoints.rename(checkpoints.with_name(f".{_CHECKPOINTS}.{time.time_ns()}"))
        checkpoints.mkdir(parents=True)
        for stale in folder.glob(f".{_CHECKPOINTS}.*"):
            shutil.rmtree(stale, ignore_errors=True)


def _append(path: Path, start: int, size: int, payload: bytes, digest: str = "") -> None:
    """Add a part to a draft, which becomes the file once it is complete and, if given, has the digest."""
    draft = path.with_name(f".{path.name}.part")
    handle = open_new_untrusted(draft) if start == 0 else open_untrusted(draft, os.O_WRONLY | os.O_APPEND)
    with os.fdopen(handle, "ab") as file:
        if file.tell() != start:
            raise InputError(f"{path.name}: a part starts at {start}, after {file.tell()} bytes")
        file.write(payload)
        file.flush()
        if file.tell() < size:
            return
        os.fsync(file.fileno())
    if digest and sha256(draft.read_bytes()).hexdigest() != digest:
        draft.unlink()
        raise InputError(f"the code archive has another digest than {digest}")
    draft.replace(path)
