"""Entries of federated trainings of models as published, on noise in the shape of CIFAR-10's pictures."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import carpool
from carpool.runtime.data.datasets import TensorData

sys.path.append(str(Path(__file__).resolve().parents[1]))

from zoo_trainings import RECIPES, training


def published(model: str, batch: int, samples: int, image: int = 32, **sizes: Any) -> carpool.Training:
    """As benchmarks/colocation/seat.py trains it, with so many samples."""
    lr = RECIPES[model].lr * 1e-3  # not to diverge on noise
    made = training(model, batch, steps=1, lr=lr, **sizes)
    data = TensorData(torch.randn(samples, 3, image, image), torch.arange(samples) % sizes.get("classes", 10))
    return replace(made, dataset=data, evaluate=None, precision="tf32", channels_last=True)
