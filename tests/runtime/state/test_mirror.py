"""Mirrors hold a complete state or are detected as incomplete; writing does not stop the training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.errors import CheckpointError
from carpool.runtime.memory.swap_client import SwapClient
from carpool.runtime.process.channel import Closed
from carpool.runtime.process.protocol import Message, Published, WorkerFailed
from carpool.runtime.process.shared_memory import new_memory_file
from carpool.runtime.state.digest import digest
from carpool.runtime.state.mirror import HostStaging, MirrorWriter, read_mirror, write_mirror
from carpool.runtime.state.tensor_file import StateParts


@pytest.fixture
def fd() -> Iterator[int]:
    made = new_memory_file("test")
    yield made
    os.close(made)


def test_another_trainer_resumes_from_a_mirror(make_training: Any, fd: int) -> None:
    one, other = Trainer(make_training()), Trainer(make_training())
    for _ in range(3):
        one.step()
    write_mirror(fd, 2, StateParts.of({"a larger state": "x" * 100_000}))
    write_mirror(fd, 3, StateParts.of(one.state_dict()))
    step, state = read_mirror(fd)
    one.step()  # the mirror is a copy
    other.load_state_dict(state)
    assert (step, other.cursor.step) == (3, 3)
    other.step()
    assert digest(one.training.model) == digest(other.training.model)


def test_a_killed_writer_leaves_an_incomplete_mirror(fd: int) -> None:
    write_mirror(fd, 1, StateParts.of({"step": 1}))
    with pytest.raises(KeyboardInterrupt):
        write_mirror(fd, 2, StateParts(b"", _Dying()))
    with pytest.raises(CheckpointError, match="incomplete"):
        read_mirror(fd)


class _Dying(list[Any]):
    """Tensors whose writer is interrupted when it reaches them."""

    def __iter__(self) -> Any:
        raise KeyboardInterrupt


def test_an_empty_mirror_is_rejected(fd: int) -> None:
    with pytest.raises(CheckpointError, match="empty"):
        read_mirror(fd)


def mirror_writer(trainer: Trainer, sent: list[Message], *, in_thread: bool = True) -> MirrorWriter:
    return MirrorWriter(trainer, SwapClient(None, sent.append), sent.append, in_thread=in_thread)


@pytest.mark.parametrize("in_thread", [True, False])
def test_a_mirror_holds_the_state_at_publish(make_training: Any, fd: int, in_thread: bool) -> None:
    one, other = Trainer(make_training()), Trainer(make_training())
    sent: list[Message] = []
    writer = mirror_writer(one, sent, in_thread=in_thread)
    one.step()
    writer.publish(fd)
    after_one = digest(one.training.model)
    for _ in range(2):
        one.step()
    writer.finish()
    assert sent == [Published(1)]
    other.load_state_dict(read_mirror(fd)[1])
    assert digest(other.training.model) == after_one
    for _ in range(2):
        other.step()
    assert digest(other.training.model) == digest(one.training.model)


def test_staged_copies_do_not_change_with_the_state() -> None:
    state = [torch.arange(6.0).view(2, 3).t(), torch.tensor(3)]
    staging = HostStaging(torch.device("cpu"))
    first = [copy.clone() for copy in staging.copy(state)]
    for tensor in state:
        tensor += 1
    staging.wait()
    assert [copy.tolist() for copy in staging._pinned] == [tensor.tolist() for tensor in first]
    assert all(copy.is_contiguous() for copy in staging._pinned)
    kept = staging._pinned
    assert staging.copy(state) is kept  # reuses the memory
    assert kept[1].item() == 4
    assert staging.copy([torch.ones(2)])[0].tolist() == [1.0, 1.0]


def test_a_mirror_is_complete_before_the_next_one_starts(make_training: Any, fd: int) -> None:
    trainer = Trainer(make_training())
    sent: list[Message] = []
    writer = mirror_writer(trainer, sent)
    for _ in range(3):
        trainer.step()
        writer.publish(fd)
    writer.finish()
    assert sent == [Published(1), Published(2), Published(3)]
    assert read_mirror(fd)[0] == 3


def test_a_failed_write_is_reported(make_training: Any) -> None:
    sent: list[Message] = []
    writer = mirror_writer(Trainer(make_training()), sent)
    with Path(__file__).open("rb") as read_only:
        writer.publish(read_only.fileno())
        writer.finish()
    (failure,) = sent
    assert isinstance(failure, WorkerFailed)
    assert (failure.kind, failure.step) == ("disk", 0)
    assert "Bad file descriptor" in failure.error


def test_a_closed_channel_is_ignored(make_training: Any, fd: int) -> None:
    def send(message: Message) -> None:
        raise Closed("the executor has exited")

    writer = MirrorWriter(Trainer(make_training()), SwapClient(None, send), send, in_thread=True)
    writer.publish(fd)
    writer.finish()
    assert read_mirror(fd)[0] == 0
