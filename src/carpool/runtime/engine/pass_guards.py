"""Guards around a pass: snapshot and restore model buffers and flags, reject passes that modify weights."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from carpool.runtime.compat.torch_api import foreach_copy_, versions
from carpool.runtime.engine.flat_buffers import FlatLayout, group_by_dtype
from carpool.runtime.errors import TrainingError

_NORMED = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128})


class BufferSnapshot:
    """A copy of all model buffers, in memory reused by every step.

    It is taken in every step, when caches are cold and each Python object touched is slow. So the grouping by dtype is
    kept as long as the buffers are the same tensors.
    """

    def __init__(self, layout: FlatLayout) -> None:
        self._layout = layout
        self._buffers: list[Tensor] = []
        self._shapes: list[torch.Size] = []
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []
        self.contents: list[Tensor] = []

    def take(self) -> None:
        buffers = self._layout.buffers()
        if not buffers:
            return
        if len(buffers) != len(self._buffers) or not all(map(operator.is_, buffers, self._buffers)):
            self._buffers = buffers
            self._shapes = [buffer.shape for buffer in buffers]
            self.contents = [torch.empty_like(buffer) for buffer in buffers]
            self._groups = group_by_dtype(self.contents, buffers)
        with torch.no_grad():
            for contents, same_dtype_buffers in self._groups:
                foreach_copy_(contents, same_dtype_buffers)

    def restore(self) -> None:
        self._layout.restore_buffers(self._buffers, self.contents)

    def check_shapes(self) -> None:
        self._layout.check_no_new_buffers()
        if not self._buffers:
            return
        shapes = [buffer.shape for buffer in self._layout.buffers()]
        if shapes == self._shapes:
            return
        for ref, old, new in zip(self._layout.buffer_refs, self._shapes, shapes, strict=True):
            if new != old:
                raise TrainingError(f"buffer {ref.name!r} changed its shape from {tuple(old)} to {tuple(new)}")


class ModelFlags:
    """Which parameters require a gradient and which modules train: ``after_update`` may change both (unfreezing).

    A state holds the flags that differ from those that the entry set.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._initial = self._read()

    def _read(self) -> dict[str, bool]:
        parameters = {name: parameter.requires_grad for name, parameter in self._model.named_parameters()}
        return parameters | {name: module.training for name, module in self._model.named_modules()}

    def changes(self) -> dict[str, bool]:
        return {name: flag for name, flag in self._read().items() if flag != self._initial.get(name, flag)}

    def load(self, changes: Mapping[str, bool]) -> None:
        wanted = {**self._initial, **changes}
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad = wanted.get(name, parameter.requires_grad)
        for name, module in self._model.named_modules():
            module.training = wanted.get(name, module.training)


class MutationGuard:
    """Rejects a pass that modifies weights: the devices that compute the pieces of a step would silently diverge.

    In-place changes raise torch's version counters. Changes that bypass them (``weight.data.clamp_(…)``) show in the
    norms of the weights, which are compared around the first pass only because they read all weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = [name for name, _ in model.named_parameters()]
        self._weights = list(model.parameters())
        self._norms_checked = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        before = versions(self._weights)
        norms = None if self._norms_checked else self._norms()
        yield
        self._compare(before, versions(self._weights))
        if norms is not None:
            self._compare(norms, self._norms())
            self._norms_checked = True

    def stamp(self) -> list[object]:
        """A value that changes with every weight, in-place or not; waits for the device."""
        return [*versions(self._weights), *self._norms()]

    @torch.no_grad()
    def _norms(self) -> list[str]:
        """As strings, so that NaN equals NaN."""
        zero = torch.zeros(())
        norms = [torch.linalg.vector_norm(w) if w.dtype in _NORMED else zero for w in self._weights]
        stacked = torch.stack([norm.to(self._weights[0].device).double() for norm in norms])
        return [str(norm) for norm in stacked.tolist()]

    def _compare(self, before: Sequence[object], after: Sequence[object]) -> None:
        if before == after:
            return
        name = next(name for name, old, new in zip(self._names, before, after, strict=True) if old != new)
        raise TrainingError(
            f"the loss function modified the weights {name!r} (as Embedding(max_norm=…) does): the devices that "
            "compute a step would diverge. Modify weights in after_update, or set max_devices = 1."
        )


def has_extra_state(model: nn.Module) -> bool:
    """Whether a module keeps state that is neither parameter nor buffer."""
    return any(type(module).get_extra_state is not nn.Module.get_extra_state for module in model.modules())
