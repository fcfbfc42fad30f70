"""How a worker meets the others of its formation: what adds up, what is shown in the middle, what is exchanged after.

Beside `Proceed` comes one memory file. With the shared reducer it holds everything; with the group reducer it is only
the store in which the ranks of a process group find each other.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

from torch._C._distributed_c10d import FileStore

from carpool.runtime.exchange import Exchange
from carpool.runtime.group import GroupReducer, open_group
from carpool.runtime.jointnorm import JointNorms
from carpool.runtime.meeting import Meeting, meeting_bytes
from carpool.runtime.place import Place
from carpool.runtime.protocol import Proceed
from carpool.runtime.reducer import Reducer
from carpool.runtime.segment import SegmentReducer, contribution_bytes
from carpool.runtime.slots import Slots, owners_of
from carpool.runtime.speedometer import Speedometer
from carpool.runtime.trainer import Trainer

GROUP_S = 20.0  # that ranks wait for each other to make a group; all have been told to at the same moment


class Joiner:
    """Takes a worker's place in one formation after another."""

    def __init__(self, trainer: Trainer, norms: JointNorms | None, is_given_up: Callable[[], bool]) -> None:
        self._trainer = trainer
        self._norms = norms
        self._is_given_up = is_given_up
        self.slot_bytes = slot_bytes(trainer, norms)

    def join(self, said: Proceed, fds: tuple[int, ...]) -> Place:
        """A place in a formation. Raises `GivenUp` where the others do not come."""
        trainer = self._trainer
        owners = owners_of(said.owners, said.size, trainer.shards)
        parts = said.parts or tuple(1 for _ in range(said.size))
        place = Place(said, owners, parts, None, Speedometer(said.probe))
        if self._norms is not None:
            self._norms.meeting = None
        trainer.update.threads = place.threads if said.size > 1 and trainer.shards is None else None
        if said.size == 1:
            return place
        if said.reducer == "group":
            place.reducer = self._group(said, fds[0], place)
            return place
        slots = Slots(owners, self.slot_bytes)
        segment = SegmentReducer(fds[0], slots, trainer.layout)
        segment.clear(said.rank)
        place.reducer = segment
        if said.updates:
            place.exchange = Exchange(fds[0], slots.num_bytes, trainer.layout, trainer.training.optimizer)
        if self._norms is not None:
            room = self._norms.room
            place.meeting = Meeting(fds[0], slots, said.rank, said.formation, room, self._is_given_up)
            self._norms.meeting = place.meeting
        return place

    def _group(self, said: Proceed, fd: int, place: Place) -> Reducer:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this node
        kept = os.dup(fd)  # the store opens its file by this number
        try:
            store = FileStore(f"/proc/self/fd/{kept}", -1)
            group = open_group(store, said.formation, said.rank, said.size, timeout_s=GROUP_S)
        except BaseException:
            os.close(kept)
            raise
        exact, layout = self._trainer.shards is not None, self._trainer.layout
        made = GroupReducer(group, said.rank, place.owners, layout, exact=exact, interrupted=self._is_given_up)
        weakref.finalize(made, os.close, kept)
        return made


def slot_bytes(trainer: Trainer, norms: JointNorms | None) -> int:
    """What one contribution takes in a segment, with the vectors that are shown before it."""
    return contribution_bytes(trainer.layout) + (meeting_bytes(norms.room) if norms is not None else 0)
