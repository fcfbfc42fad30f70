"""A plain training script: ``python train.py NAME STEPS``."""

import sys

import torch
from parts import ALL
from torch.utils.data import DataLoader

if __name__ == "__main__":
    name, steps = sys.argv[1], int(sys.argv[2])
    torch.manual_seed(0)
    parts = ALL[name]()
    done = 0
    while done < steps:
        for batch in DataLoader(parts.data, parts.batch_size, shuffle=True):
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
