"""A cold start: an interpreter that imports everything, makes a training of the zoo, and makes one step.

Usage: python first_step.py MODEL DEVICE; prints the time (seconds since the epoch) when the step was done.
"""

from __future__ import annotations

import sys
import time

import torch

from carpool.runtime.trainer import Trainer
from carpool.runtime.zoo.trainings import training

if __name__ == "__main__":
    model, device = sys.argv[1:]
    trainer = Trainer(training(model, seed=0, steps=1), device=torch.device(device, 0) if device == "cuda" else device)
    trainer.step()
    trainer.await_device()
    print(time.time())
