"""Ray driver: the process that talks to Ray for a scheduler, with JSON lines on its standard input and output.

Ray ends a driver that loses its cluster, and installs signal handlers and threads; in a process of its own that does
not touch the scheduler, whose connections to the agents go on.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from carpool.backends.engines.ray_agent import NodeAgent

NAMESPACE = "carpool"
_PREFIX = "agent-"  # of actors, before the id of their node
_START_S = 180.0  # for an actor and its agent
_MEMBER_S = 10.0
_STOP_S = 150.0
_THREADS = 16  # requests at once
_MESSAGE = 600  # characters of an error


class Driver:
    """Carries out requests of the scheduler."""

    def __init__(self, api: Any = ray) -> None:
        self._ray = api  # the module, or a fake
        self._members: dict[str, str] = {}  # by node id, of the actors that were found or started

    def connect(self, address: str) -> dict[str, Any]:
        """Connect to a Ray cluster, or start a local one when no address is given and none is running."""
        self._ray.init(
            address=address or None,
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
            include_dashboard=None if address else False,
        )
        for name in self._ray.util.list_named_actors():
            if name.startswith(_PREFIX):
                self._adopt(name.removeprefix(_PREFIX))
        return {"address": self._ray.get_runtime_context().gcs_address, "is_own": has_started_head()}

    def _adopt(self, node: str) -> None:
        """Find out which member a node was for an earlier scheduler."""
        try:
            actor: Any = self._ray.get_actor(_PREFIX + node)
            self._members[node] = str(self._ray.get(actor.member.remote(), timeout=_MEMBER_S))
        except (ValueError, RayActorError, GetTimeoutError):
            return

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "id": node["NodeID"],
                "host": node["NodeManagerHostname"],
                "gpus": node["Resources"].get("GPU", 0.0),
                "cpus": node["Resources"].get("CPU", 0.0),
                "member": self._members.get(node["NodeID"], ""),
            }
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def start(self, node: str, member: str, devices: str, gpus: float, cpus: float) -> dict[str, Any]:
        """Start the actor of a node, which holds all its GPUs or else cores, and its agent; how that is reached."""
        actor: Any = (
            self._ray.remote(NodeAgent)
            .options(
                name=_PREFIX + node,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=0,
                num_gpus=gpus,
                num_cpus=0 if gpus else cpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(member, devices)
        )
        address = next(each["NodeManagerAddress"] for each in self._ray.nodes() if each["NodeID"] == node)
        found = self._ray.get(actor.start.remote(address), timeout=_START_S)
        self._members[node] = member
        return dict(found)

    def release(self, node: str) -> None:
        """End the agent of a node and its actor."""
        self._members.pop(node, None)
        try:
            actor: Any = self._ray.get_actor(_PREFIX + node)
        except ValueError:
            return  # it is gone
        try:
            with suppress(RayActorError, GetTimeoutError):  # it is gone, or its agent ends with the actor
                self._ray.get(actor.stop.remote(), timeout=_STOP_S)
        finally:
            self._ray.kill(actor)

    def request(self, bundles: list[dict[str, float]]) -> None:
        """Let the autoscaler provide these resources in all; none withdraws the request."""
        request_resources(bundles=bundles)


def _problem(error: BaseException) -> dict[str, str]:
    cause = error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, Exception) else error
    kind = "gone" if isinstance(error, RayActorError) else "timeout" if isinstance(error, GetTimeoutError) else "error"
    return {"kind": kind, "error": str(cause).strip()[-_MESSAGE:] or type(cause).__name__}


def has_started_head() -> bool:
    """Whether a head of Ray runs as a child of this process, so that it was started by `ray.init`."""
    lists = [task / "children" for task in Path("/proc/self/task").iterdir()]
    names = [Path("/proc", pid, "comm") for each in lists for pid in each.read_text(encoding="ascii").split()]
    return any(name.read_text(encoding="utf-8").strip() == "gcs_server" for name in names)


def serve(lines: TextIO, answer: Callable[[Mapping[str, Any]], None]) -> None:
    """Carry out each request in a thread of its own, until the scheduler closes the stream."""
    driver, lock = Driver(), threading.Lock()

    def carry_out(request: dict[str, Any]) -> None:
        number, do = request.pop("id"), request.pop("do")
        try:
            result: dict[str, Any] = {"answer": getattr(driver, do)(**request)}
        except Exception as error:  # noqa: BLE001 - the scheduler decides what it means
            result = _problem(error)
        with lock:
            answer({"id": number, **result})

    with ThreadPoolExecutor(_THREADS) as pool:
        carry_out(json.loads(lines.readline()))  # connect, on the main thread
        for line in lines:
            pool.submit(carry_out, json.loads(line))


def main() -> None:
    """Serve the scheduler that started this process; Ray's own output goes to standard error."""
    # Of a local Ray: its memory monitor would kill jobs that Ray did not start.
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)

        def answer(result: Mapping[str, Any]) -> None:
            out.write(json.dumps(result) + "\n")
            out.flush()

        serve(sys.stdin, answer)
    ray.shutdown()


if __name__ == "__main__":
    main()
