"""The devices of this machine that jobs are placed on: sets of cores, or GPUs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LocalDevice:
    """One device: a set of cores, or a GPU with the cores that feed it."""

    id: int  # as in the cluster
    name: str  # cpu:0, cuda:0
    kind: str  # cpu1 (one core), cpu2, or the GPU's model
    cores: tuple[int, ...] = ()
    cuda: int | None = None  # index of the GPU
    memory_bytes: int = 0  # 0: unknown, not checked
