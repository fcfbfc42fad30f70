"""Run folder: settings, journal file, and each job's log, checkpoints, metrics and outcome."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from carpool.core.errors import InputError, cause
from carpool.core.journal import Header, JournalWriter, read_journal, spec_from_json, spec_to_json
from carpool.core.messages import Record
from carpool.core.model import JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.runtime.executor.job_folder import JobFolder
from carpool.runtime.executor.reports import Outcome


class JournalFile:
    """Writes records as they come and flushes each."""

    def __init__(self, path: Path, stream: TextIO, writer: JournalWriter) -> None:
        self._path = path
        self._stream = stream
        self._writer = writer

    @classmethod
    def create(cls, path: Path, header: Header) -> JournalFile:
        """Begin a journal."""
        try:
            stream = path.open("w", encoding="ascii")
        except OSError as error:
            raise InputError(
                f"the journal cannot be written: {cause(error)}", where=str(path), way_out="Name another place."
            ) from None
        journal = cls(path, stream, JournalWriter(stream, header))
        stream.flush()
        return journal

    @classmethod
    def extend(cls, path: Path) -> JournalFile:
        """Go on with a journal; a last line that was cut off is dropped."""
        truncate_partial_line(path)
        stream = path.open("a", encoding="ascii")
        return cls(path, stream, JournalWriter(stream, None))

    def record(self, record: Record) -> None:
        """Append one record and hand it to the system."""
        self._writer.record(record)
        self._stream.flush()

    def records(self) -> Iterator[Record]:
        """Every record kept, oldest first."""
        with self._path.open(encoding="ascii") as lines:
            yield from read_journal(lines)[1]

    def close(self) -> None:
        """Flush to the disk and let go."""
        if not self._stream.closed:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()


def read_journal_file(path: Path) -> tuple[Header, list[Record]]:
    """Header and records of a journal whose last line may be cut off."""
    lines = path.read_text(encoding="ascii").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    header, records = read_journal(lines)
    return header, list(records)


def truncate_partial_line(path: Path) -> None:
    """Cut a file behind its last whole line: a process that was killed may have left half of one."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


# run.json             what was asked: policy, devices, jobs
# journal.jsonl        every fact and plan
# jobs/NAME/log        what the job printed
# jobs/NAME/metrics.jsonl, story.jsonl, outcome.json, believed.json, profile.json, checkpoints


SCHEMA = 1
BELIEVED = "believed.json"  # in a job's folder: the profile that the run began with
PROFILE = "profile.json"  # and what it had become at the end


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a run was asked to do."""

    name: str  # of the job file
    version: str  # of carpool
    policy: str
    devices: tuple[LocalDevice, ...]
    jobs: tuple[ListedJob, ...]
    names: Mapping[int, str] = field(default_factory=dict)  # of devices by id, those of earlier sittings included


class RunFolder:
    """One run on disk; only one process at a time may hold it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @property
    def journal(self) -> Path:
        """Where the journal is."""
        return self.path / "journal.jsonl"

    @property
    def exists(self) -> bool:
        """Whether a run was ever begun here."""
        return (self.path / "run.json").is_file()

    def job(self, name: str) -> Path:
        """A job's own folder."""
        return JobFolder(self.path, name).path

    # -------------------------------------------------------------------------------------------------------- holding
    def hold(self, *, by: str = "run") -> None:
        """Make the folder and keep others out until this process ends or lets go."""
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(handle, 20, 0).decode("ascii", "replace").strip()
            os.close(handle)
            raise InputError(
                f"another {by} is going on in it",
                where=str(self.path),
                way_out=f"Wait for it, stop it with kill {holder or 'PID'}, or name another --state.",
            ) from None
        with suppress(OSError):  # on a full disk: it is for people, the lock itself is the kernel's
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        self._lock = handle

    def make_private(self) -> None:
        """Let nobody else look into it: what jobs are given is in there, variables with secrets too."""
        with self._writing():
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.path.stat().st_mode & 0o077:
            try:
                self.path.chmod(0o700)
            except PermissionError:
                raise InputError(
                    "others may look into it, and it is not yours to change",
                    where=str(self.path),
                    way_out="Name another --state.",
                ) from None

    def let_go(self) -> None:
        """Let others in; a folder in which nothing was begun goes again, if it is empty."""
        if self._lock is None:
            return
        if not self.exists:
            with suppress(OSError):
                (self.path / "lock").unlink()
                self.path.rmdir()
        os.close(self._lock)
        self._lock = None

    # ------------------------------------------------------------------------------------------------ what was asked
    def begin(self, settings: RunSettings) -> None:
        """Write down what this run was asked to do; the jobs' folders are made."""
        jobs = [{"spec": spec_to_json(spec), "program": asdict(program)} for spec, program in settings.jobs]
        devices = [asdict(device) for device in settings.devices]
        document = {"schema": SCHEMA, "name": settings.name, "version": settings.version, "policy": settings.policy}
        names = {str(device): name for device, name in settings.names.items()}
        with self._writing():
            for spec, _ in settings.jobs:
                self.job(spec.id).mkdir(parents=True, exist_ok=True)
            self._replace(self.path / "run.json", {**document, "devices": devices, "names": names, "jobs": jobs})

    def settings(self) -> RunSettings:
        """What this run was asked to do."""
        path = self.path / "run.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["schema"] > SCHEMA:
                raise InputError(
                    f"schema {data['schema']} is newer than this carpool reads ({SCHEMA})",
                    where=str(path),
                    way_out="Update carpool.",
                )
            devices = tuple(LocalDevice(**{**device, "cores": tuple(device["cores"])}) for device in data["devices"])
            jobs = tuple(
                ListedJob(spec_from_json(job["spec"]), Program.from_json(job["program"])) for job in data["jobs"]
            )
            names = {int(device): name for device, name in data["names"].items()}
            return RunSettings(data["name"], data["version"], data["policy"], devices, jobs, names)
        except OSError as error:
            raise InputError(
                f"holds no run: {error.strerror}", where=str(self.path), way_out="Name the folder of a run."
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"is damaged: {type(error).__name__}: {error}",
                where=str(path),
                way_out="Put it back from a copy, or begin a new run.",
            ) from None

    # --------------------------------------------------------------------------------------------- what became of it
    def keep_outcome(self, outcome: Outcome) -> None:
        """Write down how a training ended."""
        self._replace(self.job(outcome.job) / "outcome.json", {"schema": SCHEMA, **asdict(outcome)})

    def outcome(self, job: JobId) -> Outcome | None:
        """How a training ended, if it is written down."""
        try:
            data = json.loads((self.job(job) / "outcome.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        data.pop("schema", None)
        return Outcome(**data)

    def append(self, job: JobId, file: str, row: Mapping[str, object]) -> None:
        """Add one JSON line to a file of a job's; each says its schema, since every reader may begin at any of them."""
        with (self.job(job) / file).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"schema": SCHEMA, **row}, separators=(",", ":")) + "\n")

    def rows(self, job: JobId, file: str) -> Iterator[Mapping[str, Any]]:
        """The lines of such a file; those that a crash or a full disk has torn are left out."""
        path = self.job(job) / file
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
            with suppress(ValueError):
                yield json.loads(line)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """What cannot be written here is the fault of whoever named the folder."""
        try:
            yield
        except OSError as error:
            raise InputError(
                f"cannot be written: {cause(error)}", where=str(self.path), way_out="Name another with --state."
            ) from None

    def _replace(self, path: Path, value: Any) -> None:
        """Write a file whole or not at all."""
        draft = path.with_name(f".{path.name}.part")
        draft.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        draft.replace(path)
