"""Synchronized BatchNorm over the parts of a step equals BatchNorm over the whole batch."""

from __future__ import annotations

import copy
import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from carpool.core.errors import InputError
from carpool.runtime.process.shared_memory import new_memory_file
from carpool.runtime.reduce.reducer import StepAborted
from carpool.runtime.reduce.shm_layout import ShmLayout
from carpool.runtime.reduce.sync_batchnorm import ShmAllGather, SyncBatchNorms, all_gather_bytes

CLOSE = 1e-5


def network(**norm: Any) -> nn.Module:
    torch.manual_seed(0)
    pictures = [nn.Conv2d(2, 5, 3, bias=False), nn.BatchNorm2d(5, **norm), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*pictures, nn.Linear(80, 7, bias=False), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


def a_step(number: int, parts: tuple[int, ...]) -> Any:
    """The attributes of a step that `ShmAllGather` uses."""
    return SimpleNamespace(number=number, bounds=tuple(itertools.pairwise(itertools.accumulate(parts, initial=0))))


def gradients_and_buffers(model: nn.Module) -> dict[str, Tensor]:
    gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients | dict(model.named_buffers())


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).double().norm() / theirs.double().norm().clamp_min(1e-12))


def in_parts(model: nn.Module, batches: list[tuple[Tensor, Tensor]], parts: tuple[int, ...]) -> list[nn.Module]:
    """Train copies of the model in threads, one per part, and return them."""
    copies = [copy.deepcopy(model) for _ in parts]
    norms = [SyncBatchNorms(each) for each in copies]
    slots = ShmLayout(
        tuple((rank, rank + 1) for rank in range(len(parts))), 64 + all_gather_bytes(norms[0].vector_size)
    )
    fd = new_memory_file("test", slots.num_bytes)
    for rank, norm_layers in enumerate(norms):
        norm_layers.all_gather = ShmAllGather(fd, slots, rank, 3, norm_layers.vector_size, lambda: False)

    def work(rank: int) -> None:
        all_gather = norms[rank].all_gather
        assert all_gather is not None
        for number, (inputs, targets) in enumerate(batches):
            sizes = tuple(part * len(inputs) // sum(parts) for part in parts)
            step = a_step(number, (len(inputs) - sum(sizes[1:]), *sizes[1:]))
            start, end = step.bounds[rank]
            if start < end:
                all_gather.begin_step(step)
                copies[rank].zero_grad()
                loss = nn.functional.mse_loss(copies[rank](inputs[start:end]), targets[start:end])
                (loss * ((end - start) / len(inputs))).backward()

    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(work, range(len(parts))))
    return copies


@pytest.mark.parametrize("parts", [(18, 18), (20, 3, 13), (2, 34)])
@pytest.mark.parametrize("norm", [{}, {"momentum": None}, {"affine": False}], ids=str)
def test_gradients_and_running_statistics_are_those_of_one_device(parts: tuple[int, ...], norm: Any) -> None:
    model = network(**norm)
    batches = [(3.0 + 2.0 * torch.randn(36, 2, 6, 6), torch.randn(36, 3)) for _ in range(3)]
    copies = in_parts(model, batches, parts)
    for inputs, targets in batches:
        model.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    theirs = gradients_and_buffers(model)
    ours = [gradients_and_buffers(each) for each in copies]
    for name, expected in theirs.items():
        added = sum(each[name] for each in ours) if name.endswith(".grad") else ours[-1][name]
        assert isinstance(added, Tensor)
        assert relative(added, expected) < CLOSE, name


def test_a_rank_without_samples_skips_a_step() -> None:
    batches = [(torch.randn(size, 2, 6, 6), torch.randn(size, 3)) for size in (24, 8, 24)]
    model = network()
    copies = in_parts(model, batches, (17, 6, 1))  # of 8 samples the last part has none
    for inputs, targets in batches:
        model.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    for name, expected in gradients_and_buffers(model).items():
        if name.endswith(".grad"):
            assert (
                relative(sum((gradients_and_buffers(each)[name] for each in copies), torch.zeros(())), expected) < CLOSE
            ), name


def test_one_rank_and_eval_mode_use_torchs_layers() -> None:
    inputs = torch.randn(6, 2, 6, 6)
    plain, synchronized = network(), network()
    SyncBatchNorms(synchronized)
    assert torch.equal(plain(inputs), synchronized(inputs))
    plain.eval()
    synchronized.eval()
    assert torch.equal(plain(inputs), synchronized(inputs))
    assert torch.equal(copy.deepcopy(synchronized)(inputs), plain(inputs))


def test_waiting_can_be_aborted() -> None:
    norm_layers = SyncBatchNorms(network())
    slots = ShmLayout(((0, 1), (1, 2)), 64 + all_gather_bytes(norm_layers.vector_size))
    all_gather = ShmAllGather(
        new_memory_file("test", slots.num_bytes), slots, 0, 1, norm_layers.vector_size, lambda: True
    )
    all_gather.begin_step(a_step(0, (4, 4)))
    with pytest.raises(StepAborted):
        all_gather.gather(torch.ones(3, dtype=torch.float64))


def test_vectors_of_an_earlier_epoch_are_ignored() -> None:
    slots = ShmLayout(((0, 1), (1, 2)), 64 + all_gather_bytes(3))
    fd = new_memory_file("test", slots.num_bytes)
    old = ShmAllGather(fd, slots, 1, 1, 3, lambda: True)
    old.begin_step(a_step(9, (0, 4)))
    old.gather(torch.ones(3, dtype=torch.float64))
    new = ShmAllGather(fd, slots, 0, 2, 3, lambda: True)
    new.begin_step(a_step(0, (4, 4)))
    with pytest.raises(StepAborted):
        new.gather(torch.ones(3, dtype=torch.float64))


def test_subclasses_of_batchnorm_are_rejected() -> None:
    class Own(nn.BatchNorm1d):
        pass

    with pytest.raises(InputError, match=r"sync_batchnorm = true.*'0', a Own"):
        SyncBatchNorms(nn.Sequential(Own(3)))
