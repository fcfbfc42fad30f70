"""Rank context: joins a process-group epoch and holds the worker's rank, reducer and measurements."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch._C._distributed_c10d import FileStore

from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.process.protocol import Proceed
from carpool.runtime.reduce.param_exchange import ParamExchange, copying_s
from carpool.runtime.reduce.process_group_reducer import ProcessGroupReducer, open_group
from carpool.runtime.reduce.reducer import Reducer
from carpool.runtime.reduce.shm_layout import Owners, ShmLayout, piece_owners
from carpool.runtime.reduce.shm_reducer import ShmReducer, contribution_bytes
from carpool.runtime.reduce.sync_batchnorm import ShmAllGather, SyncBatchNorms, all_gather_bytes
from carpool.runtime.sharing.turn_token import TurnToken
from carpool.runtime.worker.rate_meter import RateMeter


@dataclass(slots=True, eq=False)
class RankContext:
    """A worker's place in a formation."""

    said: Proceed
    owners: Owners
    parts: tuple[int, ...]
    reducer: Reducer | None  # None: it is alone
    speedometer: RateMeter
    exchange: ParamExchange | None = None  # None: everybody updates everything
    meeting: ShmAllGather | None = None  # None: nothing is shown in the middle of a pass
    update_s: float = 0.0  # per element, of the last update
    copy_s: float = 0.0  # per element, of what an exchange copies
    token: TurnToken | None = None  # where steps are made by token
    halting: bool = False  # at the next boundary, once its evaluation is made

    @property
    def pieces(self) -> range:
        """The pieces of every step that are its own."""
        return range(*self.owners[self.said.rank])

    @property
    def updates(self) -> range:
        """The parameters that it updates, and hands over to the others."""
        return range(*self.said.update_ranges[self.said.rank])

    @property
    def threads(self) -> int | None:
        """As many as every other rank has, for what follows the pass: their number may change the bits; None: alone."""
        return self.said.update_threads or None

    def starts(self) -> None:
        """Nothing of a step has been said to the device yet: return when it may be."""
        if self.token is not None:
            self.token.starts()

    def is_queued(self) -> None:
        """Most of a step has been said to the device; if it is the last for now, another may make itself ready."""
        if self.token is not None:
            self.token.is_queued()

    def is_made(self) -> None:
        """All of a step has been said to the device, its update too, and nothing but another step follows."""
        if self.token is not None and not self.halting:
            self.token.is_made()

    def end(self, trainer: Trainer) -> None:
        """The training is over: the device is the next one's while the weights are saved."""
        if self.token is not None:
            trainer.await_device()
            self.token.end()

    def measure(self, trainer: Trainer, updated: Sequence[int]) -> None:
        """Note how long updating these parameters took, and how long copying what would be exchanged takes."""
        elements = sum(trainer.layout.parameters[index].numel() for index in updated)
        self.update_s = trainer.update.step_s / elements if elements else 0.0
        if not self.copy_s:
            self.copy_s = copying_s(trainer.layout, trainer.training.optimizer)


# Beside `Proceed` comes one memory file. With the shared reducer it holds everything; with the group reducer it is only
# the store in which the ranks of a process group find each other.


GROUP_TIMEOUT_S = 20.0  # that ranks wait for each other to make a group; all have been told to at the same moment


class GroupJoiner:
    """Takes a worker's place in one formation after another."""

    def __init__(self, trainer: Trainer, norms: SyncBatchNorms | None, is_given_up: Callable[[], bool]) -> None:
        self._trainer = trainer
        self._norms = norms
        self._is_given_up = is_given_up
        self.slot_bytes = slot_bytes(trainer, norms)

    def join(self, said: Proceed, fds: tuple[int, ...]) -> RankContext:
        """A place in a formation. Raises `StepAborted` where the others do not come."""
        trainer = self._trainer
        owners = piece_owners(said.owners, said.size, trainer.shards)
        parts = said.parts or tuple(1 for _ in range(said.size))
        place = RankContext(said, owners, parts, None, RateMeter(said.probe))
        if self._norms is not None:
            self._norms.meeting = None
        trainer.update.threads = place.threads if said.size > 1 and trainer.shards is None else None
        if said.size == 1:
            return place
        if said.reducer == "group":
            place.reducer = self._group(said, fds[0], place)
            return place
        slots = ShmLayout(owners, self.slot_bytes)
        segment = ShmReducer(fds[0], slots, trainer.layout)
        segment.clear(said.rank)
        place.reducer = segment
        if said.update_ranges:
            place.exchange = ParamExchange(fds[0], slots.num_bytes, trainer.layout, trainer.training.optimizer)
        if self._norms is not None:
            room = self._norms.room
            place.meeting = ShmAllGather(fds[0], slots, said.rank, said.epoch, room, self._is_given_up)
            self._norms.meeting = place.meeting
        return place

    def _group(self, said: Proceed, fd: int, place: RankContext) -> Reducer:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this node
        kept = os.dup(fd)  # the store opens its file by this number
        try:
            store = FileStore(f"/proc/self/fd/{kept}", -1)
            group = open_group(store, said.epoch, said.rank, said.size, timeout_s=GROUP_TIMEOUT_S)
        except BaseException:
            os.close(kept)
            raise
        exact, layout = self._trainer.shards is not None, self._trainer.layout
        made = ProcessGroupReducer(group, said.rank, place.owners, layout, exact=exact, interrupted=self._is_given_up)
        weakref.finalize(made, os.close, kept)
        return made


def slot_bytes(trainer: Trainer, norms: SyncBatchNorms | None) -> int:
    """What one contribution takes in a segment, with the vectors that are shown before it."""
    return contribution_bytes(trainer.layout) + (all_gather_bytes(norms.room) if norms is not None else 0)
