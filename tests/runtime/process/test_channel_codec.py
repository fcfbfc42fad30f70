"""Encoding of messages."""

from __future__ import annotations

import math

import pytest

from carpool.runtime.process.channel import ProtocolError, decode, encode
from carpool.runtime.process.protocol import (
    Alive,
    Begin,
    Done,
    Evaluated,
    Message,
    Proceed,
    Ready,
    WorkerFailed,
)

MESSAGES: list[Message] = [
    Alive(),
    Begin("job", {"entry": "a.py:b", "args": {"lr": 0.1}, "folder": "/ü"}, "cuda:0", cores=(0, 2), threads=2),
    Proceed(3, 1, 2, owners=((0, 3), (3, 8)), update_ranges=((0, 1), (1, 6)), time_sliced=True, batch_size=64),
    Ready("d" * 64, 4096, 32, None, 1797, sizes=(640, 10), notes=("one", "two"), target_loss=0.05),
    Evaluated(7, {"accuracy": 0.1 + 0.2, "loss": math.inf}),
    Done(12, 4, 1e-30, "d" * 64, "reached 12 steps", {"loss": 5e-324}),
    WorkerFailed("user", 'ValueError: "\n{}" (a.py, line 3)', 5),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_is_one_line_and_round_trips(message: Message) -> None:
    line = encode(message)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode(line) == message


@pytest.mark.parametrize("line", [b"", b"[]", b"{}", b'{"say":"Sing"}', b'{"say":"Loaded"}', b"\xff", b'"say"'])
def test_other_lines_are_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError, match="is not a message"):
        decode(line)
