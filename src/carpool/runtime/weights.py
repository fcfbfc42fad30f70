"""Weights out of a checkpoint, as PyTorch itself saves them."""

from __future__ import annotations

from pathlib import Path

import torch

from carpool.core.errors import InputError
from carpool.runtime.checkpoint import load
from carpool.runtime.errors import CheckpointError


def export_weights(checkpoint: Path, target: Path) -> None:
    """Write the model's ``state_dict()`` for ``model.load_state_dict(torch.load(target))``."""
    try:
        state = load(checkpoint)
    except CheckpointError as error:
        raise InputError(str(error), way_out="Another checkpoint may be whole: see the job's folder.") from None
    draft = target.with_name(f".{target.name}.part")
    try:
        torch.save(state["model"], draft)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
