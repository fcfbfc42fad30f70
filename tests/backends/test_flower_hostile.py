"""Flower nodes that answer with anything: the federation goes on with the others."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from carpool.backends.flower.devices import FlowerDevices
from carpool.federated.federation_file import FederationFile
from carpool.federated.messages import DeviceJoined
from carpool.runtime.process.channel import AsyncChannel, encode
from carpool.runtime.process.protocol import DeviceDescribed, NodeAnswered, NodesListed, TasksDone
from tests.backends.test_federation_run import federation

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from carpool.backends.flower.relay import answer_of, packed

GOOD = {"a": {"volume": 10, "sample_s": 0.1}}


def two_devices(folder: Path) -> FederationFile:
    return federation(folder, [{"name": "a", "entry": "entries.py:make"}], device=[{"name": "device", "count": 2}])


def described(file: FederationFile, number: int, tasks: Any) -> dict[str, Any]:
    message = DeviceDescribed(f"device-{number}", tasks, file.fingerprint)
    return cast("dict[str, Any]", json.loads(encode(message)))


async def joined_beside(file: FederationFile, tasks: Any) -> list[DeviceJoined]:
    """The devices that take part if one describes its tasks so, and another one well."""
    devices = FlowerDevices(file, wait_s=0.2)
    starting = asyncio.create_task(devices.start())
    end = socket.socket(socket.AF_UNIX)
    end.connect(devices.path)
    relay = AsyncChannel(end)
    relay.send(NodesListed(("1", "2")))
    for _ in range(2):
        await relay.receive()
    relay.send(NodeAnswered("2", described(file, 1, tasks)))
    relay.send(NodeAnswered("1", described(file, 0, GOOD)))
    try:
        return await asyncio.wait_for(starting, 30.0)
    finally:
        relay.close()
        await devices.close()


@pytest.mark.parametrize(
    "tasks",
    [
        {"a": 3},
        {"a": {}},
        {"a": {"volume": "many", "sample_s": 0.0}},
        {"a": {"volume": -4, "sample_s": 0.0}},
        {"a": {"volume": 3.5, "sample_s": 0.0}},
        {"a": {"volume": 1 << 70, "sample_s": 0.0}},
        {"a": {"volume": 3, "sample_s": float("nan")}},
        {"a": {"volume": 3, "sample_s": -1.0}},
    ],
)
def test_a_device_that_describes_itself_wrongly_does_not_take_part(tmp_path: Path, tasks: Any) -> None:
    found = asyncio.run(joined_beside(two_devices(tmp_path), tasks))
    assert [each.device for each in found] == ["device-0"]


def test_a_device_may_hold_data_of_no_task(tmp_path: Path) -> None:
    assert len(asyncio.run(joined_beside(two_devices(tmp_path), {}))) == 2


DONE: dict[str, Any] = json.loads(encode(TasksDone(1, ())))


def array(claimed: tuple[int, ...], data: bytes) -> Array:
    return Array(dtype="uint8", shape=claimed, stype="numpy.ndarray", data=data)


def header(shape: tuple[int, ...]) -> bytes:
    return (
        b"\x93NUMPY\x01\x00"
        + (118).to_bytes(2, "little")
        + (str({"descr": "|u1", "fortran_order": False, "shape": shape}).ljust(117) + "\n").encode()
    )


def with_arrays(arrays: dict[str, Array]) -> RecordDict:
    content = packed(DONE, [], {})
    content["files"] = ArrayRecord(arrays)
    return content


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        packed(cast("Any", [1, 2]), [], {}),
        packed({**DONE, "more": "x" * (1 << 24)}, [], {}),
        packed(DONE, [b"x"] * 65, {}),
        RecordDict({**packed(DONE, [], {}), "carpool": ConfigRecord({"message": "[" * 100_000})}),
        with_arrays({"1": Array(np.zeros(1, np.uint8))}),
        with_arrays({"0": array((1,), b"junk")}),
        with_arrays({"0": array((1 << 50,), header((1 << 50,)))}),
        with_arrays({"0": array((1,), b"")}),
    ],
)
def test_an_answer_that_cannot_be_read_is_that_nodes_error(content: RecordDict) -> None:
    answered, files = answer_of("1", content, {})
    assert "cannot be read" in answered.error
    assert not files


def test_a_good_answer_is_passed_on() -> None:
    answered, files = answer_of("1", packed(DONE, [b"update"], {"at": 1.0}), {"pushed": 0.5})
    assert (answered.error, answered.message, files) == ("", DONE, [b"update"])
    assert (answered.stamps["pushed"], answered.stamps["at"]) == (0.5, 1.0)
