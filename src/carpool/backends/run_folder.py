"""Run folder: a run's settings and each job's log, checkpoints, metrics and outcome.

run.json                          policy, devices and jobs
journal.sqlite, accepted.log      the store; before version 0.2 journal.jsonl
jobs/NAME/                        log, metrics.jsonl, story.jsonl, outcome.json, believed.json, profile.json,
                                  checkpoints
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from carpool.core.errors import InputError, cause
from carpool.core.journal import spec_from_json, spec_to_json
from carpool.core.model import JobId
from carpool.core.typed_fields import decode_fields
from carpool.jobs.devices import LocalDevice
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.jobs.untrusted_file import append_untrusted, open_new_untrusted, read_untrusted
from carpool.runtime.executor.job_folder import JobFolder
from carpool.runtime.executor.reports import Outcome

SCHEMA = 1
_MAX_OUTCOME_BYTES = 1 << 22
_MAX_ROWS_BYTES = 1 << 28
BELIEVED = "believed.json"  # in a job's folder: the profile that the run began with
PROFILE = "profile.json"  # and the profile at its end


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a run was started with."""

    name: str  # of the job file
    version: str  # of carpool
    policy: str
    devices: tuple[LocalDevice, ...]
    jobs: tuple[ListedJob, ...]
    names: Mapping[int, str] = field(default_factory=dict)  # of devices by id, those before a resume included


class RunFolder:
    """One run on disk; only one process at a time may hold it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @property
    def legacy_journal(self) -> Path:
        """The journal of a run by carpool 0.1."""
        return self.path / "journal.jsonl"

    @property
    def exists(self) -> bool:
        return (self.path / "run.json").is_file()

    def job(self, name: str) -> Path:
        return JobFolder(self.path, name).path

    def hold(self, *, by: str = "run") -> None:
        """Create the folder and lock it until this process ends or unlocks it."""
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(handle, 20, 0).decode("ascii", "replace").strip()
            os.close(handle)
            raise InputError(
                f"another {by} uses this folder",
                where=str(self.path),
                way_out=f"Wait for it, stop it with kill {holder or 'PID'}, or name another --state.",
            ) from None
        with suppress(OSError):  # on a full disk: the number is only for error messages
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        self._lock = handle

    def make_private(self) -> None:
        """Deny others access: programs and their environment variables are stored there."""
        with self._writing():
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.path.stat().st_mode & 0o077:
            try:
                self.path.chmod(0o700)
            except PermissionError:
                raise InputError(
                    "other users can read this folder, and its permissions cannot be changed",
                    where=str(self.path),
                    way_out="Name another --state.",
                ) from None

    def let_go(self) -> None:
        """Unlock; a folder in which no run was begun is removed if it is empty."""
        if self._lock is None:
            return
        if not self.exists:
            with suppress(OSError):
                (self.path / "lock").unlink()
                self.path.rmdir()
        os.close(self._lock)
        self._lock = None

    def begin(self, settings: RunSettings) -> None:
        jobs = [{"spec": spec_to_json(spec), "program": asdict(program)} for spec, program in settings.jobs]
        devices = [asdict(device) for device in settings.devices]
        document = {"schema": SCHEMA, "name": settings.name, "version": settings.version, "policy": settings.policy}
        names = {str(device): name for device, name in settings.names.items()}
        with self._writing():
            for spec, _ in settings.jobs:
                self.job(spec.id).mkdir(parents=True, exist_ok=True)
            self._replace(self.path / "run.json", {**document, "devices": devices, "names": names, "jobs": jobs})

    def settings(self) -> RunSettings:
        """The run's settings; InputError where the folder holds no run or run.json is damaged."""
        path = self.path / "run.json"
        try:
            return _settings_from_json(json.loads(path.read_text(encoding="utf-8")), path)
        except OSError as error:
            raise InputError(
                f"holds no run: {error.strerror}", where=str(self.path), way_out="Name the folder of a run."
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"is damaged: {type(error).__name__}: {error}",
                where=str(path),
                way_out="Restore it from a copy, or begin a new run.",
            ) from None

    def write_outcome(self, outcome: Outcome) -> None:
        self._replace(self.job(outcome.job) / "outcome.json", {"schema": SCHEMA, **asdict(outcome)})

    def outcome(self, job: JobId) -> Outcome | None:
        """How a training ended; None while it is not written."""
        try:
            data = json.loads(read_untrusted(self.job(job) / "outcome.json", _MAX_OUTCOME_BYTES))
            return decode_fields(Outcome, data, ignore_unknown=True)
        except (OSError, ValueError, AttributeError, RecursionError):
            return None

    def append(self, job: JobId, file: str, row: Mapping[str, object]) -> None:
        line = json.dumps({"schema": SCHEMA, **row}, separators=(",", ":"))
        append_untrusted(self.job(job) / file, line.encode() + b"\n")

    def rows(self, job: JobId, file: str) -> Iterator[Mapping[str, Any]]:
        """The objects in the lines of such a file; torn lines and others are skipped."""
        try:
            content = read_untrusted(self.job(job) / file, _MAX_ROWS_BYTES)
        except OSError:
            return
        for line in content.decode("utf-8", "replace").splitlines():
            with suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict):
                    yield row

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"cannot be written: {cause(error)}", where=str(self.path), way_out="Name another with --state."
            ) from None

    def _replace(self, path: Path, value: Any) -> None:
        """Write a file whole or not at all."""
        draft = path.with_name(f".{path.name}.part")
        with os.fdopen(open_new_untrusted(draft), "w", encoding="utf-8") as file:
            file.write(json.dumps(value, indent=1) + "\n")
        draft.replace(path)


def _settings_from_json(data: Mapping[str, Any], path: Path) -> RunSettings:
    if data["schema"] > SCHEMA:
        raise InputError(
            f"schema {data['schema']} is newer than this carpool reads ({SCHEMA})",
            where=str(path),
            way_out="Update carpool.",
        )
    devices = tuple(LocalDevice(**{**device, "cores": tuple(device["cores"])}) for device in data["devices"])
    jobs = tuple(ListedJob(spec_from_json(job["spec"]), Program.from_json(job["program"])) for job in data["jobs"])
    names = {int(device): name for device, name in data["names"].items()}
    return RunSettings(data["name"], data["version"], data["policy"], devices, jobs, names)
