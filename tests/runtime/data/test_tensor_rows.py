"""Datasets held in tensors are gathered by index, and give the batches that collating samples one by one gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset, default_collate, random_split

from carpool.runtime.data import batches
from carpool.runtime.data.batches import BatchSource, HostBatchReader, InputMode, InputPlan
from carpool.runtime.data.datasets import TensorData
from carpool.runtime.data.tensor_rows import same_batch, tensor_rows
from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.engine.training import Training
from carpool.runtime.state.digest import digest
from carpool.testing.reference import plain_loop
from tests.runtime.fake_capture import FakeCapture

SIZE, CPU = 40, torch.device("cpu")


class Point(NamedTuple):
    """A sample with names."""

    inputs: Tensor
    label: int


def made(first: int = 0, size: int = SIZE) -> TensorDataset:
    rng = torch.Generator().manual_seed(first)
    inputs = torch.randn(size, 3, 2, generator=rng)
    inputs[1, 0, 0] = float("nan")
    return TensorDataset(inputs, torch.arange(first, first + size) % 5, torch.rand(size, generator=rng) > 0.5)


def hugging_face(columns: dict[str, Any], kind: str = "torch") -> Any:
    """An object with the type name and methods of a Hugging Face dataset, whose ``batch`` takes a size."""

    class Dataset:
        """The part of ``datasets.Dataset`` that matters here."""

        format = {"type": kind}  # noqa: RUF012
        data = np.zeros(8)

        def __len__(self) -> int:
            return len(next(iter(columns.values())))

        def __getitem__(self, key: Any) -> dict[str, Any]:
            return {name: values[key] for name, values in columns.items()}

        def batch(self, batch_size: int) -> Any:
            raise AssertionError(batch_size)

    Dataset.__module__ = "datasets.arrow_dataset"
    return Dataset()


PLAIN: dict[str, Callable[[], Any]] = {
    "tensor dataset": made,
    "one tensor": lambda: TensorDataset(torch.randn(SIZE, 2)),
    "subset": lambda: Subset(made(), list(range(30, 2, -3))),
    "negative indices": lambda: Subset(made(), [-1, 3, -7]),
    "subset of a subset": lambda: Subset(Subset(made(), range(5, 35)), np.array([4, 4, 1, 29])),  # type: ignore[arg-type]
    "subset of tensor data": lambda: Subset(TensorData(*made().tensors), [9, 0, 21]),  # type: ignore[arg-type]
    "concat with tensor data": lambda: ConcatDataset([made(), TensorData(*made().tensors)]),  # type: ignore[list-item]
    "random split": lambda: random_split(made(), [25, 15], torch.Generator().manual_seed(3))[1],
    "concat": lambda: ConcatDataset([made(), Subset(made(7), [3, 1, 2]), made(9, 11)]),
    "stack": lambda: StackDataset(made(), torch.randn(SIZE, 2)),  # type: ignore[arg-type]
    "named stack": lambda: StackDataset(images=torch.randn(SIZE, 2), labels=torch.arange(SIZE)),  # type: ignore[arg-type]
    "tensor": lambda: torch.randn(SIZE, 4),
    "array": lambda: np.arange(3 * SIZE, dtype=np.int32).reshape(SIZE, 3),
    "tuples": lambda: [(torch.full((2,), float(i)), i % 3) for i in range(SIZE)],
    "named tuples": lambda: [Point(torch.full((2,), float(i)), i % 3) for i in range(SIZE)],
    "dicts": lambda: [{"x": np.full(2, i, np.float32), "y": 0.5 * i, "z": [bool(i % 2)]} for i in range(SIZE)],
    "list of tensors": lambda: list(torch.randn(SIZE, 3)),
    "Hugging Face torch": lambda: hugging_face({"ids": torch.arange(SIZE * 2).view(SIZE, 2), "y": torch.arange(SIZE)}),
    "Hugging Face numpy": lambda: hugging_face({"x": np.random.default_rng(0).random((SIZE, 2))}, "numpy"),
}


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_gathered_batches_equal_collated_samples(make: Callable[[], Any]) -> None:
    data = make()
    rows = tensor_rows(data, None)
    assert rows is not None
    assert len(rows) == len(data)
    chosen = np.array([1, 0, len(data) - 1, 1])
    expected = default_collate([data[int(each)] for each in chosen])
    for mode in (InputMode.HOST, InputMode.ON_DEVICE, InputMode.PREFETCH):
        source = BatchSource(data, seed=0, plan=InputPlan(mode, "forced"))
        assert source.plan.mode is mode
        assert same_batch(source.fetch(0, chosen, CPU), expected)
    gather = BatchSource(data, seed=0, plan=InputPlan(InputMode.ON_DEVICE, "forced")).gather_buffer(4)
    assert gather is not None
    gather.set_samples(chosen)
    gather.gather()
    assert same_batch(gather.batch, expected)


def halved(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(each / 2 for each in rows)


@pytest.mark.parametrize("mode", [InputMode.HOST, InputMode.ON_DEVICE, InputMode.PREFETCH])
def test_a_subset_of_tensor_data_is_finished_by_the_batch(mode: InputMode) -> None:
    data: Any = Subset(TensorData(*made().tensors, finish=halved), [30, 2, 7])  # type: ignore[arg-type]
    rows = tensor_rows(data, None)
    assert rows is not None
    chosen = np.array([2, 0, 2])
    source = BatchSource(data, seed=0, plan=InputPlan(mode, "forced"))
    assert source.plan.mode is mode
    assert same_batch(source.fetch(0, chosen, CPU), default_collate([data[int(each)] for each in chosen]))


def test_parts_that_are_finished_in_different_ways_are_read_sample_by_sample() -> None:
    def patched(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # only a sample that is not among those compared
        return (torch.where(rows[0] == 21, -1, rows[0]),)

    plain, other = TensorData(torch.arange(SIZE)), TensorData(torch.arange(SIZE), finish=patched)
    assert tensor_rows(ConcatDataset([plain, other]), None) is None  # type: ignore[list-item]
    assert tensor_rows(StackDataset(plain, other), None) is None  # type: ignore[arg-type]


@given(indices=st.lists(st.integers(-SIZE, SIZE - 1), min_size=1, max_size=20), data=st.data())
def test_any_subset_is_gathered(indices: list[int], data: Any) -> None:
    subset = Subset(made(), indices)
    rows = tensor_rows(subset, None)
    assert rows is not None
    chosen = data.draw(st.lists(st.integers(0, len(indices) - 1), min_size=1, max_size=9))
    assert same_batch(rows.batch(torch.tensor(chosen)), default_collate([subset[each] for each in chosen]))


class Doubled(TensorDataset):
    """A subclass with code of its own."""

    def __getitem__(self, sample: Any) -> Any:
        return tuple(each * 2 for each in super().__getitem__(sample))  # type: ignore[no-untyped-call]


class Jittered(Dataset[Any]):
    """Draws random numbers."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, sample: int) -> Any:
        return torch.rand(2) + sample, sample % 3


