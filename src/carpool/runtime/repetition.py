"""Whether the passes of a training are all that its model, its samples and its seeds make them: found out by trying.

What the user's code remembers between passes (a counter in the model, a generator or a cache of its own, a tensor that
is no buffer) is not seen from outside. But then a shard that is passed twice comes out with other bits the second time.
It is tried in a copy of this process, so that nothing is remembered here that would not have been without it.
"""

from __future__ import annotations

import functools
import select
import socket

import torch

from carpool.runtime.child import Child
from carpool.runtime.flat import Contribution
from carpool.runtime.pass_figures import PassFigures
from carpool.runtime.passes import Passes, Step

_SAME, _UNLIKE = b"=", b"!"


class Repetition:
    """A process that passes a piece of a step, others, and the first one again, while this one goes on."""

    def __init__(self, passes: Passes, figures: PassFigures, step: Step, pieces: list[int]) -> None:
        self._child = Child("carpool-repeat", functools.partial(_try, passes, figures, step, pieces))

    def is_repeatable(self, patience_s: float) -> bool | None:
        """Whether the bits were the same, as soon as that is known; ``None`` if it is not found out."""
        waiting = select.poll()
        waiting.register(self._child.socket, select.POLLIN)
        said = self._child.socket.recv(1) if waiting.poll(1e3 * patience_s) else b""
        return said == _SAME if said else None

    def close(self) -> None:
        """End it."""
        self._child.close()


def _try(passes: Passes, figures: PassFigures, step: Step, pieces: list[int], end: socket.socket) -> None:
    torch.set_num_threads(1)
    figures.forget_state()
    passes.begin()
    first, *_, last = [passes.piece(step, piece) for piece in (*pieces, pieces[0])]
    assert first is not None, "the first of these pieces holds samples"
    assert last is not None, "and is the last"
    end.sendall(_SAME if _are_same(first, last) else _UNLIKE)


def _are_same(one: Contribution, other: Contribution) -> bool:
    """Bit for bit: what is not a number equals itself."""
    bits = torch.int64 if one.values.dtype is torch.float64 else torch.int32
    return torch.equal(one.values.view(bits), other.values.view(bits)) and torch.equal(one.integers, other.integers)
