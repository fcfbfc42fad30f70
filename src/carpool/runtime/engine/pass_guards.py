"""Guards around a pass: snapshot and restore model buffers, reject passes that modify weights."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from carpool.runtime.compat.torch_api import foreach_copy_, versions
from carpool.runtime.engine.flat_buffers import FlatLayout, group_by_dtype
from carpool.runtime.errors import TrainingError

_Rows = list[tuple[list[Tensor], list[Tensor]]]


class BufferSnapshot:
    """A copy of all buffers, in memory that is used again for every step.

    It is taken in every step, and between two steps the caches have forgotten all but the model: each object that is
    looked at costs many times what it would cost in a loop of its own. So what depends on the buffers alone is known
    beforehand, for as long as they are the same tensors.
    """

    def __init__(self, layout: FlatLayout) -> None:
        self._layout = layout
        self._kept: list[Tensor] = []
        self._shapes: list[torch.Size] = []
        self._rows: _Rows = []
        self.contents: list[Tensor] = []

    def take(self) -> None:
        """Copy the buffers as they are now."""
        buffers = self._layout.buffers()
        if not buffers:
            return
        if len(buffers) != len(self._kept) or not all(map(operator.is_, buffers, self._kept)):
            self._kept = buffers
            self._shapes = [buffer.shape for buffer in buffers]
            self.contents = [torch.empty_like(buffer) for buffer in buffers]
            self._rows = group_by_dtype(self.contents, buffers)
        with torch.no_grad():
            for contents, kept in self._rows:
                foreach_copy_(contents, kept)

    def restore(self) -> None:
        """Give the model its buffers back, even those that it has replaced by others."""
        self._layout.put_back(self._kept, self.contents)

    def refuse_growth(self) -> None:
        """Refuse a buffer that has another shape than before, or had none: there is no place for it."""
        self._layout.refuse_new_buffers()
        if not self._kept:
            return
        shapes = [buffer.shape for buffer in self._layout.buffers()]
        if shapes == self._shapes:
            return
        for slot, old, new in zip(self._layout.slots, self._shapes, shapes, strict=True):
            if new != old:
                raise TrainingError(
                    f"buffer {slot.name!r} changed its shape from {tuple(old)} to {tuple(new)} in a step"
                )


# Where several devices pass the pieces, each would change weights of its own, see nothing of what the others did, and
# they would part without an error.


_MEASURED = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128})


class MutationGuard:
    """Refuses a pass that changes weights.

    Torch counts the changes that it is told of. Those behind its back (``weight.data.clamp_(…)``) show in the weights'
    norms, which are taken around the first pass only: they cost a look at all weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = [name for name, _ in model.named_parameters()]
        self._weights = list(model.parameters())
        self._is_measured = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Refuse what changes weights meanwhile."""
        counts = self._counts()
        norms = None if self._is_measured else self._norms()
        yield
        self._compare(counts, self._counts())
        if norms is not None:
            self._compare(norms, self._norms())
            self._is_measured = True

    def _counts(self) -> list[int]:
        return versions(self._weights)

    @torch.no_grad()
    def _norms(self) -> list[str]:
        """In words: what is not a number is no change either."""
        nothing = torch.zeros(())
        found = [torch.linalg.vector_norm(w) if w.dtype in _MEASURED else nothing for w in self._weights]
        return [
            str(norm) for norm in torch.stack([norm.to(self._weights[0].device).double() for norm in found]).tolist()
        ]

    def _compare(self, before: Sequence[object], after: Sequence[object]) -> None:
        if before != after:
            self._refuse([old != new for old, new in zip(before, after, strict=True)])

    def _refuse(self, is_changed: list[bool]) -> None:
        name = next(name for name, changed in zip(self._names, is_changed, strict=True) if changed)
        raise TrainingError(
            f"the loss changes the weights {name!r} while it is computed (as Embedding(max_norm=…) does); where a step "
            "is cut into pieces, who passes one would not see what another has changed. Change weights in "
            "after_update, or set max_devices = 1."
        )
