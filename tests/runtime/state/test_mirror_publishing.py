"""A mirror that is written aside holds the state of the moment it was asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.memory.swap_client import SwapClient
from carpool.runtime.process.channel import Closed
from carpool.runtime.process.protocol import Message, Published, WorkerFailed
from carpool.runtime.process.shared_memory import new_memory_file
from carpool.runtime.state.digest import digest
from carpool.runtime.state.mirror import HostStaging, MirrorWriter, read_mirror


@pytest.fixture
def fd() -> Iterator[int]:
    made = new_memory_file("test")
    yield made
    os.close(made)


def publisher(trainer: Trainer, said: list[Message], *, aside: bool = True) -> MirrorWriter:
    return MirrorWriter(trainer, SwapClient(None, said.append), said.append, aside=aside)


@pytest.mark.parametrize("aside", [True, False])
def test_the_training_goes_on_and_the_mirror_stays(make_training: Any, fd: int, aside: bool) -> None:
    one, other = Trainer(make_training()), Trainer(make_training())
    said: list[Message] = []
    mirrors = publisher(one, said, aside=aside)
    one.step()
    mirrors.publish(fd)
    after_one = digest(one.training.model)
    for _ in range(2):
        one.step()
    mirrors.finish()
    assert said == [Published(1)]
    other.load_state_dict(read_mirror(fd)[1])
    assert digest(other.training.model) == after_one
    for _ in range(2):
        other.step()
    assert digest(other.training.model) == digest(one.training.model)


def test_what_was_taken_does_not_change_with_the_state() -> None:
    state = [torch.arange(6.0).view(2, 3).t(), torch.tensor(3)]
    staging = HostStaging(torch.device("cpu"))
    first = [twin.clone() for twin in staging.take(state)]
    for tensor in state:
        tensor += 1
    staging.wait()
    assert [twin.tolist() for twin in staging._twins] == [tensor.tolist() for tensor in first]
    assert all(twin.is_contiguous() for twin in staging._twins)
    kept = staging._twins
    assert staging.take(state) is kept  # the same memory again
    assert kept[1].item() == 4
    assert staging.take([torch.ones(2)])[0].tolist() == [1.0, 1.0]


def test_one_is_whole_before_the_next_begins(make_training: Any, fd: int) -> None:
    trainer = Trainer(make_training())
    said: list[Message] = []
    mirrors = publisher(trainer, said)
    for _ in range(3):
        trainer.step()
        mirrors.publish(fd)
    mirrors.finish()
    assert said == [Published(1), Published(2), Published(3)]
    assert read_mirror(fd)[0] == 3


def test_a_file_that_cannot_be_written_is_told(make_training: Any) -> None:
    said: list[Message] = []
    mirrors = publisher(Trainer(make_training()), said)
    with Path(__file__).open("rb") as read_only:
        mirrors.publish(read_only.fileno())
        mirrors.finish()
    assert said == [WorkerFailed("disk", "the mirror was not written: Bad file descriptor", 0)]


def test_nobody_may_be_there_to_hear_of_it(make_training: Any, fd: int) -> None:
    def say(message: Message) -> None:
        raise Closed("nobody hears")

    mirrors = MirrorWriter(Trainer(make_training()), SwapClient(None, say), say, aside=True)
    mirrors.publish(fd)
    mirrors.finish()
    assert read_mirror(fd)[0] == 0
