"""Seeds, deterministic settings, and samples that do not depend on the process that reads them."""

from __future__ import annotations

import os
import random
import warnings
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import InputError
from carpool.runtime.data.batches import AugmentRandom, BatchSource, to_device
from carpool.runtime.data.datasets import TensorData
from carpool.runtime.engine.determinism import (
    NondeterministicOps,
    derive,
    enable_determinism,
    reseed,
    seed_entry,
    seed_pass,
)

CPU = torch.device("cpu")


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002 - what users do


def test_all_three_generators_are_seeded() -> None:
    seed_entry(1)
    first = drawn()
    drawn()
    seed_entry(1)
    assert drawn() == first
    seed_entry(2)
    assert not set(drawn()) & set(first)


def test_every_pass_has_its_own_seed() -> None:
    seen = set()
    for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]:
        seed_pass(*key)
        seen.add(drawn())
    assert len(seen) == 4


@given(st.integers(0, 2**63), st.integers(0, 300), st.integers(0, 2), st.integers(0, 2))
def test_the_seed_of_a_pass_depends_on_its_position_only(seed: int, step: int, piece: int, number: int) -> None:
    seed_pass(seed, step, piece, number)
    found = drawn()
    reseed(derive("pass", seed, step, piece, *([number] if number else [])))
    assert drawn() == found


def test_deterministic_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert enable_determinism() == []
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.backends.cudnn.benchmark
    assert not torch.isnan(torch.empty(1000)).all(), "new tensors are not filled"


@pytest.mark.parametrize("autotunes", [False, True])
def test_cudnn_autotuning_is_left_to_the_entry_without_determinism(
    monkeypatch: pytest.MonkeyPatch, autotunes: bool
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", autotunes)
    (note,) = enable_determinism(deterministic=False)
    assert "deterministic = false" in note
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark == autotunes
    enable_determinism()


def test_settings_after_cuda_started_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    (note,) = enable_determinism()
    assert "CUBLAS_WORKSPACE_CONFIG" in note


def test_nondeterministic_operations_are_collected_and_other_warnings_shown_once() -> None:
    shown: list[str] = []
    ops = NondeterministicOps()
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *rest, **more: shown.append(str(message))
        for _ in range(3):
            with ops.collect():
                warnings.warn("flash_backward defaults to a non-deterministic algorithm. To be sure …", stacklevel=1)
                warnings.warn("kthvalue CUDA does not have a deterministic implementation, but you …", stacklevel=1)
                warnings.warn("your model is old", stacklevel=1)
    assert ops.operations == ["flash_backward", "kthvalue CUDA"]
    assert shown == ["your model is old"]


def test_nested_collection_survives_changed_filters() -> None:
    shown: list[str] = []
    ops = NondeterministicOps()
    unsure = "{} does not have a deterministic implementation, but you …"
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *rest, **more: shown.append(str(message))
        with ops.collect():
            with ops.collect():
                warnings.warn(unsure.format("first"), stacklevel=1)
            warnings.filterwarnings("ignore")  # as user code may do
            with ops.collect():
                warnings.warn(unsure.format("second"), stacklevel=1)
            warnings.simplefilter("default")
            with ops.collect():
                warnings.warn("your model is old", stacklevel=1)
        warnings.warn(unsure.format("third"), stacklevel=1)
    assert ops.operations == ["first", "second"]
    assert shown == ["your model is old", unsure.format("third")]


def test_augmentation_depends_on_the_sample() -> None:
    many, few = AugmentRandom(0, 1, np.arange(10)), AugmentRandom(0, 1, np.array([7, 2]))
    assert torch.equal(many.uniform(3)[[7, 2]], few.uniform(3))
    second = many.uniform(3)
    assert not torch.equal(second, AugmentRandom(0, 1, np.arange(10)).uniform(3)), "each call returns new numbers"
    assert torch.equal(second[[7, 2]], few.uniform(3))
    assert not torch.equal(AugmentRandom(0, 2, np.arange(10)).uniform(1), AugmentRandom(0, 1, np.arange(10)).uniform(1))
    numbers = AugmentRandom(0, 0, np.arange(1000)).integers(-2, 3)
    assert sorted(set(numbers.flatten().tolist())) == [-2, -1, 0, 1, 2]


class Noisy(torch.utils.data.Dataset[Any]):
    """A dataset that draws while it is read, as torchvision's transforms do."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, sample: int) -> tuple[torch.Tensor, int]:
        return torch.rand(3) + random.random(), sample


def test_reading_sample_by_sample_does_not_depend_on_the_split() -> None:
    samples = BatchSource(Noisy(), seed=0)
    whole = samples.fetch(0, np.array([4, 9, 1]), CPU)
    part = samples.fetch(0, np.array([9]), CPU)
    assert torch.equal(whole[0][1:2], part[0])
    assert whole[1].tolist() == [4, 9, 1]
    assert not torch.equal(samples.fetch(1, np.array([9]), CPU)[0], part[0])


class NoisyBatches:
    """A dataset that draws random numbers in batch()."""

    def __len__(self) -> int:
        return 20

    def batch(self, samples: torch.Tensor) -> torch.Tensor:
        return samples + torch.rand(len(samples))


@pytest.mark.parametrize(
    "samples",
    [
        BatchSource(NoisyBatches(), seed=0),
        BatchSource(list(range(20)), seed=0, collate=lambda rows: torch.rand(len(rows))),
    ],
    ids=["batch", "collate"],
)
def test_a_batch_does_not_depend_on_what_ran_before(samples: BatchSource) -> None:
    first = samples.fetch(2, np.array([4, 9, 1]), CPU)
    torch.rand(7)
    assert torch.equal(samples.fetch(2, np.array([4, 9, 1]), CPU), first)
    assert not torch.equal(samples.fetch(3, np.array([4, 9, 1]), CPU), first)


def test_a_dataset_without_batches_trains_like_one_with(make_training: Any) -> None:
    from carpool.runtime.engine.trainer import Trainer

    fast = make_training()
    slow = make_training(dataset=torch.utils.data.TensorDataset(*fast.dataset.tensors))
    assert [d.loss for d in Trainer(fast).steps()] == [d.loss for d in Trainer(slow).steps()]


def test_collate_and_augment() -> None:
    samples = BatchSource(
        Noisy(), seed=0, collate=lambda rows: [row[1] for row in rows], augment=lambda batch, rng: [*batch, "x"]
    )
    assert samples.fetch(0, np.array([3, 5]), CPU) == [3, 5, "x"]
    with pytest.raises(InputError, match="augment returned None"):
        BatchSource(TensorData(torch.zeros(4)), seed=0, augment=lambda batch, rng: None).fetch(0, np.array([0]), CPU)


def test_nested_batches_are_moved_to_the_device() -> None:
    Pair = namedtuple("Pair", "x y")
    batch = {"a": torch.zeros(1), "b": [torch.zeros(2), 3], "c": Pair(torch.zeros(3), "text")}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"].device.type == moved["b"][0].device.type == moved["c"].x.device.type == "meta"
    assert (moved["b"][1], moved["c"].y) == (3, "text")
