"""Memory files: anonymous, handed on as descriptors, and gone with the last process that holds one."""

from __future__ import annotations

import os


def new_memory(name: str, num_bytes: int = 0) -> int:
    """The descriptor of a new memory file of zeros; pages take memory once they are touched."""
    fd = os.memfd_create(f"carpool-{name}", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd


class Mirrors:
    """Two memory files that a job's state is published into by turns: one of them always holds a whole state."""

    def __init__(self, job: str) -> None:
        self._fds = (new_memory(f"mirror-{job}"), new_memory(f"mirror-{job}"))
        self._newest: int | None = None
        self.step: int | None = None  # of the newest state

    @property
    def newest(self) -> int | None:
        """The descriptor of the newest state, if there is one: send it with `Load`."""
        return None if self._newest is None else self._fds[self._newest]

    @property
    def next(self) -> int:
        """The descriptor to send with the next `Publish`; it overwrites the older state."""
        return self._fds[1 if self._newest == 0 else 0]

    def published(self, step: int) -> None:
        """The state was written into `next`."""
        self._newest = 1 if self._newest == 0 else 0
        self.step = step

    def close(self) -> None:
        """Let go of both."""
        for fd in self._fds:
            os.close(fd)
