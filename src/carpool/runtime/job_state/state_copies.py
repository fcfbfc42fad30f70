"""Copies of a job's state outside its workers: mirrors in memory and checkpoints on disk; pure."""

from __future__ import annotations

from collections.abc import Sequence

from carpool.runtime.job_state.actions import Action, Drop, Mirror, Send
from carpool.runtime.job_state.types import JobOptions, StateCopy
from carpool.runtime.process.protocol import Load, Publish, Save

_MOST = 0.04  # of a job's time that may go into mirrors: a state of a gigabyte takes a good part of a second


class StateCopies:
    """Keeps the newest whole state, and knows who is just writing a newer one."""

    def __init__(self, rules: JobOptions, checkpoints: Sequence[StateCopy]) -> None:
        self.newest: StateCopy | None = checkpoints[-1] if checkpoints else None
        self.saved_step = self.newest.step if self.newest else 0  # of the newest checkpoint on disk
        self._older = list(checkpoints[:-1])
        self._rules = rules
        self._publisher: int | None = None
        self._draft: Mirror | None = None
        self._saver: int | None = None
        self._mirrored_at = self._saved_at = 0.0
        self._mirror_took_s = 0.0  # the last one that was written while the job ran
        self._is_due = False  # the mirror that is being written was due, and `_mirrored_at` is when it was
        self._keys = 0

    @property
    def step(self) -> int:
        """Steps done in the newest state; 0 where there is none."""
        return self.newest.step if self.newest else 0

    @property
    def is_publishing(self) -> bool:
        """Whether a mirror is being written."""
        return self._publisher is not None

    @property
    def is_busy(self) -> bool:
        """Whether anything is being written."""
        return self._publisher is not None or self._saver is not None

    def begin(self, at: float) -> None:
        """A formation starts: time runs from here."""
        self._mirrored_at = at
        self._saved_at = self._saved_at or at

    def publish(self, worker: int) -> Send:
        """Have a worker write its state into a new mirror."""
        self._keys += 1
        self._publisher, self._draft = worker, Mirror(self._keys)
        return Send(worker, Publish(), self._draft)

    def published(self, at: float, worker: int, step: int) -> list[Action]:
        """A worker has written it: the older mirror can go."""
        if worker != self._publisher:
            return []
        old, self.newest = self.newest, StateCopy(step, self._draft)
        self._publisher = self._draft = None
        self._mirror_took_s = at - self._mirrored_at if self._is_due else self._mirror_took_s
        self._mirrored_at, self._is_due = at, False
        return [Drop(old.mirror, reusable=True)] if old is not None and old.mirror is not None else []

    def save(self, at: float, worker: int) -> Send:
        """Have a worker write a checkpoint."""
        self._saver, self._saved_at = worker, at
        return Send(worker, Save())

    def saved(self, worker: int, step: int) -> None:
        """A worker has written it."""
        self.saved_step = max(step, self.saved_step)
        if worker == self._saver:
            self._saver = None

    def given_up(self, worker: int) -> list[Action]:
        """A worker could not write, or is gone: whatever it was writing is void."""
        if worker == self._saver:
            self._saver = None
        if worker != self._publisher or self._draft is None:
            return []
        draft, self._publisher, self._draft, self._is_due = self._draft, None, None, False
        return [Drop(draft)]

    def load(self, worker: int, rehearses: int = 0) -> Send:
        """Hand the newest state to a worker, which rehearses with it where that many bytes are given."""
        assert self.newest is not None
        return Send(worker, Load(self.newest.path, rehearses), self.newest.mirror)

    def is_damaged(self, path: str) -> bool:
        """A checkpoint cannot be used: go back to the one before it. False if there is none."""
        if self.newest is None or self.newest.path != path:
            return True  # somebody else found out before
        if not self._older:
            return False
        self.newest = self._older.pop()
        self.saved_step = self.newest.step
        return True

    def due(self, at: float, step: int, worker: int) -> list[Action]:
        """What a worker that has made so many steps should write now."""
        actions: list[Action] = []
        every_s = max(self._rules.mirror_s, self._mirror_took_s / _MOST)
        if not self.is_publishing and at - self._mirrored_at >= every_s and step > self.step:
            self._mirrored_at, self._is_due = at, True
            actions.append(self.publish(worker))
        if self._saver is None and at - self._saved_at >= self._rules.checkpoint_s and step > self.saved_step:
            actions.append(self.save(at, worker))
        return actions

    def empty(self) -> list[Action]:
        """Let go of all mirrors."""
        held = [self.newest.mirror if self.newest else None, self._draft]
        self.newest = self._draft = None
        return [Drop(mirror) for mirror in held if mirror is not None]
