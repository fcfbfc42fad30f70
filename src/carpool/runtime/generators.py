"""The state of the global generators of Python, NumPy and torch, as plain values that a checkpoint can hold."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def generators() -> dict[str, Any]:
    """Where all of them stand."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 - what users draw from
    return {
        "python": random.getstate(),
        "numpy": (kind, [int(key) for key in keys], position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
    }


def restore_generators(state: Mapping[str, Any]) -> None:
    """Let all of them go on from there; on a machine with other GPUs, those that are there."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002 - what users draw from
    torch.set_rng_state(state["torch"])
    for device, known in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(known, device)
