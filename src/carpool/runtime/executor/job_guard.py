"""Job guard: keeps an error in handling one job from affecting others, and names the job if the process dies of it."""

from __future__ import annotations

import logging
import mmap
import os
import struct
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from carpool.core.model import JobId
from carpool.core.typed_fields import shown
from carpool.logs import log_event

_LENGTH = struct.Struct("<H")
_SIZE = 1024  # of the marker file
_log = logging.getLogger(__name__)


class JobMarker:
    """A mapped file with the name of the job that an executor is handling; it survives the death of the process."""

    def __init__(self, path: Path) -> None:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(handle, 0, _SIZE)  # a write to a hole would fault on a full disk
            self._map = mmap.mmap(handle, _SIZE)
        finally:
            os.close(handle)
        self.clear()

    def set(self, job: JobId) -> None:
        name = job.encode("utf-8", "replace")[: _SIZE - _LENGTH.size]
        self._map[_LENGTH.size : _LENGTH.size + len(name)] = name
        self._map[: _LENGTH.size] = _LENGTH.pack(len(name))

    def clear(self) -> None:
        self._map[: _LENGTH.size] = _LENGTH.pack(0)


def marked_job(path: Path) -> JobId | None:
    """The job that an executor was handling when it died; None if it was handling none."""
    try:
        content = path.read_bytes()
        (length,) = _LENGTH.unpack_from(content)
    except (OSError, struct.error):
        return None
    name = content[_LENGTH.size : _LENGTH.size + length].decode("utf-8", "replace")
    return JobId(name) if name else None


class JobGuard:
    """Wraps everything an executor does for one job: an exception fails that job, and the executor continues."""

    def __init__(self, fail: Callable[[JobId, str], None], marker: str = "") -> None:
        self._fail = fail
        self._marker: JobMarker | None = None
        self._is_busy = False
        if marker:
            with suppress(OSError):  # without it a job that kills executors is not recognized
                self._marker = JobMarker(Path(marker))

    @contextmanager
    def handling(self, job: JobId) -> Iterator[None]:
        """Context for handling a job; handling of another job within it counts as the first job's."""
        if self._is_busy:
            yield
            return
        self._is_busy = True
        if self._marker is not None:
            self._marker.set(job)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - one job must not end the executor of all
            log_event(_log, "job_error", level=logging.ERROR, job=job, error=traceback.format_exc())
            self._fail(job, f"the executor failed in handling it: {type(error).__name__}: {shown(error)}")
        finally:
            self._is_busy = False
            if self._marker is not None:
                self._marker.clear()
