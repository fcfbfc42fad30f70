"""All input modes give the same batches, whatever was prefetched and whichever reader fails."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import carpool
from carpool.core.errors import InputError
from carpool.runtime.data.batches import DATA_FRACTION, AugmentRandom, BatchSource, InputMode, InputPlan, plan_input
from carpool.runtime.data.datasets import TensorData
from carpool.runtime.data.nested import map_leaves, nested_tensors
from carpool.runtime.data.prefetch import BatchRequest, ReaderPool
from carpool.runtime.engine.trainer import Trainer

CPU = torch.device("cpu")


class Pair(NamedTuple):
    """A batch with names."""

    inputs: Tensor
    labels: Tensor


class Drawn:
    """A map-style dataset that draws random numbers from all three generators while being read."""

    def __init__(self, fail_at: int = -1) -> None:
        self.fail_at = fail_at

    def __len__(self) -> int:
        return 50

    def __getitem__(self, sample: int) -> tuple[Tensor, int]:
        if sample == self.fail_at:
            raise KeyError(f"sample {sample} is missing")
        noise = random.random() + float(np.random.rand())  # noqa: NPY002 - what users do
        return torch.rand(4) + noise + sample, sample % 3


def collate(rows: list[Any]) -> Pair:
    return Pair(torch.stack([row[0] for row in rows]) + torch.rand(()), torch.tensor([row[1] for row in rows]))


def shift(batch: Any, rng: AugmentRandom) -> Any:
    return batch[0] + rng.uniform(), *batch[1:]


def training(dataset: Any, **more: Any) -> carpool.Training:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
    return carpool.Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        dataset=dataset,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batch_size=12,
        stop=carpool.Stop(epochs=3),
        **more,
    )


def trained(trainer: Trainer) -> str:
    for _ in trainer.steps():
        pass
    return carpool.digest(trainer.training.model)


# -- plan_input -----------------------------------------------------------------------------------------------------


@given(data=st.integers(0, 1 << 40), free=st.integers(0, 1 << 40))
def test_rows_are_kept_on_a_gpu_if_they_fit(data: int, free: int) -> None:
    plan = plan_input(on_gpu=True, row_bytes=data, free_bytes=free, is_map_style=False)
    assert (plan.mode is InputMode.ON_DEVICE) == (data <= free * DATA_FRACTION)
    assert plan.mode in {InputMode.ON_DEVICE, InputMode.PREFETCH}
    assert "MiB" in plan.reason


def test_input_modes_of_other_data() -> None:
    def mode(**case: Any) -> tuple[InputMode, int]:
        given = {"on_gpu": False, "row_bytes": None, "free_bytes": 0, "is_map_style": False} | case
        plan = plan_input(**given)
        return plan.mode, plan.readers

    assert mode() == mode(row_bytes=5) == mode(on_gpu=True) == mode(is_map_style=True) == (InputMode.HOST, 0)
    assert mode(is_map_style=True, on_gpu=True) == (InputMode.READERS, 2)
    assert mode(is_map_style=True, on_gpu=True, readers=0) == (InputMode.HOST, 0)
    assert mode(is_map_style=True, readers=3) == (InputMode.READERS, 3)


# -- input modes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("mode", [InputMode.ON_DEVICE, InputMode.PREFETCH])
def test_rows_give_the_same_training_in_every_mode(mode: InputMode, exact: bool) -> None:
    def made(mode: InputMode) -> Trainer:
        rng = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (50, 4), generator=rng, dtype=torch.uint8)
        data = TensorData(images, torch.arange(50) % 3, finish=lambda rows: (rows[0].float() / 255, rows[1]))
        trainer = Trainer(training(data, augment=shift), exact=exact, shards=4)
        trainer._passes.batches = BatchSource(data, seed=0, augment=shift, plan=InputPlan(mode, "forced"))
        assert trainer._passes.batches.plan.mode is mode
        return trainer

    assert trained(made(mode)) == trained(made(InputMode.HOST))


@pytest.mark.parametrize("mode", [InputMode.HOST, InputMode.ON_DEVICE, InputMode.PREFETCH])
def test_random_numbers_in_finish_depend_on_the_samples(mode: InputMode) -> None:
    def jittered(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (rows[0] + torch.rand(len(rows[0]), 1), *rows[1:])

    data = TensorData(torch.zeros(8, 4), torch.arange(8), finish=jittered)
    samples = BatchSource(data, seed=0, plan=InputPlan(InputMode.HOST, "forced"))
    few, device = np.arange(3), torch.device("cpu")
    expected = samples.fetch(0, few, device)[0]
    other = BatchSource(data, seed=0, plan=InputPlan(mode, "forced"))
    torch.rand(5)  # other draws in the process
    assert torch.equal(other.fetch(0, few, device)[0], expected)
    assert not torch.equal(other.fetch(1, few, device)[0], expected)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_readers_give_the_same_training(workers: int, exact: bool) -> None:
    def made(workers: int) -> Trainer:
        return Trainer(training(Drawn(), collate=collate, workers=workers), exact=exact, shards=4)

    trainer = made(workers)
    assert any("read ahead by" in note for note in trainer.notes)
    assert trained(trainer) == trained(made(0))


def test_batches_are_made_on_the_host_if_the_device_differs_in_bits() -> None:
    calls = []

    def finish(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        calls.append(1)
        return (rows[0] + len(calls),)  # as if rounding differed

    samples = BatchSource(
        TensorData(torch.zeros(8), finish=finish), seed=0, plan=InputPlan(InputMode.ON_DEVICE, "forced")
    )
    assert samples.plan.mode is InputMode.HOST
    assert "bits" in samples.notes[0]


@given(
    expected=st.lists(st.integers(0, 5), max_size=12),
    guesses=st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=12, max_size=12),
)
def test_a_wrong_prefetch_changes_nothing(expected: list[int], guesses: list[list[int]]) -> None:
    data = TensorData(torch.arange(60).view(30, 2))
    samples = BatchSource(data, seed=0, plan=InputPlan(InputMode.PREFETCH, "forced"))

    def numbers(batch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.arange(batch * 5, batch * 5 + 5, dtype=np.int64)

    for batch, guess in zip(expected, guesses, strict=False):
        samples.prefetch([BatchRequest(0, numbers(each)) for each in guess])
        samples.start_copy()
        (rows,) = samples.fetch(0, numbers(batch), CPU)
        assert torch.equal(rows, data.tensors[0][batch * 5 : batch * 5 + 5])


def test_the_reader_pool_survives_wrong_prefetches_and_a_killed_reader() -> None:
    readers = ReaderPool(lambda epoch, samples: (epoch, samples.tolist(), os.getpid()), 2)
    asked = [BatchRequest(0, np.array([n, n + 1])) for n in range(5)]
    try:
        readers.prefetch(asked[:3])
        assert readers.take(0, np.array([1, 2]))[:2] == (0, [1, 2])
        assert readers.take(1, np.array([9]))[2] == os.getpid(), "it was not prefetched"
        readers.prefetch(asked[3:])
        _, _, pid = readers.take(0, np.array([3, 4]))
        assert pid != os.getpid()
        os.kill(pid, signal.SIGKILL)
        for request in asked:
            readers.prefetch([request])
            assert readers.take(*request)[:2] == (0, request.samples.tolist())
    finally:
        readers.close()
    assert readers.depth == 0


def test_an_error_of_the_dataset_is_raised_unchanged(capfd: pytest.CaptureFixture[str]) -> None:
    samples = BatchSource(Drawn(fail_at=3), seed=0, workers=1)
    samples.prefetch([BatchRequest(0, np.array([2, 3]))])
    with pytest.raises(KeyError, match="sample 3 is missing"):
        samples.fetch(0, np.array([2, 3]), CPU)


def test_readers_end_with_their_batch_source() -> None:
    samples = BatchSource(Drawn(), seed=0, workers=1)
    assert samples._readers is not None
    pid = samples._readers._idle[0]._process.pid
    assert Path(f"/proc/{pid}").exists()
    del samples
    assert not Path(f"/proc/{pid}").exists()


def test_tensors_of_nested_batches() -> None:
    batch = {"x": torch.zeros(2, 3), "more": (torch.zeros(4, dtype=torch.int64), ["words", 3])}
    assert [tensor.shape for tensor in nested_tensors(batch)] == [(2, 3), (4,)]
    assert map_leaves(batch, type) == {"x": Tensor, "more": (Tensor, [str, int])}
    assert map_leaves(Pair(torch.zeros(1), torch.ones(1)), len) == (1, 1)


def test_a_negative_number_of_workers_is_rejected() -> None:
    with pytest.raises(InputError, match="workers is -1"):
        training(Drawn(), workers=-1)
