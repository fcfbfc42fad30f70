"""Code archive: the folder of a job as one content-addressed file, packed here and unpacked on another machine."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tarfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from carpool.core.errors import InputError

MAX_BYTES = 64 << 20  # before compression
_EXCLUDED = frozenset({".git", ".hg", ".svn", "__pycache__", ".carpool", ".mypy_cache", ".ruff_cache", ".pytest_cache"})


@dataclass(frozen=True, slots=True)
class CodeArchive:
    """The files of a folder, equal for equal content."""

    digest: str
    content: bytes
    links: dict[str, str]  # links to paths outside the folder, which every machine must have


def pack(folder: Path, *, max_bytes: int = MAX_BYTES, exclude: Collection[Path] = ()) -> CodeArchive:
    """Archive a folder without version control, virtual environments, caches and `exclude`; InputError if too large."""
    buffer, links, size = io.BytesIO(), dict[str, str](), 0
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=1, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in _files(folder, {path.resolve() for path in exclude}):
            name = path.relative_to(folder).as_posix()
            if path.is_symlink() and (target := _outside(path, folder)):
                links[name] = target
                continue
            size += path.lstat().st_size
            if size > max_bytes:
                raise InputError(
                    f"its files exceed {max_bytes >> 20} MiB, the limit for code that is sent to other machines",
                    where=str(folder),
                    way_out="Move data elsewhere and name it by path, or raise the limit: max_code in the hosts file, "
                    "--max-code with Ray and Slurm.",
                )
            tar.add(path, name, recursive=False, filter=_plain)
    content = buffer.getvalue()
    return CodeArchive(sha256(content).hexdigest(), content, links)


def unpack(content: bytes, folder: Path) -> None:
    """Unpack an archive into a new folder; nothing is left of one that is unsafe or damaged."""
    draft = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as tar:
            tar.extractall(draft, filter="data")
        draft.rename(folder)
    except (tarfile.TarError, OSError, EOFError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise InputError(f"the code archive cannot be unpacked: {error}", where=str(folder)) from None


def _files(folder: Path, exclude: Collection[Path]) -> Iterator[Path]:
    """Files and links of a folder in a fixed order."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = Path(entry.path)
        if entry.name in _EXCLUDED or path.resolve() in exclude or (path / "pyvenv.cfg").is_file():
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _files(path, exclude)
        elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
            yield path


def _outside(path: Path, folder: Path) -> str:
    """The target of a link that leads out of the folder; else empty."""
    target = Path(os.path.normpath(path.parent / path.readlink()))
    return "" if target.is_relative_to(folder) and not path.readlink().is_absolute() else str(target)


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without owner and time, so that equal files give equal archives."""
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    info.mode = 0o755 if info.mode & 0o100 else 0o644
    return info


def absolute_paths(values: Collection[object]) -> list[str]:
    """Absolute paths among values that exist on this machine: other machines need them too."""
    texts = [value for value in values if isinstance(value, str) and value.startswith("/") and len(value) > 1]
    return [text for text in texts if "\n" not in text and Path(text).exists()]