OTHER: dict[str, Callable[[], Any]] = {
    "subclass": lambda: Doubled(*made().tensors),
    "part with code": lambda: ConcatDataset([made(), Doubled(*made().tensors)]),
    "subset of code": lambda: Subset(Jittered(), [1, 2]),
    "ragged list": lambda: [(torch.ones(1 + i % 2), i) for i in range(SIZE)],
    "mixed numbers": lambda: [(torch.ones(2), 1 if i else 0.5) for i in range(SIZE)],
    "late float": lambda: [(torch.ones(2), i if i != 20 else 0.5) for i in range(SIZE)],
    "strings": lambda: [{"x": torch.ones(2), "name": str(i)} for i in range(SIZE)],
    "parts of unequal dtype": lambda: ConcatDataset([TensorDataset(torch.ones(4)), TensorDataset(torch.ones(4).int())]),
    "gradient": lambda: TensorDataset(torch.ones(SIZE, requires_grad=True)),
    "Hugging Face without a format": lambda: hugging_face({"x": [[1.0, 2.0]] * SIZE}, "custom"),
    "index out of range": lambda: Subset(made(), [3, SIZE]),
}


@pytest.mark.parametrize("make", OTHER.values(), ids=OTHER)
def test_other_datasets_are_read_sample_by_sample(make: Callable[[], Any]) -> None:
    data = make()
    assert tensor_rows(data, None) is None
    reader = HostBatchReader(data, 0, None)
    assert reader.is_map_style


