"""Bytecode cache: stores compiled modules of packages for which Python stores none.

Container images are often built without bytecode and run with PYTHONDONTWRITEBYTECODE. Each process then compiles the
modules that it imports, which takes longer than all else in importing torch: on an H200's host 8 s instead of 3.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from pathlib import Path


def use_bytecode_cache(source: str | None) -> None:
    """Import from a cache in the user's folder from now on, if this module has no bytecode and Python writes none.

    Like the folders of Python's own (``__pycache__``), the cache may be deleted at any time.
    """
    if source is None or sys.pycache_prefix is not None or _has_bytecode(Path(source)):
        return
    with contextlib.suppress(OSError, RuntimeError):  # there is no home
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "carpool" / "bytecode"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False


def source_of(package: str) -> str | None:
    """The first file of an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    return None if spec is None else spec.origin


def _has_bytecode(source: Path) -> bool:
    """Whether bytecode lies beside a source file, or Python writes it there when the module is imported."""
    can_write = not sys.dont_write_bytecode and os.access(source.parent, os.W_OK)
    return can_write or Path(importlib.util.cache_from_source(str(source))).exists()
