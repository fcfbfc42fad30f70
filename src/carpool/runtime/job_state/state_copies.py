"""Copies of a job's state outside its workers: mirrors in memory and checkpoints on disk; pure."""

from __future__ import annotations

from collections.abc import Sequence

from carpool.runtime.job_state.actions import Action, CopyMirror, DropMirror, Mirror, Send
from carpool.runtime.job_state.types import JobOptions, StateCopy
from carpool.runtime.process.protocol import Load, Publish, Save

_MAX_MIRROR_SHARE = 0.04  # of a job's time that mirroring may take; a gigabyte takes most of a second


def _saved_step(copies: Sequence[StateCopy]) -> int:
    """Steps done in the newest checkpoint on disk; 0 if there is none."""
    return max((copy.step for copy in copies if not copy.is_mirror_file), default=0)


class StateCopies:
    """Keeps the newest complete copy and tracks which worker is writing a newer one."""

    def __init__(self, options: JobOptions, checkpoints: Sequence[StateCopy]) -> None:
        self.newest: StateCopy | None = checkpoints[-1] if checkpoints else None
        self.saved_step = _saved_step(checkpoints)
        self._older = list(checkpoints[:-1])
        self._options = options
        self._publisher: int | None = None
        self._draft: Mirror | None = None
        self._saver: int | None = None
        self._mirrored_at = self._saved_at = 0.0
        self._mirror_took_s = 0.0  # the last periodic mirror
        self._is_periodic = False  # the mirror being written is a periodic one, begun at `_mirrored_at`
        self._last_key = 0

    @property
    def step(self) -> int:
        """Steps done in the newest copy; 0 if there is none."""
        return self.newest.step if self.newest else 0

    @property
    def is_publishing(self) -> bool:
        return self._publisher is not None

    @property
    def is_writing(self) -> bool:
        return self._publisher is not None or self._saver is not None

    def on_epoch_start(self, at: float) -> None:
        self._mirrored_at = at
        self._saved_at = self._saved_at or at

    def publish(self, worker: int) -> Send:
        self._last_key += 1
        self._publisher, self._draft = worker, Mirror(self._last_key)
        return Send(worker, Publish(), self._draft)

    def on_published(self, at: float, worker: int, step: int) -> list[Action]:
        if worker != self._publisher:
            return []
        old, self.newest = self.newest, StateCopy(step, self._draft)
        copied = [CopyMirror(self._draft)] if self._options.copies_mirrors and self._draft is not None else []
        self._publisher = self._draft = None
        self._mirror_took_s = at - self._mirrored_at if self._is_periodic else self._mirror_took_s
        self._mirrored_at, self._is_periodic = at, False
        dropped = [DropMirror(old.mirror, reusable=True)] if old is not None and old.mirror is not None else []
        return [*copied, *dropped]

    def save(self, at: float, worker: int) -> Send:
        self._saver, self._saved_at = worker, at
        return Send(worker, Save())

    def on_saved(self, worker: int, step: int) -> None:
        self.saved_step = max(step, self.saved_step)
        if worker == self._saver:
            self._saver = None

    def discard_writes_of(self, worker: int) -> list[Action]:
        """Forget what a worker was writing: it failed or exited."""
        if worker == self._saver:
            self._saver = None
        if worker != self._publisher or self._draft is None:
            return []
        draft, self._publisher, self._draft, self._is_periodic = self._draft, None, None, False
        return [DropMirror(draft)]

    def load(self, worker: int, warmup_bytes: int = 0) -> Send:
        assert self.newest is not None
        return Send(worker, Load(self.newest.path, warmup_bytes), self.newest.mirror)

    def fall_back_from(self, path: str) -> bool:
        """Replace a damaged checkpoint by the one before it; False if there is none."""
        if self.newest is None or self.newest.path != path:
            return True  # another worker has reported it before
        if not self._older:
            return False
        self.newest = self._older.pop()
        self.saved_step = _saved_step([*self._older, self.newest])
        return True

    def due(self, at: float, step: int, worker: int) -> list[Action]:
        actions: list[Action] = []
        interval_s = max(self._options.mirror_s, self._mirror_took_s / _MAX_MIRROR_SHARE)
        if not self.is_publishing and at - self._mirrored_at >= interval_s and step > self.step:
            self._mirrored_at, self._is_periodic = at, True
            actions.append(self.publish(worker))
        if self._saver is None and at - self._saved_at >= self._options.checkpoint_s and step > self.saved_step:
            actions.append(self.save(at, worker))
        return actions

    def drop_all(self) -> list[Action]:
        mirrors = [self.newest.mirror if self.newest else None, self._draft]
        self.newest = self._draft = None
        return [DropMirror(mirror) for mirror in mirrors if mirror is not None]
