"""Measures the cost of swapping a parked job in where there is room for it.

Usage: python -m trials.parked MODEL…; prints a JSON line per model (batch size behind a colon) when its input ends.
One process with captured steps leaves the device wholly and returns; the GPU's global timer gives the command, the
begin and the end of its next step. ``begin_ms`` is device idle time: the forward pass waits for the weights alone.
``whole_ms`` is how much later the step ends.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from typing import Any

import torch
from trials.copying import copy_rates
from trials.timed import BEGIN, END, Clock, arguments
from zoo_trainings import training

from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.memory.device_state import DeviceState, new_device_state

_SETTLED, _REPEATS = 10, 9


class Parked:
    """A training whose memory leaves and comes back."""

    def __init__(self, model: str, device: torch.device) -> None:
        options = arguments(model)
        made = training(**{"name": options.pop("model"), "steps": 1000, **options}, seed=0)
        self._clock, loss = Clock(), made.loss

        def timed(net: torch.nn.Module, batch: Any) -> Any:
            self._clock.stamp(BEGIN, device)
            return loss(net, batch)

        made.optimizer.register_step_post_hook(lambda *_: self._clock.stamp(END, device))
        self._trainer = Trainer(replace(made, loss=timed, evaluate=None), device=device)
        self.residence: DeviceState = new_device_state(self._trainer, tolerant=False)
        self._device = device
        for _ in range(_SETTLED):
            self._step()
            self.residence.enter_region()

    def resident_ms(self) -> tuple[float, float]:
        """From a stamp to the begin of a step that finds its memory in place, and to its end."""
        return self._timed()

    def parked_ms(self) -> tuple[float, float]:
        """The same of a step that has to have its memory first."""
        self.residence.swap_out(include_state=True)
        return self._timed()

    def _timed(self) -> tuple[float, float]:
        torch.cuda.synchronize(self._device)
        self._clock.stamp(END, self._device)
        self._step()
        torch.cuda.synchronize(self._device)
        called, begun, ended = (stamp >> 1 for stamp in self._clock.last(3))
        return (begun - called) / 1e6, (ended - called) / 1e6

    def _step(self) -> None:
        residence, trainer = self.residence, self._trainer
        residence.swap_in()
        residence.await_weights()
        step = trainer.next_step()
        loss = trainer.single_pass(step)
        residence.await_state()
        residence.mark_dirty()
        trainer.advance(step, trainer.apply_single_pass(step, loss))


def measure(model: str, rate: float) -> dict[str, Any]:
    """One model, against what its bytes take at the measured rate."""
    job = Parked(model, torch.device("cuda", 0))
    resident = [job.resident_ms() for _ in range(_REPEATS)]
    parked = [job.parked_ms() for _ in range(_REPEATS)]
    (begin, end), (late_begin, late_end) = (
        [statistics.median(each) for each in zip(*rows, strict=True)] for rows in (resident, parked)
    )
    state = job.residence.memory_need().state
    copy_ms = 1e3 * state / rate
    return {
        "model": model,
        "state_megabytes": round(state / 1e6, 1),
        "copy_ms": round(copy_ms, 3),
        "begin_ms": round(late_begin - begin, 3),
        "whole_ms": round(late_end - end, 3),
        "ratio": round((late_end - end) / copy_ms, 3),
        "step_ms": round(end - begin, 3),
    }


if __name__ == "__main__":
    sys.stdin.read()  # so that it can be there before the device is free
    copied = copy_rates()["in"]
    for each in sys.argv[1:]:
        try:
            print(json.dumps(measure(each, copied)), flush=True)
        except Exception as error:  # noqa: BLE001 - the others go on
            print(json.dumps({"model": each, "error": f"{type(error).__name__}: {error}"}), flush=True)
        torch.cuda.empty_cache()
