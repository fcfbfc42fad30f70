"""A mirror holds a whole state, or says that it does not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.errors import CheckpointError
from carpool.runtime.process.shared_memory import new_memory_file
from carpool.runtime.state.digest import digest
from carpool.runtime.state.mirror import read_mirror, write_mirror, write_parts
from carpool.runtime.state.tensor_file import StateParts


@pytest.fixture
def fd() -> Iterator[int]:
    made = new_memory_file("test")
    yield made
    os.close(made)


def test_another_trainer_goes_on_from_it(make_training: Any, fd: int) -> None:
    one, other = Trainer(make_training()), Trainer(make_training())
    for _ in range(3):
        one.step()
    write_mirror(fd, 2, {"a larger state": "x" * 100_000})
    write_mirror(fd, 3, one.state_dict())
    step, state = read_mirror(fd)
    one.step()  # the mirror is a copy
    other.load_state_dict(state)
    assert (step, other.cursor.step) == (3, 3)
    other.step()
    assert digest(one.training.model) == digest(other.training.model)


def test_a_writer_that_dies_half_way_leaves_a_mirror_that_says_so(fd: int) -> None:
    write_mirror(fd, 1, {"step": 1})
    with pytest.raises(KeyboardInterrupt):
        write_parts(fd, 2, StateParts(b"", _Dying()))
    with pytest.raises(CheckpointError, match="not written to its end"):
        read_mirror(fd)


class _Dying(list[Any]):
    """Tensors whose writer is killed when it comes to them."""

    def __iter__(self) -> Any:
        raise KeyboardInterrupt


def test_an_empty_mirror_says_so(fd: int) -> None:
    with pytest.raises(CheckpointError, match="empty"):
        read_mirror(fd)