def test_a_collate_function_sees_samples() -> None:
    assert tensor_rows(made(), default_collate) is None


def test_a_copy_that_does_not_fit_into_memory_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.runtime.data.tensor_rows.COPY_FRACTION", 0.0)
    assert tensor_rows(ConcatDataset([made()]), None) is None
    assert tensor_rows(PLAIN["tuples"](), None) is None
    assert tensor_rows(made(), None) is not None  # no copy


@pytest.mark.parametrize(
    ("make", "collate", "seeded"),
    [(made, None, 0), (made, default_collate, 0), (Jittered, None, 4), (lambda: Subset(Jittered(), range(9)), None, 4)],
)
def test_only_samples_that_may_draw_are_seeded(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], collate: Any, seeded: int
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(batches, "seed_sample", lambda *key: calls.append(key))
    HostBatchReader(make(), 0, collate).read(0, np.arange(4))
    assert len(calls) == seeded


@pytest.mark.parametrize("captured", [False, True])
def test_rows_on_the_device_follow_changes_of_the_dataset(captured: bool) -> None:
    data = TensorDataset(torch.zeros(8, 2))
    source = BatchSource(data, seed=0, plan=InputPlan(InputMode.ON_DEVICE, "forced"))
    source._device_rows.rows = source._device_rows.rows.__class__((torch.zeros(8, 2),), form=[0])  # type: ignore[union-attr]
    gather, samples = source.gather_buffer(2), np.array([3, 5])
    assert gather is not None
    data.tensors[0][3] = 7.0
    if captured:
        gather.set_samples(samples)
        gather.gather()
        assert gather.batch[0].tolist() == [[7.0, 7.0], [0.0, 0.0]]
    else:
        assert source.fetch(0, samples, CPU)[0].tolist() == [[7.0, 7.0], [0.0, 0.0]]


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0].flatten(1).nan_to_num()), batch[1])


def training(data: Any) -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 5))
    optimizer = torch.optim.Adam(model.parameters())
    return Training(model, optimizer, data, loss, batch_size=8, stop=Stop(epochs=3))


@pytest.mark.parametrize("shards", [None, 4])
@pytest.mark.parametrize("name", ["tensor dataset", "random split", "concat"])
def test_training_equals_the_plain_loop(name: str, shards: int | None) -> None:
    trainer = Trainer(training(PLAIN[name]()), exact=shards is not None, shards=shards or 8)
    for _ in trainer.steps():
        pass
    assert digest(trainer.training.model) == plain_loop(training(PLAIN[name]()), shards=shards).digest


def test_steps_over_a_tensor_dataset_gather_in_the_graph() -> None:
    trainer = Trainer(training(made()))
    plan = InputPlan(InputMode.ON_DEVICE, "forced")
    trainer._passes.batches = BatchSource(trainer.training.dataset, seed=0, plan=plan)
    graphs = trainer.graphs = trainer.new_graphs(FakeCapture(trainer.training))
    for _ in trainer.steps():
        pass
    assert list(graphs._self_gathering) == [8]
    assert digest(trainer.training.model) == plain_loop(training(made())).digest


def test_carpools_own_tensors_are_rows_with_their_finish() -> None:
    data = TensorData(torch.arange(6), finish=lambda rows: (rows[0] * 2,))
    rows = tensor_rows(data, None)
    assert rows is not None
    assert rows.batch(torch.tensor([2, 4]))[0].tolist() == [4, 8]
