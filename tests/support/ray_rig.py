"""Ray clusters on loopback in processes of their own, and a daemon over their nodes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from carpool.backends.engines.ray_engine import RayEngine
from carpool.service.daemon.bootstrap import DaemonInstance, DaemonOptions
from carpool.service.fleet.engine_members import EngineMembers
from tests.support.daemon_crash import pids_with
from tests.support.fleet_rig import OPTIONS, PATIENCE_S

STORE_BYTES = 80 << 20
_STARTS = 3  # of a head or raylet: Ray gives up after 30 s, which a busy machine may need
# All on loopback, by the setting that Ray has for other systems; no worker is killed for memory, or runs with low
# priority; a dead raylet is noticed quickly.
ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
}


class RayletCluster:
    """`ray.cluster_utils.Cluster` behind a pipe: raylets with one core each."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ray_rig"],
            cwd=Path(__file__).resolve().parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT, "RAY_TMPDIR": str(folder)},
        )
        self.address = self._answer()

    def add(self) -> str:
        """Start a raylet; its node id."""
        return self._ask("add")

    def kill(self, node: str) -> None:
        """Kill a raylet with SIGKILL."""
        self._ask(f"kill {node}")

    def leave_zombie(self, node: str) -> None:
        """Kill a raylet with SIGKILL and do not reap it: its process number stays in use."""
        self._ask(f"zombie {node}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait(PATIENCE_S)

    def _ask(self, words: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(words + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return line.removeprefix("answer ").strip()
        raise AssertionError("the Ray cluster ended")


def _serve_cluster() -> None:
    """Run in the cluster's process: one command per line."""
    from ray.cluster_utils import Cluster

    def answer(words: str) -> None:
        print("answer", words, flush=True)  # noqa: T201 - it is a protocol

    size: dict[str, Any] = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "node_ip_address": "127.0.0.1"}
    few = {"include_dashboard": False, "include_log_monitor": False}
    cluster: Any = Cluster(initialize_head=True, head_node_args={**size, **few})
    answer(cluster.address)
    nodes = {}
    for line in sys.stdin:
        what, _, node = line.strip().partition(" ")
        if what == "add":
            added = cluster.add_node(**size, **few)
            nodes[added.node_id] = added
            answer(added.node_id)
        elif what == "zombie":
            (raylet,) = nodes[node].all_processes["raylet"]
            os.kill(raylet.process.pid, signal.SIGKILL)
            answer("killed")
        else:
            cluster.remove_node(nodes.pop(node), allow_graceful=False)
            answer("killed")
    cluster.shutdown()


class RestartableCluster:
    """A head without cores, whose processes can be killed, and raylets with one core each.

    With a Redis server the head keeps its tables there, so that a head that is started again knows its nodes.
    """

    def __init__(self, folder: Path, redis: int = 0) -> None:
        self._environment = {**os.environ, **ENVIRONMENT, "RAY_TMPDIR": str(folder)}
        if redis:
            self._environment["RAY_REDIS_ADDRESS"] = f"127.0.0.1:{redis}"
        self._port = free_port()
        self.address = f"127.0.0.1:{self._port}"
        self._head: subprocess.Popen[str] | None = None
        self._raylets: list[subprocess.Popen[str]] = []

    def start_head(self) -> None:
        self._head = self._start("head", str(self._port))

    def kill_head(self) -> None:
        """Kill all processes of the head with SIGKILL."""
        assert self._head is not None, "it was started"
        kill_group(self._head)

    def add(self) -> None:
        """Start a raylet and wait until it has joined."""
        self._raylets.append(self._start("raylet", self.address))

    def kill_raylets(self) -> None:
        """Kill all processes of the raylets beside the head with SIGKILL."""
        for each in self._raylets:
            kill_group(each)
        self._raylets.clear()

    def wait_for_raylets(self) -> None:
        """Wait until all raylets beside the head have ended by themselves."""
        for each in self._raylets:
            each.wait(PATIENCE_S)
        self.kill_raylets()

    def close(self) -> None:
        for each in (*self._raylets, *([self._head] if self._head else [])):
            kill_group(each)
        for pid in pids_with(f"RAY_TMPDIR={self._environment['RAY_TMPDIR']}"):
            with suppress(ProcessLookupError):  # idle workers without their raylet wait a minute for the head
                os.kill(pid, signal.SIGKILL)

    def _start(self, *what: str) -> subprocess.Popen[str]:
        for _ in range(_STARTS):
            process, has_started = self._try_to_start(*what)
            if has_started:
                return process
            kill_group(process)
        raise AssertionError(f"Ray's {what[0]} does not start")

    def _try_to_start(self, *what: str) -> tuple[subprocess.Popen[str], bool]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ray_rig", *what],
            cwd=Path(__file__).resolve().parents[2],
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        answer = process.stdout.readline()
        process.stdout.close()
        return process, answer == "answer started\n"


def _serve_node(what: str, where: str) -> None:
    """Run a head or a raylet in this process, as `ray start --block` does; end when one of its processes ends."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    few = {"include_dashboard": False, "include_log_monitor": False, "min_worker_port": 0, "max_worker_port": 0}
    same: dict[str, Any] = {"node_ip_address": "127.0.0.1", "object_store_memory": STORE_BYTES, **few}
    own = (
        {"gcs_server_port": int(where), "num_cpus": 0}
        if what == "head"
        else {"gcs_address": where, "num_cpus": 1, "node_manager_port": 0}
    )
    node: Any = Node(RayParams(**same, **own), head=what == "head")
    print("answer started", flush=True)  # noqa: T201 - it is a protocol
    while not node.dead_processes():
        time.sleep(0.05)


def kill_group(process: subprocess.Popen[str]) -> None:
    """Kill a process and all of its group with SIGKILL."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(PATIENCE_S)


@contextmanager
def redis_server(folder: Path) -> Iterator[int]:
    """The port of a Redis server on loopback."""
    port = free_port()
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            _wait_until(lambda: is_listening(port))
            yield port
        finally:
            process.kill()


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def restartable_cluster(raylets: int, *, with_redis: bool) -> Iterator[RestartableCluster]:
    """A head and so many raylets beside it."""
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        redis_server(Path(folder)) if with_redis else nullcontext(0) as redis,
    ):
        cluster = RestartableCluster(Path(folder), redis)
        try:
            cluster.start_head()
            for _ in range(raylets):
                cluster.add()
            yield cluster
        finally:
            cluster.close()


@contextmanager
def three_raylets() -> Iterator[tuple[RayletCluster, list[str]]]:
    """A head and two further raylets, whose node ids are given."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        cluster = RayletCluster(Path(folder))
        try:
            yield cluster, [cluster.add(), cluster.add()]
        finally:
            cluster.close()


@contextmanager
def autoscaling_cluster(most: int) -> Iterator[str]:
    """A head without devices, and Ray's own autoscaler with its fake provider: raylets with one core each."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield from _autoscaling_cluster(Path(folder), most)


def _autoscaling_cluster(folder: Path, most: int) -> Iterator[str]:
    port = free_port()
    address, head = f"127.0.0.1:{port}", "f" * 51 + "00000"
    (folder / "autoscaler.json").write_text(json.dumps(_autoscaler(address, head, most)), encoding="utf-8")
    options = [f"--port={port}", "--node-ip-address=127.0.0.1", "--num-cpus=0", "--include-dashboard=false"]
    options += [f"--object-store-memory={STORE_BYTES}", f"--autoscaling-config={folder / 'autoscaler.json'}"]
    fake = {"RAY_FAKE_CLUSTER": "1", "RAY_OVERRIDE_NODE_ID_FOR_TESTING": head, "RAY_CLOUD_INSTANCE_ID": head}
    with (folder / "head.log").open("wb") as log:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", *options],
            env={
                **os.environ,
                **ENVIRONMENT,
                **fake,
                "RAY_TMPDIR": str(folder),
                "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            },
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        _wait_until(lambda: b"block forever" in (folder / "head.log").read_bytes() or process.poll() is not None)
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)


def _autoscaler(address: str, head: str, most: int) -> dict[str, object]:
    provider = {"type": "fake_multinode", "gcs_address": address, "head_node_id": head, "use_node_id_as_ip": True}
    commands = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    worker = {"CPU": 1, "object_store_memory": STORE_BYTES}
    return {
        "cluster_name": "test",
        "max_workers": most,
        "idle_timeout_minutes": 0.05,
        "upscaling_speed": 1.0,
        "provider": {**provider, "disable_node_updaters": True, "disable_launch_config_check": True},
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": worker, "node_config": {}, "min_workers": 0, "max_workers": most},
        },
        "head_node_type": "ray.head.default",
        **{f"{name}_commands": [] for name in commands},
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
        "file_mounts_sync_continuously": False,
    }


