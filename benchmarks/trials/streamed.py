"""PipeSwitch-like baseline (our reading): a job's state is streamed in, group by group, while its first step runs.

Usage: python -m trials.streamed DEVICE MODEL…; prints a JSON line per model when its input ends.
One process, only the running job resident. Weights are in pinned memory, one flat buffer per group of layers (16
groups); layers wait for their group's copy alone, and momentum follows the weights. The cost is how much longer the
step takes than a resident one; copying the predecessor's state out, on the other direction of the link, is not
counted.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from trials.timed import arguments
from zoo_trainings import training

from carpool.runtime.engine.trainer import Trainer

_GROUPS = 16
_REPEATS = 9


class Stream:
    """Copies groups of parameters onto the device in the order in which the forward pass needs them."""

    def __init__(self, trainer: Trainer) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self._groups: list[tuple[list[torch.Tensor], list[torch.Tensor], torch.cuda.Event]] = []
        self._groups_of: dict[nn.Module, int] = {}
        modules = [m for m in trainer.training.model.modules() if list(m.parameters(recurse=False))]
        for number in range(_GROUPS):
            some = modules[number * len(modules) // _GROUPS : (number + 1) * len(modules) // _GROUPS]
            tensors = [tensor.data for module in some for tensor in module.parameters(recurse=False)]
            self._groups.append(self._group(tensors))
            self._groups_of |= dict.fromkeys(some, number)
        kept = [v for state in trainer.training.optimizer.state.values() for v in state.values()]
        self._groups.append(self._group([v for v in kept if isinstance(v, torch.Tensor) and v.is_cuda]))
        self.is_on = False
        for module in modules:
            module.register_forward_pre_hook(self._wait(self._groups_of[module]))
        trainer.training.optimizer.register_step_pre_hook(lambda *_: self._wait(_GROUPS)())

    def _group(self, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.cuda.Event]:
        size = sum(tensor.numel() for tensor in tensors)
        flat = torch.empty(size, pin_memory=True)
        pieces, start = [], 0
        for tensor in tensors:
            # In the tensor's own layout: else every copy would be turned on its way, which is not what is compared.
            pieces.append(flat[start : start + tensor.numel()].as_strided(tensor.size(), tensor.stride(), start))
            pieces[-1].copy_(tensor)
            start += tensor.numel()
        self.bytes += 4 * size
        return tensors, pieces, torch.cuda.Event()  # type: ignore[no-untyped-call]

    def _wait(self, number: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if self.is_on:
                torch.cuda.current_stream().wait_event(self._groups[number][2])

        return hook

    def begin(self) -> None:
        """Send everything."""
        with torch.cuda.stream(self._stream), torch.no_grad():
            for tensors, pieces, event in self._groups:
                for tensor, piece in zip(tensors, pieces, strict=True):
                    tensor.copy_(piece, non_blocking=True)
                event.record(self._stream)


def measure(model: str) -> dict[str, Any]:
    """How much longer a step takes whose state has to come first."""
    options = arguments(model)
    made = training(**{"name": options.pop("model"), "steps": 1000, **options}, seed=0)
    trainer = Trainer(made, device=torch.device("cuda", 0), graph=False)
    for _ in range(5):
        trainer.step()
    stream = Stream(trainer)
    took: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(2 * _REPEATS):
        stream.is_on = repeat % 2 == 1
        torch.cuda.synchronize()
        began = time.perf_counter()
        if stream.is_on:
            stream.begin()
        trainer.step()
        torch.cuda.synchronize()
        took[stream.is_on].append(1e3 * (time.perf_counter() - began))
    resident, streamed = (sorted(times)[_REPEATS // 2] for times in (took[False], took[True]))
    return {
        "model": model,
        "switch_ms": round(streamed - resident, 3),
        "step_ms": round(resident, 3),
        "megabytes": round(stream.bytes / 1e6, 1),
    }


if __name__ == "__main__":
    device, *models = sys.argv[1:]
    if device != "cuda":
        raise SystemExit("streaming needs a GPU")
    sys.stdin.read()  # so that it can be there before the device is free
    for each in models:
        try:
            print(json.dumps(measure(each)), flush=True)
        except Exception as error:  # noqa: BLE001 - the others go on
            print(json.dumps({"model": each, "error": f"{type(error).__name__}: {error}"}), flush=True)
        torch.cuda.empty_cache()
