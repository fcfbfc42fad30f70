"""Memory files: anonymous, handed on as descriptors, and gone with the last process that holds one."""

from __future__ import annotations

import os


def new_memory(name: str, num_bytes: int = 0) -> int:
    """The descriptor of a new memory file of zeros; pages take memory once they are touched."""
    fd = os.memfd_create(f"carpool-{name}", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd
