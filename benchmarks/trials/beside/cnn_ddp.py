"""A residual CNN on images, as a script with DistributedDataParallel, started by torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from networks import pictures, residual_net
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from trials.clocked import Clock


def main(channels: int, batch_size: int, steps: int, cores: list[list[int]], folder: str) -> None:
    """Train on this rank's cores, going on from a checkpoint if there is one."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    os.sched_setaffinity(0, cores[rank])
    torch.set_num_threads(len(cores[rank]))
    torch.manual_seed(0)
    model = residual_net(channels)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    checkpoint = Path(folder) / "checkpoint.pt"
    step, epoch = 0, 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, epoch = state["step"], state["epoch"]
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    images, labels = pictures(2048)
    sampler = DistributedSampler(range(len(images)), size, rank, drop_last=True)  # type: ignore[arg-type]
    clock = Clock(folder)
    while step < steps:
        sampler.set_epoch(epoch)
        order = torch.tensor(list(sampler))
        for chosen in order.split(batch_size // size):
            optimizer.zero_grad(set_to_none=True)
            loss = cross_entropy(ddp(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            loss.item()
            step += 1
            clock(step)
            if step == steps:
                break
        epoch += 1
    if rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "epoch": epoch}
        torch.save(state, checkpoint.with_suffix(".part"))
        checkpoint.with_suffix(".part").rename(checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), [[int(c) for c in each.split(",")] for each in sys.argv[4].split(":")], sys.argv[5])
