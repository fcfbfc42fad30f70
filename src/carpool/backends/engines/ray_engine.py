"""Ray engine: one agent per node of a Ray cluster, each launched by a detached actor that holds the node's GPUs.

Ray itself runs in the driver's process, which is started again when it ends.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carpool.core.errors import InputError
from carpool.jobs.hosts_file import Host
from carpool.runtime.remote.remote_link import HostUnreachable

_DRIVER = (sys.executable, "-P", "-m", "carpool.backends.engines.ray_driver")
_CONNECT_S = 10.0
_SILENCE_S = 240.0  # without any answer while requests wait, after which a driver is killed; a start may take 180 s
_INIT_S = 90.0  # the same for `ray.init`, which takes 5 to 13 s
_POLL_S = 1.0
_READ_BYTES = 1 << 16
_END_S = 30.0  # for a driver whose stream was closed
_LOG_TAIL = 600  # characters
_MAX_NAME = 60
_CONNECT = "Run carpool on a machine of the Ray cluster, with the address that `ray start --head` prints."


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node of a Ray cluster that is alive."""

    id: str
    host: str
    gpus: float
    cpus: float
    member: str = ""  # as an earlier scheduler named it


class DriverFailed(HostUnreachable):
    """The driver ended, or Ray does not do what was asked."""


@dataclass(frozen=True, slots=True)
class DriverOptions:
    """How the driver is started, and when it counts as hung."""

    command: Sequence[str] = _DRIVER
    init_s: float = _INIT_S
    silence_s: float = _SILENCE_S


