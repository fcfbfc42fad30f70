"""Messages arrive whole, in order and with their descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.typed_fields import MAX_INT, MAX_TEXT, shortened
from carpool.runtime.process.channel import (
    MAX_MESSAGE_BYTES,
    AsyncChannel,
    Channel,
    Closed,
    ProtocolError,
    close_all,
    decode,
    encode,
    pair,
)
from carpool.runtime.process.protocol import (
    Alive,
    Begin,
    Contributed,
    Done,
    Evaluated,
    Grant,
    Message,
    Proceed,
    Ready,
    Stepped,
    WorkerFailed,
)
from carpool.runtime.process.shared_memory import new_memory_file

TIMEOUT_S = 30.0


@pytest.fixture
def ends() -> Any:
    one, other = pair()
    with one, other:
        yield one, other


def content(fd: int) -> bytes:
    text = os.pread(fd, 100, 0)
    os.close(fd)
    return text


def memory(text: bytes) -> int:
    fd = new_memory_file("test")
    os.pwrite(fd, text, 0)
    return fd


def within(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, TIMEOUT_S))


def test_descriptors_stay_with_their_messages(ends: Any) -> None:
    one, other = Channel(ends[0]), Channel(ends[1])
    first, second, third = memory(b"first"), memory(b"second"), memory(b"third")
    one.send(Alive())
    one.send(Grant(1), [first])
    one.send(Grant(2))
    one.send(Grant(3), [second, third])
    close_all([first, second, third])
    said = [other.receive(TIMEOUT_S) for _ in range(4)]
    found = [(each.message, [content(fd) for fd in each.fds]) for each in said if each]
    assert found == [(Alive(), []), (Grant(1), [b"first"]), (Grant(2), []), (Grant(3), [b"second", b"third"])]


def test_received_descriptors_are_not_inherited(ends: Any) -> None:
    one, other = Channel(ends[0]), Channel(ends[1])
    fd = memory(b"")
    one.send(Alive(), [fd])
    received = other.receive(TIMEOUT_S)
    assert received is not None
    assert not os.get_inheritable(received.fds[0])
    close_all([fd, *received.fds])


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=6), st.integers(1, 5000))
def test_lines_may_come_in_any_pieces(lengths: list[int], cut: int) -> None:
    messages: list[Message] = [WorkerFailed("user", "x" * length, step) for step, length in enumerate(lengths)]
    data = b"".join(map(encode, messages))
    with_pieces = [data[at : at + cut * 37] for at in range(0, len(data), cut * 37)]
    raw, end = pair()
    with raw, end:
        channel = Channel(end)
        sender = threading.Thread(target=lambda: deque(map(raw.sendall, with_pieces)))
        sender.start()
        received = [channel.receive(TIMEOUT_S) for _ in messages]
        sender.join()
    cut_texts = [WorkerFailed("user", shortened("x" * length), step) for step, length in enumerate(lengths)]
    assert [each.message for each in received if each] == cut_texts


def test_poll_and_timeout_without_a_message(ends: Any) -> None:
    one, other = Channel(ends[0]), Channel(ends[1])
    assert not other.poll()
    assert other.receive(0.0) is None
    one.send(Alive())
    one.send(Alive())
    assert other.poll()
    other.receive(TIMEOUT_S)
    assert other.poll(), "the second message was read together with the first and must not be forgotten"
    other.receive(TIMEOUT_S)
    assert not other.poll()


def test_half_a_line_is_not_a_message(ends: Any) -> None:
    other = Channel(ends[1])
    ends[0].sendall(encode(Alive())[:5])
    assert other.receive(0.01) is None
    ends[0].sendall(encode(Alive())[5:])
    received = other.receive(TIMEOUT_S)
    assert received is not None
    assert received.message == Alive()


def test_the_end_comes_after_earlier_messages(ends: Any) -> None:
    one, other = Channel(ends[0]), Channel(ends[1])
    one.send(Grant(7))
    one.close()
    assert other.poll()
    received = other.receive(TIMEOUT_S)
    assert received is not None
    assert received.message == Grant(7)
    assert other.poll()
    with pytest.raises(Closed):
        other.receive(TIMEOUT_S)
    with pytest.raises(Closed):
        other.send(Alive())


def test_other_lines_are_refused(ends: Any) -> None:
    other = Channel(ends[1])
    ends[0].sendall(b"{}\n")
    with pytest.raises(ProtocolError):
        other.receive(TIMEOUT_S)
    ends[0].sendall(b'1 {"say":"Alive"}\n')
    with pytest.raises(ProtocolError, match="1 descriptors"):
        other.receive(TIMEOUT_S)


def test_threads_may_send_concurrently(ends: Any) -> None:
    one, other = Channel(ends[0]), Channel(ends[1])
    long = "x" * 50_000

    def say(kind: str) -> None:
        for step in range(20):
            one.send(WorkerFailed(kind, long, step))

    threads = [threading.Thread(target=say, args=(kind,)) for kind in "abc"]
    for thread in threads:
        thread.start()
    heard = [other.receive(TIMEOUT_S) for _ in range(60)]
    for thread in threads:
        thread.join()
    steps: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for received in heard:
        assert received is not None
        assert isinstance(received.message, WorkerFailed)
        steps[received.message.kind].append(received.message.step)
    assert steps == {kind: list(range(20)) for kind in "abc"}


def test_async_send_does_not_block_and_descriptors_may_be_closed_at_once() -> None:
    async def work() -> None:
        ours, theirs = pair()
        channel = AsyncChannel(ours)
        for number in range(100):  # far more than the socket holds
            fd = memory(b"%d" % number)
            channel.send(WorkerFailed("user", "x" * 10_000, number), [fd])
            os.close(fd)
        reader = Channel(theirs)
        for number in range(100):
            received = await asyncio.to_thread(reader.receive, TIMEOUT_S)
            assert received is not None
            assert isinstance(received.message, WorkerFailed)
            assert (received.message.step, content(received.fds[0])) == (number, b"%d" % number)
        reader.close()
        with pytest.raises(Closed):
            await channel.receive()
        channel.send(Alive())  # to nobody
        channel.close()

    within(work())


@pytest.mark.parametrize("end_first", [True, False])
def test_async_receive_delivers_messages_and_then_the_end(end_first: bool) -> None:
    async def work() -> list[Message]:
        ours, theirs = pair()
        channel, worker = AsyncChannel(ours), Channel(theirs)
        fd = memory(b"beside")
        waiting = asyncio.create_task(channel.receive())
        await asyncio.sleep(0)
        worker.send(Contributed(1, 2, 0.25, 36))
        heard = [(await waiting).message]
        worker.send(Alive(), [fd])
        if end_first:
            worker.close()
        received = await channel.receive()
        heard.append(received.message)
        assert content(received.fds[0]) == b"beside"
        worker.close()
        with pytest.raises(Closed):
            await channel.receive()
        channel.close()
        channel.close()
        os.close(fd)
        return heard

    assert within(work()) == [Contributed(1, 2, 0.25, 36), Alive()]


def test_close_ends_a_pending_receive() -> None:
    async def work() -> None:
        ours, theirs = pair()
        with theirs:
            channel = AsyncChannel(ours)
            waiting = asyncio.create_task(channel.receive())
            await asyncio.sleep(0)
            channel.close()
            with pytest.raises(Closed):
                await waiting

    within(work())


@pytest.mark.parametrize("make", [Channel, lambda end: end], ids=["channel", "socket"])
def test_unread_descriptors_are_closed(make: Callable[[socket.socket], Any]) -> None:
    one, other = pair()
    reader, writer = os.pipe()
    Channel(one).send(Alive())
    Channel(one).send(Grant(1), [writer])
    os.close(writer)
    held = make(other)
    if isinstance(held, Channel):
        held.receive(TIMEOUT_S)  # reads both
    held.close()
    one.close()
    assert os.read(reader, 1) == b"", "somebody still holds the other end of the pipe"
    os.close(reader)


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
def test_decode_refuses_other_lines(line: bytes) -> None:
    with pytest.raises(ProtocolError, match="is not a message"):
        decode(line)


HOSTILE = [10**400, -1, 2**53 + 1, True, math.inf, -math.inf, math.nan, "7", None, [1], {}, "x" * (2 * MAX_TEXT)]


def with_value(message: Message, field: str, value: object) -> bytes:
    """A message as a line in which one field has another value."""
    told = json.loads(encode(message))
    told[field] = value
    return json.dumps(told).encode()


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("field", ["total_steps", "batch_size", "num_samples", "contribution_bytes"])
def test_a_count_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    ready = Ready("f", contribution_bytes=8, batch_size=4, total_steps=9, num_samples=40)
    if value is None and field == "total_steps":
        assert decode(with_value(ready, field, value)) == replace(ready, total_steps=None)
        return
    with pytest.raises(ProtocolError, match=f"Ready.{field} is"):
        decode(with_value(ready, field, value))


@pytest.mark.parametrize("value", [math.inf, -1.0, 1e300, "1", None])
def test_a_rate_out_of_range_is_refused_and_a_loss_may_be_anything(value: object) -> None:
    stepped = Stepped(3, 0, 0.5, 10.0, 1.0)
    with pytest.raises(ProtocolError, match="steps_per_s"):
        decode(with_value(stepped, "steps_per_s", value))
    assert decode(with_value(stepped, "loss", math.inf)) == replace(stepped, loss=math.inf)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(HOSTILE),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=6,
)


@given(st.sampled_from(MESSAGES), st.data())
def test_any_values_give_a_message_within_its_ranges_or_a_protocol_error(message: Message, data: st.DataObject) -> None:
    told = json.loads(encode(message))
    names = data.draw(st.lists(st.sampled_from(sorted(told)) | st.text(max_size=8), max_size=4))
    told |= {name: data.draw(JSON) for name in names}
    try:
        decoded = decode(json.dumps(told).encode())
    except ProtocolError:
        return
    for value in asdict(decoded).values():
        assert not isinstance(value, int) or value <= MAX_INT
        assert not isinstance(value, str) or len(value) <= MAX_TEXT


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"say":["Alive"]}',
        b'{"say":"Grant","steps":' + b"9" * 5000 + b"}",
        b"99999999999 {}",
        b"1x {}",
    ],
    ids=["deep", "no name", "digits", "descriptors", "no number"],
)
def test_frames_that_break_parsers_are_refused(ends: Any, line: bytes) -> None:
    ends[0].sendall(line + b"\n")
    with pytest.raises(ProtocolError):
        Channel(ends[1]).receive(TIMEOUT_S)


def test_a_message_without_end_is_refused_before_it_fills_memory() -> None:
    async def work() -> None:
        ours, theirs = pair()
        channel = AsyncChannel(ours)

        def flood() -> None:
            with theirs, contextlib.suppress(OSError):
                for _ in range(2 * MAX_MESSAGE_BYTES // 65536):
                    theirs.sendall(b"x" * 65536)

        sender = threading.Thread(target=flood)
        sender.start()
        with pytest.raises(ProtocolError, match=str(MAX_MESSAGE_BYTES)):
            await channel.receive()
        channel.close()
        sender.join()

    within(work())
