"""A plain training script: ``python train.py NAME STEPS``."""

import sys
from typing import Any

import torch
from parts import find
from torch.utils.data import DataLoader


def moved(batch: Any, device: str) -> Any:
    """A batch on the device."""
    if isinstance(batch, dict):
        return {key: value.to(device) for key, value in batch.items()}
    return [value.to(device) for value in batch]


if __name__ == "__main__":
    name, steps = sys.argv[1], int(sys.argv[2])
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = find(name)
    parts.model.to(device)
    done = 0
    while done < steps:
        for each in DataLoader(parts.data, parts.batch_size, shuffle=True):
            batch = moved(each, device)
            if parts.step is not None:
                parts.step(parts.model, batch, parts.optimizer)
            elif parts.loss is not None:
                parts.optimizer.zero_grad()
                loss = parts.loss(parts.model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                parts.optimizer.step()
            done += 1
            if done == steps:
                break
    torch.save(parts.model.state_dict(), f"{name}.pt")
