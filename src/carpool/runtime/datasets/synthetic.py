"""Made-up data of given shapes, for measuring speed and for tests: it can be learned, and is the same everywhere."""

from __future__ import annotations

import numpy as np
import torch

from carpool.core.errors import InputError
from carpool.runtime.chance import uniforms
from carpool.runtime.datasets.tensors import Split, TensorData


def synthetic(
    shape: tuple[int, ...] = (3, 32, 32), classes: int = 10, size: int = 1024, test_size: int = 0, seed: int = 0
) -> Split:
    """Noise around one random centre per class: inputs of ``shape``, labels below ``classes``."""
    if size < 1 or classes < 1 or test_size < 0:
        raise InputError(f"size is {size}, classes {classes}, test_size {test_size}; they must be positive")
    width = int(np.prod(shape))
    total = size + (test_size or max(1, size // 5))
    labels = torch.arange(total) % classes
    centres = torch.from_numpy(uniforms(2 * seed, np.arange(classes, dtype=np.int64), range(width))) - 0.5
    noise = torch.from_numpy(uniforms(2 * seed + 1, np.arange(total, dtype=np.int64), range(width))) - 0.5
    inputs = (centres[labels] + 2.0 * noise).view(total, *shape)
    return Split(TensorData(inputs[:size], labels[:size]), TensorData(inputs[size:], labels[size:]))
