"""The resident device of a federation over Flower: what becomes of a message when its tasks hang or die."""

import asyncio
import socket
from pathlib import Path
from typing import Any

from carpool.backends.federation_run import FederationRun
from carpool.backends.federation_store import FederationStore
from carpool.backends.flower.device_host import DeviceHost
from carpool.federated.federation import TaskName
from carpool.federated.federation_file import FederationFile
from carpool.federated.messages import Work
from carpool.federated.updates import encode_weights
from carpool.runtime.process.channel import AsyncChannel, close_all
from carpool.runtime.process.forkserver import ForkServer
from carpool.runtime.process.protocol import (
    Alive,
    DescribeDevice,
    DeviceDescribed,
    Message,
    RunTasks,
    TasksDone,
    TasksReady,
)
from carpool.runtime.process.shared_memory import memory_file_of
from tests.backends.test_federation_run import federation
from tests.support.federation_runs import Runs

WORK = Work(TaskName("a"), 0, 0, 240, 8, 1.0)


async def ask(host: DeviceHost, message: Message, weights: bytes = b"") -> Any:
    """What the device answers to one message, as a ClientApp would ask it."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.connect(host.path)
    channel = AsyncChannel(end)
    fds = [memory_file_of(weights, "weights")] if weights else []
    channel.send(message, fds)
    close_all(fds)
    try:
        async with asyncio.timeout(60.0):
            received = await channel.receive()
            while isinstance(received.message, Alive):
                received = await channel.receive()
        close_all(received.fds)
        return received.message
    finally:
        channel.close()


async def answers(forks: ForkServer, file: FederationFile, folder: Path, messages: list[Message]) -> list[Any]:
    """The answers of the first device of a file to these messages, one after the other."""
    models = await FederationRun(file, FederationStore(folder)).initial_models(forks)
    weights = encode_weights(models[TaskName("a")].weights)
    host = DeviceHost(file, file.devices[0], forks, folder)
    await host.start()
    try:
        return [await ask(host, each, weights if isinstance(each, RunTasks) else b"") for each in messages]
    finally:
        await host.close()


def one_device(folder: Path, entry: str, **more: Any) -> FederationFile:
    tasks = [{"name": "a", "entry": f"entries.py:{entry}", "args": {"flag": str(folder / "flag")}}]
    return federation(folder, tasks, device=[{"name": "device"}], **more)


def test_a_task_that_hangs_in_a_step_is_killed_after_its_deadline_and_works_again(run: Runs, tmp_path: Path) -> None:
    file = one_device(tmp_path, "hangs_in_a_step", deadline_s=0.3, grace_s=0.2)
    cycles: list[Message] = [RunTasks(number, (WORK,), 0.3 if number == 1 else 0.0) for number in (1, 2)]
    first, second = run.do(answers(run.forks, file, tmp_path, cycles))
    assert isinstance(first, TasksReady)
    assert "deadline" in first.error
    assert isinstance(second, TasksDone)
    assert second.results[0]["samples"] == WORK.samples


def test_a_device_that_hangs_while_it_is_loaded_again_says_so(run: Runs, tmp_path: Path) -> None:
    file = one_device(tmp_path, "hangs_when_loaded_again", load_s=3.0)
    messages: list[Message] = [DescribeDevice(), RunTasks(1, (WORK,), 0.0), DescribeDevice()]
    described, died, hung = run.do(answers(run.forks, file, tmp_path, messages))
    assert isinstance(described, DeviceDescribed)
    assert isinstance(died, TasksReady)
    assert "exited" in died.error
    assert isinstance(hung, TasksReady)
    assert "did not load its tasks within 3 s" in hung.error
