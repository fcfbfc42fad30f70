"""Checkpoints on disk: atomic writes, retention of the last and the best, export of weights."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import resource
import shutil
import time
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch

from carpool.core.errors import InputError
from carpool.jobs.untrusted_file import open_untrusted
from carpool.runtime.errors import CheckpointError, LeaseEnded
from carpool.runtime.state.tensor_file import pack, unpack

_NAME = re.compile(r"step-(\d+)\.ckpt")
_DRAFT = re.compile(r"\..+\.ckpt\.(?:([0-9a-f]+)-)?(\d+)\.part")  # with machine and id of the process that writes it
_FOREIGN_DRAFT_S = 86400.0  # age at which a draft of another machine counts as abandoned
_BEST = "best.ckpt"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_MAX_TRIES = 5  # to write a final state, if the error is not a full disk


@cache
def _machine() -> str:
    """Identify this machine and pid namespace: in a shared folder, a pid alone does not say who writes a draft."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return sha256(f"{boot} {Path('/proc/self/ns/pid').readlink()}".encode()).hexdigest()[:12]
    return sha256(platform.node().encode()).hexdigest()[:12]


def _draft_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.{_machine()}-{os.getpid()}.part")


def save(path: Path, state: Any, named: Path | None = None, may_save: Callable[[], bool] = lambda: True) -> None:
    """Write a checkpoint atomically: a temporary file, synced to disk, then renamed.

    Errors name it ``named`` instead of ``path``, if given. `LeaseEnded` if it may not, or no longer, be saved.
    """
    draft = _draft_of(path)
    try:
        _check(may_save)
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            for chunk in pack(state):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        _check(may_save)
        draft.replace(path)
        _flush_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{named or path}: cannot write the checkpoint: {_describe(error, path.parent)}"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _check(may_save: Callable[[], bool]) -> None:
    if not may_save():
        raise LeaseEnded("the lease of this machine has ended, and the job may run on another one")


def load(path: Path) -> Any:
    """Read a checkpoint and verify its checksum; CheckpointGone if a newer one has replaced it."""
    try:
        with os.fdopen(open_untrusted(path), "rb") as file:
            content = file.read()
    except FileNotFoundError as error:
        raise CheckpointGone(f"{path}: cannot read the checkpoint: {error.strerror}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read the checkpoint: {error.strerror}") from error
    return unpack(content, str(path))


def load_copy(fd: int, path: str) -> Any:
    """Read a checkpoint of another node from a memory file and verify its checksum."""
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        return unpack(file.read(), path)


class CheckpointGone(CheckpointError):
    """The checkpoint was deleted: a running job keeps only its last ones."""


class FoundCheckpoint(NamedTuple):
    """The newest valid checkpoint, and the errors of newer ones."""

    path: Path
    state: Any
    damaged: tuple[str, ...]


class Checkpoints:
    """A job's checkpoint folder: the last ``keep`` checkpoints, and the best."""

    def __init__(self, folder: Path, keep: int = 2, may_save: Callable[[], bool] = lambda: True) -> None:
        if keep < 1:
            raise InputError(f"keep is {keep}; it must be at least 1")
        self.folder = folder
        self.keep = keep
        self._may_save = may_save  # whether the lease of this machine allows it
        self._held: int | None = None  # descriptor of the folder

    def hold(self) -> Checkpoints:
        """Create the folder, open it, and write by that descriptor from now on, even if the folder is renamed.

        If the job leaves this machine and returns, its folder is replaced. A leftover process of its earlier stay then
        writes to the old folder, which is not read.
        """
        with contextlib.suppress(OSError):  # the first save reports it
            self.folder.mkdir(parents=True, exist_ok=True)
            self._held = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return self

    @property
    def _written(self) -> Path:
        """The folder to write to, which may have been moved since."""
        if self._held is None:
            return self.folder
        if not os.fstat(self._held).st_nlink and not self.folder.exists():  # deleted, and not replaced
            os.close(self._held)
            self._held = None
            self.hold()
        return self.folder if self._held is None else Path(f"/proc/self/fd/{self._held}")

    def save(self, step: int, state: Any, *, is_best: bool = False) -> Path:
        folder, name = self._written, f"step-{step:09d}.ckpt"
        save(folder / name, state, self.folder / name, self._may_save)
        if is_best:
            _mark_best(folder / name, self.folder / _BEST)
        for old in (*_by_step(folder)[: -self.keep], *_abandoned(folder)):
            old.unlink(missing_ok=True)
        return self.folder / name

    def paths(self) -> list[Path]:
        """The checkpoints by step, oldest first, without the separate file of the best."""
        return _by_step(self.folder)

    def latest(self) -> FoundCheckpoint | None:
        """The newest valid checkpoint; `CheckpointError` if there are some but all are damaged."""
        damaged: list[str] = []
        for path in reversed(self.paths()):
            try:
                return FoundCheckpoint(path, load(path), tuple(damaged))
            except CheckpointError as error:
                damaged.append(str(error))
        if damaged:
            raise CheckpointError("all checkpoints are damaged: " + "; ".join(damaged))
        return None

    @property
    def best(self) -> Path | None:
        path = self.folder / _BEST
        return path if path.exists() else None


