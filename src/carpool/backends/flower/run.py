"""A federation over Flower: all of it on this machine, its server alone, or one of its devices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from carpool.backends.flower.device_host import DeviceHost
from carpool.backends.flower.devices import FlowerDevices
from carpool.backends.flower.processes import FlowerProcesses, Security
from carpool.core.errors import InputError
from carpool.federated.federation_file import FederatedDevice, FederationFile
from carpool.runtime.compat.process_lifetime import wait_for_exit
from carpool.runtime.process.forkserver import ForkServer

_SOCKET_KEY = "carpool-socket"  # as relay.py, which imports Flower


@asynccontextmanager
async def flower_devices(
    file: FederationFile,
    forks: ForkServer,
    folder: Path,
    superlink: str = "",
    security: Security | None = None,
) -> AsyncIterator[tuple[FlowerDevices, FlowerProcesses]]:
    """Devices over Flower. Without a SuperLink, one is started here, and a SuperNode for each device of the file."""
    secured = security or Security(insecure=not superlink)
    processes = FlowerProcesses(folder)
    async with AsyncExitStack() as stack:
        stack.callback(processes.stop)
        address = superlink or await processes.start_superlink()
        if not superlink:
            await asyncio.gather(
                *[_start_device(stack, file, device, forks, processes, address, secured) for device in file.devices]
            )
        devices = FlowerDevices(file)
        stack.push_async_callback(devices.close)
        await processes.submit(address, {_SOCKET_KEY: devices.path}, secured)
        yield devices, processes


async def _start_device(
    stack: AsyncExitStack,
    file: FederationFile,
    device: FederatedDevice,
    forks: ForkServer,
    processes: FlowerProcesses,
    address: str,
    security: Security,
) -> None:
    host = DeviceHost(file, device, forks, processes.folder)
    stack.push_async_callback(host.close)
    await host.start()
    processes.start_supernode(device.name, address, {_SOCKET_KEY: host.path}, security)


async def serve_device(
    file: FederationFile, name: str, forks: ForkServer, folder: Path, superlink: str, security: Security
) -> None:
    """Be one device of a federation until interrupted."""
    (device,) = [device for device in file.devices if device.name == name]
    processes = FlowerProcesses(folder)
    async with AsyncExitStack() as stack:
        stack.callback(processes.stop)
        await _start_device(stack, file, device, forks, processes, superlink, security)
        (node,) = processes.children.values()
        await wait_for_exit(node)
        log = folder / f"supernode-{name}.log"
        raise InputError(
            f"the SuperNode of {name} ended with code {node.returncode}{_reason_in(log.read_text(errors='replace'))}",
            way_out=f"Check address, --root-certificates and that the key of --node-key is registered; see {log}.",
        )


def _reason_in(log: str) -> str:
    """The lines of Flower's last error message, or nothing."""
    _, found, rest = log.rpartition("Exit Code: ")
    lines = rest.partition("\n\n")[0].splitlines()[1:] if found else []
    return f": {' '.join(line.strip() for line in lines)}" if lines else ""
