"""The reference itself, against a loop that shares no line with carpool: data order, seeds, shards, tree and digest."""

import hashlib
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import carpool
from carpool.testing.reference import plain_loop

SAMPLES, BATCH, EPOCHS, SHARDS, SEED = 100, 40, 3, 8, 3


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def key(*words: object) -> int:
    digest = hashlib.blake2b(":".join(map(str, words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def reseed(number: int) -> None:
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)  # noqa: NPY002
    torch.manual_seed(number)


def made() -> tuple[nn.Module, Tensor, Tensor]:
    reseed(key("entry", SEED))
    drawn = torch.Generator().manual_seed(5)
    inputs, labels = torch.randn(SAMPLES, 6, generator=drawn), torch.randint(0, 3, (SAMPLES,), generator=drawn)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3)), inputs, labels


def added(made: list[list[Tensor]]) -> list[Tensor]:
    if len(made) == 1:
        return made[0]
    left, right = added(made[: len(made) // 2]), added(made[len(made) // 2 :])
    return [a + b if a.is_floating_point() else a for a, b in zip(left, right, strict=True)]


def weights_digest(model: nn.Module) -> str:
    total = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        kind = str(value.dtype).removeprefix("torch.")
        total.update(f"{name}\0{kind}{tuple(value.shape)}".encode() + value.numpy().tobytes())
    return total.hexdigest()


def by_hand(shards: int) -> str:
    """Adam over shards: the mean of each times its part of the samples, everything added in one binary tree."""
    model, inputs, labels = made()
    parameters, buffers = list(model.parameters()), list(model.buffers())
    optimizer = torch.optim.Adam(parameters, lr=0.01, foreach=True)
    for step in range(EPOCHS * -(-SAMPLES // BATCH)):
        epoch, start = divmod(step * BATCH, -(-SAMPLES // BATCH) * BATCH)
        order = np.argsort(np.random.Philox(key=key("order", SEED, epoch)).random_raw(SAMPLES), kind="stable")
        samples = order[start : start + BATCH]
        before = [buffer.clone() for buffer in buffers]
        passes = []
        for shard in range(shards):
            mine = samples[shard * len(samples) // shards : (shard + 1) * len(samples) // shards]
            for buffer, was in zip(buffers, before, strict=True):
                buffer.copy_(was)
            reseed(key("pass", SEED, step, shard))
            model.zero_grad()
            part = len(mine) / len(samples)
            loss = nn.functional.cross_entropy(model(inputs[mine]), labels[mine])
            (loss * part).backward()  # type: ignore[no-untyped-call]
            kept = [buffer * part if buffer.is_floating_point() else buffer.clone() for buffer in buffers]
            passes.append([*(p.grad.clone() for p in parameters if p.grad is not None), *kept])
        total = added(passes)
        for parameter, gradient in zip(parameters, total, strict=False):
            parameter.grad = gradient
        for buffer, value in zip(buffers, total[len(parameters) :], strict=True):
            buffer.copy_(value)
        optimizer.step()
    return weights_digest(model)


@pytest.mark.parametrize("shards", [None, SHARDS])
def test_the_reference_trains_as_a_loop_written_by_hand(shards: int | None) -> None:
    model, inputs, labels = made()
    training = carpool.Training(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        dataset=torch.utils.data.TensorDataset(inputs, labels),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batch_size=BATCH,
        stop=carpool.Stop(epochs=EPOCHS),
    )
    found = plain_loop(training, shards=shards, seed=SEED)
    assert found.digest == carpool.digest(model) == by_hand(shards or 1)
