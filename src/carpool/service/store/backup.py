"""Backup and restore of a daemon's state as one verified archive, taken while the daemon runs."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import sqlite3
import stat
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from carpool.core.errors import InputError, cause
from carpool.jobs.untrusted_file import open_untrusted
from carpool.service.store.accept_log import fsync_folder
from carpool.service.store.disk_space import RESERVE
from carpool.service.store.store import DATABASE

SCHEMA = 1
_MANIFEST = "manifest.json"
_BESIDE = (f"{DATABASE}-wal", f"{DATABASE}-shm")  # contained in the copy of the database
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a backup."""

    version: str  # of carpool
    taken_at: float  # Unix time
    files: dict[str, str]  # sha256 by name
    bytes: int
    vanished: tuple[str, ...] = ()  # deleted while the backup was taken, such as old checkpoints


def take_backup(
    state: Path,
    target: Path,
    *,
    version: str,
    checkpoints: bool = True,
) -> Manifest:
    """Copy a state folder into one file, whole or not at all; a daemon may be running in the folder.

    SQLite copies the database at one instant. The accept log may be some lines ahead of it or behind: opening the copy
    repairs each from the other.
    """
    if not state.is_dir():
        raise InputError("is not a folder", where=str(state), way_out="Name the daemon's state folder with --state.")
    draft = target.with_name(f".{target.name}.part")
    try:
        with os.fdopen(os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "w+b") as file:
            manifest = _pack(state, file, version=version, checkpoints=checkpoints)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
        fsync_folder(target.parent)
    except OSError as error:
        raise InputError(
            f"cannot be written: {cause(error)}", where=str(target), way_out="Name a file on a disk with enough space."
        ) from None
    finally:
        draft.unlink(missing_ok=True)
    return manifest


def check_backup(path: Path) -> Manifest:
    """Verify a backup; InputError unless every file is there and unchanged."""
    return _through(path, lambda name, chunks: _drain(chunks))


def restore_backup(path: Path, state: Path) -> Manifest:
    """Restore a backup into an empty or missing folder; a damaged one raises InputError and changes nothing."""
    if state.is_dir() and any(state.iterdir()):
        raise InputError("is not empty", where=str(state), way_out="Move it aside, or name another with --state.")
    state.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{state.name}.", dir=state.parent))
    try:
        manifest = _through(path, lambda name, chunks: _write(draft / name, chunks))
        if state.is_dir():
            state.rmdir()
        draft.replace(state)
        fsync_folder(state.parent)
    except OSError as error:
        raise InputError(
            f"cannot be written: {cause(error)}", where=str(state), way_out="Name another with --state."
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return manifest


def _pack(state: Path, file: io.BufferedRandom, *, version: str, checkpoints: bool) -> Manifest:
    hashes: dict[str, str] = {}
    vanished: list[str] = []
    total = 0
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in _files(state, checkpoints=checkpoints):
            name = path.relative_to(state).as_posix()
            try:
                with _source(path) as source:
                    size = os.fstat(source.fileno()).st_size
                    hashes[name] = _add(archive, name, source, size)
                    total += size
            except FileNotFoundError:
                vanished.append(name)
        manifest = Manifest(version, time.time(), hashes, total, tuple(vanished))
        body = json.dumps({"schema": SCHEMA, **asdict(manifest)}).encode()
        _add(archive, _MANIFEST, io.BytesIO(body), len(body))
    return manifest


def _files(state: Path, *, checkpoints: bool) -> Iterator[Path]:
    """Regular files in order, without locks and drafts."""
    for folder, folders, names in os.walk(state):
        folders[:] = sorted(each for each in folders if checkpoints or not each.startswith("checkpoints"))
        for name in sorted(names):
            path = Path(folder) / name
            if name in _BESIDE or name in ("lock", RESERVE) or name.endswith(".part"):
                continue
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISREG(path.lstat().st_mode):
                    yield path


@contextlib.contextmanager
def _source(path: Path) -> Iterator[Any]:
    """A file to read; for the database, a consistent copy."""
    if path.name != DATABASE:
        with os.fdopen(open_untrusted(path), "rb") as file:
            yield file
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / DATABASE
        with (
            contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as before,
            contextlib.closing(sqlite3.connect(copy)) as after,
        ):
            before.backup(after)
        with copy.open("rb") as file:
            yield file


class _HashingReader:
    """Reads a fixed number of bytes of a stream and hashes them, while the file may grow."""

    def __init__(self, source: Any, size: int) -> None:
        self._source, self._left = source, size
        self.hash = hashlib.sha256()

    def read(self, most: int) -> bytes:
        """The next bytes; zeros where the file was truncated meanwhile."""
        wanted = min(most, self._left)
        found: bytes = self._source.read(wanted).ljust(wanted, b"\0")
        self._left -= wanted
        self.hash.update(found)
        return found


def _add(archive: tarfile.TarFile, name: str, source: Any, size: int) -> str:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = size, 0o600, int(time.time())
    hashed = _HashingReader(source, size)
    archive.addfile(entry, hashed)  # type: ignore[arg-type]  # tarfile only reads
    return hashed.hash.hexdigest()


def _through(path: Path, take: Callable[[str, Iterator[bytes]], None]) -> Manifest:
    """Pass every file to `take`; InputError unless all match the manifest."""
    hashes: dict[str, str] = {}
    manifest: Manifest | None = None
    try:
        with tarfile.open(path, mode="r:") as archive:
            for entry in archive:
                source = archive.extractfile(entry) if entry.isreg() else None
                if source is None or not _is_inside(entry.name):
                    raise InputError(
                        f"holds {entry.name!r}, which no backup contains",
                        where=str(path),
                        way_out="Use a file that carpool backup has written.",
                    )
                if entry.name == _MANIFEST:
                    manifest = _manifest(json.load(source), path)
                    continue
                hashes[entry.name] = _taken(entry.name, source, take)
    except (tarfile.TarError, OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"is not a readable backup: {error}", where=str(path), way_out="Use an older backup."
        ) from None
    if manifest is None:
        raise InputError("is truncated: its manifest is missing", where=str(path), way_out="Use an older backup.")
    wrong = sorted(
        name for name in manifest.files.keys() | hashes.keys() if manifest.files.get(name) != hashes.get(name)
    )
    if wrong:
        raise InputError(
            f"is damaged: checksums differ for {', '.join(wrong[:5])}",
            where=str(path),
            way_out="Use an older backup.",
        )
    return manifest


def _taken(name: str, source: Any, take: Callable[[str, Iterator[bytes]], None]) -> str:
    hashed = hashlib.sha256()

    def chunks() -> Iterator[bytes]:
        while chunk := source.read(_CHUNK):
            hashed.update(chunk)
            yield chunk

    take(name, chunks())
    return hashed.hexdigest()


def _manifest(value: dict[str, Any], path: Path) -> Manifest:
    if value["schema"] > SCHEMA:
        raise InputError(
            f"is of schema {value['schema']}; this carpool reads up to {SCHEMA}",
            where=str(path),
            way_out="Restore it with the carpool that wrote it, or a newer one.",
        )
    return Manifest(
        value["version"], value["taken_at"], value["files"], value["bytes"], tuple(value.get("vanished", ()))
    )


def _is_inside(name: str) -> bool:
    parts = name.split("/")
    return bool(name) and not name.startswith("/") and all(part not in ("", ".", "..") for part in parts)


def _drain(chunks: Iterator[bytes]) -> None:
    for _ in chunks:
        pass


def _write(path: Path, chunks: Iterator[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.writelines(chunks)
        file.flush()
        os.fsync(file.fileno())