def _wait_until(holds: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up_at, "it does not come true"
        time.sleep(0.05)


async def become(holds: Callable[[], bool]) -> None:
    """Wait for what no event of a daemon's feed says."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - processes of Ray come and go
            await asyncio.sleep(0.05)


@asynccontextmanager
async def ray_daemon(
    state: Path,
    address: str,
    *,
    lease_s: float,
    idle_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    leave_running: bool = False,
) -> AsyncIterator[tuple[DaemonInstance, RayEngine]]:
    """A daemon over the nodes of a Ray cluster, each with one device; its agents end with it unless left running."""
    engine = RayEngine(state / "engine", address, "cpu:1")
    try:
        source = EngineMembers(engine, state, lease_s=lease_s, idle_s=idle_s, clock=clock)
        _, members = await source.first()
        options = DaemonOptions(state, (), "1", "fifo", "fifo", options=OPTIONS, members=members, source=source)
        with closing(DaemonInstance.open(options)) as daemon:
            await daemon.start()
            running = asyncio.create_task(daemon.run())
            try:
                yield daemon, engine
            finally:
                daemon.stop(leave_running=leave_running)
                await running
    finally:
        await asyncio.to_thread(engine.close, keep=lambda name: leave_running)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _serve_node(*sys.argv[1:])
    else:
        _serve_cluster()