class RayDriver:
    """The driver's process: answers requests as futures, which belong to no event loop.

    A driver that answers nothing for long is killed, and every request that waits for it fails.
    """

    def __init__(self, log: Path, environment: Mapping[str, str], options: DriverOptions) -> None:
        self._log = log
        self._silence_s = options.init_s
        self._silence_later_s = options.silence_s  # once it is connected
        with log.open("ab") as output:
            self._log_from = output.tell()
            self._process = subprocess.Popen(
                list(options.command),
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the scheduler, which still needs Ray to end the agents
            )
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._number = 0
        self._silent_since = 0.0  # while requests wait
        self._is_hung = False
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def request(self, do: str, **values: Any) -> Future[Any]:
        """Send a request; its future raises InputError for one that Ray refuses, DriverFailed if the driver ends."""
        assert self._process.stdin is not None, "it is a pipe"
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # a task that waits may be cancelled, the answer still comes
        with self._lock:
            self._number += 1
            if not self._waiting:
                self._silent_since = time.monotonic()
            self._waiting[self._number] = future
            try:
                self._process.stdin.write(json.dumps({"id": self._number, "do": do, **values}).encode() + b"\n")
                self._process.stdin.flush()
            except (OSError, ValueError):
                del self._waiting[self._number]
                future.set_exception(self._ended())
        return future

    def _read(self) -> None:
        for line in self._lines():
            found = json.loads(line)
            with self._lock:
                future = self._waiting.pop(found["id"])
                self._silent_since = time.monotonic()
                self._silence_s = self._silence_later_s
            if "kind" in found:
                future.set_exception(_error(found))
            else:
                future.set_result(found["answer"])
        self._process.wait()
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
        for future in waiting:
            future.set_exception(self._ended())

    def _lines(self) -> Iterator[bytes]:
        """The driver's answers until its stream ends, which a driver that hangs does not do by itself."""
        assert self._process.stdout is not None, "it is a pipe"
        output, rest = self._process.stdout.fileno(), b""
        poller = select.poll()
        poller.register(output, select.POLLIN)
        while True:
            if not poller.poll(1000.0 * min(_POLL_S, self._silence_s)):
                self._kill_if_hung()
            elif chunk := os.read(output, _READ_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from lines
            else:
                return

    def _kill_if_hung(self) -> None:
        with self._lock:
            silent_s = time.monotonic() - self._silent_since
            self._is_hung |= bool(self._waiting) and silent_s >= self._silence_s
        if self._is_hung:
            self._process.kill()

    def _ended(self) -> DriverFailed:
        tail = self.last_words()
        problem = f"Ray answered nothing for {self._silence_s:g} s" if self._is_hung else "the connection was lost"
        return DriverFailed(f"{problem}: {tail}", where="--engine ray", way_out=_way_out(tail, f"Read {self._log}."))

    def last_words(self) -> str:
        """The end of what this driver wrote to the log, without stack traces of Ray's libraries."""
        lines = self._log.read_bytes()[self._log_from :].decode("utf-8", "replace").splitlines()
        kept = [line for line in lines if not re.match(r"\*\*\* |\S+\.so\S*\(", line)]
        return "\n".join(kept).strip()[-_LOG_TAIL:]

    def close(self) -> None:
        """End the process, and a local Ray that it started."""
        assert self._process.stdin is not None and self._process.stdout is not None, "they are pipes"  # noqa: PT018
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reading.join()
        self._process.stdout.close()


def _error(found: Mapping[str, str]) -> InputError:
    kind, text = found["kind"], found["error"]
    if kind == "error":
        return InputError(text, where="--engine ray")
    problem = "Ray does not start its actor in time: are its GPUs or cores in use?" if kind == "timeout" else text
    return DriverFailed(problem, where="--engine ray", way_out="See `ray status`.")


class RayEngine:
    """The nodes of a Ray cluster that have devices; `address` empty: the cluster of this machine, or a local one."""

    def __init__(self, state: Path, address: str = "", devices: str = "", options: DriverOptions | None = None) -> None:
        self._log = state / "ray-driver.log"
        self._options = options or DriverOptions()
        self._address = address
        self._devices = devices  # of each node, as --devices
        self._driver: RayDriver | None = None
        self._connecting = threading.Lock()
        self._nodes: dict[str, RayNode] = {}  # by member, of those that are alive
        self._has_gpus = devices.startswith("cuda")
        self._size = 1.0  # GPUs, or cores, of the smallest node
        self._started: set[str] = set()  # members with an actor
        self._left_running: frozenset[str] | None = None

    async def find(self) -> Sequence[str]:
        alive = [RayNode(**each) for each in await self._ask("nodes")]
        self._has_gpus |= not self._devices and any(node.gpus for node in alive)
        usable = [node for node in alive if (node.gpus if self._has_gpus else node.cpus)]
        self._nodes = name_nodes(self._nodes, usable)
        self._size = min((node.gpus if self._has_gpus else node.cpus for node in usable), default=self._size)
        if self._left_running is None:
            self._left_running = frozenset(name for name, node in self._nodes.items() if node.member)
        return tuple(self._nodes)

    @property
    def left_running(self) -> frozenset[str]:
        return self._left_running or frozenset()

    @property
    def driver_pid(self) -> int | None:
        return None if self._driver is None else self._driver.pid

    def node_id(self, name: str) -> str:
        """Ray's name of the node that a member runs on; empty if it is gone."""
        return self._nodes[name].id if name in self._nodes else ""

    async def start(self, name: str) -> Host:
        if (node := self._nodes.get(name)) is None:
            raise HostUnreachable("its Ray node is gone", where=f"node {name!r}", way_out="See `ray status`.")
        self._started.add(name)
        sizes = {"gpus": node.gpus if self._has_gpus else 0.0, "cpus": node.cpus}
        found = await self._ask("start", node=node.id, member=name, devices=self._devices, **sizes)
        return Host(name, found["address"], found["port"], found["token"], tls=found["tls"])

    async def release(self, name: str) -> None:
        self._started.discard(name)
        if (node := self._nodes.get(name)) is not None:
            await self._ask("release", node=node.id)

    async def request(self, nodes: int) -> None:
        await self._ask("request", bundles=[{"GPU" if self._has_gpus else "CPU": self._size}] * nodes)

    def close(self, *, keep: Callable[[str], bool] = lambda name: False) -> None:
        with self._connecting:
            driver, self._driver = self._driver, None
        if driver is None:
            return
        ending = [name for name in self._started if name in self._nodes and not keep(name)]
        asked = [driver.request("release", node=self._nodes[name].id) for name in ending]
        if ending:
            asked.append(driver.request("request", bundles=[]))
        for future in asked:
            # waits, at most until the driver counts as hung; an actor that Ray has lost need not be ended
            future.exception()
        driver.close()

    async def _ask(self, do: str, **values: Any) -> Any:
        if self._driver is None or not self._driver.is_alive:
            await asyncio.to_thread(self._connect)
        assert self._driver is not None, "it was just connected"
        return await asyncio.wrap_future(self._driver.request(do, **values))

    def _connect(self) -> None:
        """Start a driver unless another thread has."""
        with self._connecting:
            if self._driver is not None and self._driver.is_alive:
                return
            check_installed()
            if self._address:
                check_address(self._address)
            if self._driver is not None:
                self._driver.close()
            self._log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._driver = self._with_token_if_needed()

    def _with_token_if_needed(self) -> RayDriver:
        first, *others = driver_environments(os.environ)
        try:
            return self._connected(first)
        except InputError as error:
            if not others or "Failed to connect" not in str(error):
                raise
            return self._connected(others[0])

    def _connected(self, environment: Mapping[str, str]) -> RayDriver:
        """A driver that is connected to the cluster; InputError with Ray's reason if it cannot be."""
        driver = RayDriver(self._log, environment, self._options)
        try:
            found = driver.request("connect", address=self._address).result()
        except InputError as error:
            driver.close()
            problem = f"cannot connect to Ray at {self._address or 'this machine'}: {error.problem}"
            raise type(error)(
                problem, where="--engine ray", way_out=_way_out(f"{error} {driver.last_words()}", _CONNECT)
            ) from None
        if not found["is_own"]:  # the next driver must not start a Ray of its own while this cluster's head is away
            self._address = found["address"]
        return driver


def driver_environments(own: Mapping[str, str]) -> list[Mapping[str, str]]:
    """Environments to connect with, in this order.

    `ray start` asks for a token where its user has one; to a given address Ray itself sends none by default.
    """
    path = Path(own.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray/auth_token")
    has_token = bool(own.get("RAY_AUTH_TOKEN")) or path.is_file()
    if "RAY_AUTH_MODE" in own or not has_token:
        return [own]
    return [own, {**own, "RAY_AUTH_MODE": "token"}]


def _way_out(problem: str, otherwise: str) -> str:
    if "ersion mismatch" in problem:
        return "Install the same Ray and Python here as on the cluster."
    if "InvalidAuthToken" in problem:
        return "The cluster asks for a token: set RAY_AUTH_TOKEN, or write ~/.ray/auth_token, as on its head."
    if "WrongClusterID" in problem:
        return (
            "Ray's head was started again without its tables. Start its other nodes again, too; "
            "with RAY_REDIS_ADDRESS set for the head they need not be."
        )
    return otherwise


def check_installed() -> None:
    """InputError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise InputError("--engine ray needs ray, which is not installed", way_out="pip install 'carpool[ray]'")


def check_address(address: str) -> None:
    """InputError for an address at which nothing listens, without the half minute that Ray tries for."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    way_out = "Write HOST:PORT, as `ray start --head` prints it; carpool runs on a machine of that cluster."
    if not host or not port.isdecimal() or "/" in address:
        raise InputError(f"--ray-address {address!r} is no address of a cluster's head", way_out=way_out)
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise HostUnreachable(f"--ray-address {address}: nothing listens there ({error})", way_out=way_out) from None


def name_nodes(before: Mapping[str, RayNode], alive: Sequence[RayNode]) -> dict[str, RayNode]:
    """Name nodes after their hosts; a second one on a host is ``host-2``. A node keeps its name as long as it lives."""
    ids = {node.id: node for node in alive}
    named = {name: ids[node.id] for name, node in before.items() if node.id in ids}
    known = {node.id for node in named.values()}
    fresh = sorted((node for node in alive if node.id not in known), key=lambda node: (not node.member, node.host))
    for node in fresh:
        name = node.member if node.member and node.member not in named else _free_name(node.host, named)
        named[name] = node
    return named


def _free_name(host: str, taken: Mapping[str, RayNode]) -> str:
    base = re.sub(r"[^\w.\-]", "-", host, flags=re.ASCII).lstrip("._-")[:_MAX_NAME] or "node"
    base = "node-local" if base == "local" else base
    number = 1
    while (name := base if number == 1 else f"{base}-{number}") in taken:
        number += 1
    return name
