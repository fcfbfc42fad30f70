"""Flower apps that relay: a ServerApp between a federation and Flower nodes, a ClientApp between a node and its device.

Flower starts a process for every message of a node, so that the ClientApp only passes the message on to the device,
which stays ready. A message carries all tasks of a cycle: their descriptors become arrays of bytes, which Flower sends
once even if several nodes get the same weights.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from carpool.core.errors import CarpoolError
from carpool.core.typed_fields import shown
from carpool.runtime.process.channel import (
    MAX_DESCRIPTORS,
    MAX_MESSAGE_BYTES,
    Channel,
    Closed,
    Received,
    close_all,
    decode,
    encode,
)
from carpool.runtime.process.protocol import Alive, NodeAnswered, NodesListed, SendToNode
from carpool.runtime.process.shared_memory import memory_file_of, read_memory_file

SOCKET_KEY = "carpool-socket"  # of the run's configuration, and of a node's
_CONTENT, _FILES, _STAMPS = "carpool", "files", "stamps"
_POLL_S = 0.1
_LIST_S = 1.0
_TTL_S = 7 * 86400.0  # deadlines are the coordinator's

server_app = ServerApp()
client_app = ClientApp()


def connect(path: str) -> Channel:
    """A channel to a Unix socket."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.connect(path)
    except OSError as error:
        end.close()
        raise CarpoolError(f"nothing answers at {path}: {error.strerror}") from error
    return Channel(end)


def packed(message: dict[str, Any], files: Sequence[bytes], stamps: dict[str, float]) -> RecordDict:
    """A message of ours as the content of one of Flower's."""
    arrays = ArrayRecord({str(place): Array(np.frombuffer(data, np.uint8)) for place, data in enumerate(files)})
    text = ConfigRecord({"message": json.dumps(message, separators=(",", ":"))})
    return RecordDict({_CONTENT: text, _FILES: arrays, _STAMPS: ConfigRecord({**stamps})})


def unpacked(content: RecordDict) -> tuple[dict[str, Any], list[bytes], dict[str, float]]:
    """The inverse of `packed`."""
    arrays, stamps = content.array_records[_FILES], content.config_records[_STAMPS]
    message = json.loads(str(content.config_records[_CONTENT]["message"]))
    files = [arrays[str(place)].numpy().tobytes() for place in range(len(arrays))]
    return message, files, {name: float(value) for name, value in stamps.items() if isinstance(value, float)}


@client_app.train()
def relay_to_device(message: Message, context: Context) -> Message:
    """Pass a message on to the device of this node, and its answer back."""
    stamps = {"client_app_created": _created_at(), "client_app_started": time.time()}
    asked, files, _ = unpacked(message.content)
    stamps["client_app_received"] = time.time()
    channel = connect(str(context.node_config[SOCKET_KEY]))
    fds = [memory_file_of(data, "weights") for data in files]
    channel.send(decode(json.dumps(asked).encode()), fds)
    close_all(fds)
    received = _answer(channel)
    answers = [read_memory_file(fd) for fd in received.fds]
    stamps |= {"device_answered": time.time(), "client_app_cpu_s": time.process_time()}
    return Message(packed(json.loads(encode(received.message)), answers, stamps), reply_to=message)


def _created_at() -> float:
    """When this process was created."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def _answer(channel: Channel) -> Received:
    while True:
        received = channel.receive()
        assert received is not None, "without a timeout there is a message or an end"
        if not isinstance(received.message, Alive):
            return received


def answer_of(node: str, content: RecordDict, stamps: dict[str, float]) -> tuple[NodeAnswered, list[bytes]]:
    """A node's answer and its files; an error if the answer would end the federation because it cannot be read."""
    try:
        message, files, theirs = unpacked(content)
        answered = NodeAnswered(node, message, stamps={**stamps, **theirs, "pulled": time.time()})
        line = encode(answered)
        if len(line) > MAX_MESSAGE_BYTES or len(files) > MAX_DESCRIPTORS:
            raise ValueError(
                f"{len(line)} bytes, at most {MAX_MESSAGE_BYTES}; {len(files)} arrays, at most {MAX_DESCRIPTORS}"
            )
        decode(line)
    except Exception as error:  # noqa: BLE001 - a node may send anything
        return NodeAnswered(node, error=f"its answer cannot be read: {shown(error)}"), []
    return answered, files


@server_app.main()
def relay_to_nodes(grid: Grid, context: Context) -> None:
    """Pass messages of a federation on to nodes, and their answers back, until the federation closes the channel."""
    Path(str(context.run_config[SOCKET_KEY])).stat()  # raises a clear error on another machine
    relay = Relay(grid, connect(str(context.run_config[SOCKET_KEY])))
    try:
        while True:
            relay.turn()
    except Closed:
        return


class Relay:
    """Moves messages between a channel and a grid."""

    def __init__(self, grid: Grid, channel: Channel) -> None:
        self._grid = grid
        self._channel = channel
        self._sent: dict[str, tuple[str, dict[str, float]]] = {}  # messages without an answer: their node and stamps
        self._nodes: tuple[str, ...] = ()
        self._listed_at = float("-inf")

    def turn(self) -> None:
        """Send pending messages, then fetch answers; raises Closed when the federation has ended."""
        received = self._channel.receive(_POLL_S)
        while received is not None:
            if isinstance(received.message, SendToNode):
                self._send(received.message, received.fds)
            close_all(received.fds)
            received = self._channel.receive(0.0)
        for reply in self._grid.pull_messages(list(self._sent)) if self._sent else ():
            self._pass_back(reply)
        if time.monotonic() >= self._listed_at + _LIST_S:
            self._list_nodes()

    def _send(self, order: SendToNode, fds: Sequence[int]) -> None:
        stamps = {"pushed": time.time()}
        content = packed(order.message, [read_memory_file(fd) for fd in fds], stamps)
        message = Message(content, int(order.node), "train", ttl=_TTL_S)
        sent = list(self._grid.push_messages([message]))
        stamps["push_done"] = time.time()
        if sent and sent[0]:
            self._sent[sent[0]] = (order.node, stamps)
        else:
            self._channel.send(NodeAnswered(order.node, error="Flower did not take the message"))

    def _pass_back(self, reply: Message) -> None:
        found = self._sent.pop(reply.metadata.reply_to_message_id, None)
        if found is None:
            return
        node, stamps = found
        if reply.has_error():
            self._channel.send(NodeAnswered(node, error=shown(reply.error.reason or f"code {reply.error.code}")))
            return
        answered, files = answer_of(node, reply.content, stamps)
        fds = [memory_file_of(data, "update") for data in files]
        self._channel.send(answered, fds)
        close_all(fds)

    def _list_nodes(self) -> None:
        self._listed_at = time.monotonic()
        nodes = tuple(sorted(str(node) for node in self._grid.get_node_ids()))
        if nodes != self._nodes:
            self._nodes = nodes
            self._channel.send(NodesListed(nodes))