def _by_step(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _abandoned(folder: Path) -> list[Path]:
    """Temporary files of processes that died while writing; of another machine only after a day."""
    drafts = [(path, _DRAFT.fullmatch(path.name)) for path in folder.iterdir()]
    return [path for path, found in drafts if found and _is_abandoned(path, *found.groups())]


def _mark_best(path: Path, named: Path) -> None:
    best = path.with_name(_BEST)
    draft = _draft_of(best)
    draft.unlink(missing_ok=True)
    try:
        try:
            os.link(path, draft)
        except OSError:
            shutil.copyfile(path, draft)
        draft.replace(best)
        _flush_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"{named}: cannot keep the best checkpoint: {_describe(error, path.parent)}") from error
    finally:
        draft.unlink(missing_ok=True)


def _is_abandoned(draft: Path, machine: str | None, pid: str) -> bool:
    if machine in (None, _machine()):
        return not Path("/proc", pid).exists()
    try:
        return time.time() - draft.stat().st_mtime > _FOREIGN_DRAFT_S
    except OSError:
        return False


def _flush_folder(folder: Path) -> None:
    """Sync a folder, so that a rename survives a power loss."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _describe(error: OSError, folder: Path) -> str:
    if error.errno == errno.EFBIG:
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        shown = "of the file system" if limit == resource.RLIM_INFINITY else f"of {limit} bytes per file (ulimit -f)"
        return f"it exceeds the limit {shown}. Raise the limit, or make the state smaller."
    if error.errno in _NO_ROOM:
        free = shutil.disk_usage(folder).free if folder.is_dir() else 0
        return (
            f"the disk is full ({free / 2**20:.0f} MiB free). Free some space or lower keep; earlier checkpoints are "
            "unaffected."
        )
    return error.strerror or str(error)


class FinalSaveRetries:
    """Decides when to give up on writing a final state: after a few errors, never for a full disk or an ended lease."""

    def __init__(self) -> None:
        self._num_failed = 0

    def is_exhausted(self, error: BaseException | None) -> bool:
        """Count a failed try with its error; True if no other try should follow."""
        cause = error if isinstance(error, OSError) else getattr(error, "__cause__", None)
        if isinstance(error, LeaseEnded) or (isinstance(cause, OSError) and cause.errno in _NO_ROOM):
            return False
        self._num_failed += 1
        return self._num_failed >= _MAX_TRIES


def check_compatible(state: Mapping[str, Any], signature: Mapping[str, Any]) -> None:
    """Reject a state of another version of carpool or of another training."""
    schema = state.get("schema")
    if schema != 1:
        raise CheckpointError(f"the state has schema {schema!r}; this version of carpool reads 1")
    for name, expected in signature.items():
        found = state["made_for"].get(name)
        if found != expected:
            raise CheckpointError(
                f"the state was saved with {name} {found!r}; this training has {expected!r}. "
                "Resume with the same value, or start over."
            )


def export_weights(checkpoint: Path, target: Path) -> None:
    """Write the model's ``state_dict()`` for ``model.load_state_dict(torch.load(target))``.

    CheckpointGone if a newer checkpoint has replaced this one.
    """
    try:
        state = load(checkpoint)
    except CheckpointGone:
        raise
    except CheckpointError as error:
        raise InputError(str(error), way_out="Try another checkpoint in the job's folder.") from None
    draft = target.with_name(f".{target.name}.part")
    try:
        torch.save(state["model"], draft)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
