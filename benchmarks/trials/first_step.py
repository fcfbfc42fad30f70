"""Cold start and run without switches: a fresh interpreter that makes a training's steps.

Usage: python -m trials.first_step MODEL DEVICE STEPS STAMPS; prints the time (seconds since the epoch) when the first
step was done, and the digest of the weights at the end.
"""

from __future__ import annotations

import sys
import time

import torch
from trials.timed import arguments, stamped

from carpool.runtime.engine.determinism import seed_entry
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.state.digest import digest

if __name__ == "__main__":
    model, kind, steps, stamps = sys.argv[1:]
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    if kind == "cpu":
        torch.set_num_threads(1)  # as on a device of one core
    seed_entry(0)
    trainer = Trainer(stamped(steps=int(steps), stamps=stamps, **arguments(model)), device=device)
    trainer.step()
    trainer.synchronize()
    print(time.time(), flush=True)
    for _ in trainer.steps():
        pass
    print(digest(trainer.training.model), flush=True)
