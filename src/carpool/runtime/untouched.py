"""The weights of a model while pieces of a step are passed: only the update may change them.

Where several devices pass the pieces, each would change weights of its own, see nothing of what the others did, and
they would part without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from carpool.runtime.errors import TrainingError

_MEASURED = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128})


class Untouched:
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
        return [weight._version for weight in self._weights]

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
