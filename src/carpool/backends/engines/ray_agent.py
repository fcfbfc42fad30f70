"""Agent of a Ray node: the actor that launches ``carpool agent`` on its node and ends with it.

Between the two is a supervisor, which this module is when it is run: Ray kills the children of an actor's process with
SIGKILL. The agent receives SIGTERM when actor or supervisor exit, however that happens, and stops its executor with
checkpoints.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from carpool.runtime.compat.process_lifetime import exit_with_parent
from carpool.runtime.executor.client import ExecutorSocket

_START_S = 120.0  # for an agent: its files may have to be read over a network
_STOP_S = 120.0  # for its executor's checkpoints
_POLL_S = 0.05
_PREFIX = "carpool-ray-"
_MODULE = "carpool.backends.engines.ray_agent"
_LOG_TAIL = 600  # characters
_OF_RAY = ("RAY_", "OMP_NUM_THREADS")  # variables that Ray sets for its workers and that jobs must not get


class NodeAgent:
    """The agent of one node. Ray calls its methods on the main thread, so that the agent ends with the process."""

    def __init__(self, member: str, devices: str) -> None:
        self._member = member  # name in the fleet
        self._devices = devices  # as --devices; empty: all free GPUs, else all cores
        self._process: subprocess.Popen[bytes] | None = None
        self._host: dict[str, Any] = {}

    def member(self) -> str:
        return self._member

    def start(self, address: str) -> dict[str, Any]:
        """Launch the agent unless it runs; how it is reached."""
        if self._process is None or self._process.poll() is not None:
            self._launch(address)
        return self._host

    def stop(self) -> None:
        """End the agent, which stops its executor with checkpoints, and delete its folder."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        shutil.rmtree(self._host["state"], ignore_errors=True)

    def _launch(self, address: str) -> None:
        delete_stale_folders(Path(tempfile.gettempdir()))
        state = Path(tempfile.mkdtemp(prefix=_PREFIX))
        token, published = secrets.token_hex(32), state / "address.json"
        (state / "token").touch(mode=0o600)
        (state / "token").write_text(token, encoding="ascii")
        options = ["--listen", f"{address}:0", "--token-file", str(state / "token"), "--state", str(state)]
        options += ["--publish", str(published), *(["--devices", self._devices] if self._devices else [])]
        with (state / "agent.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, "supervise", str(os.getpid()), *options],
                env=agent_environment(os.environ),
                cwd=state,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        port = self._port(published, state / "agent.log")
        is_loopback = ipaddress.ip_address(address).is_loopback
        self._host = {"address": address, "port": port, "token": token, "tls": not is_loopback, "state": str(state)}

    def _port(self, published: Path, log: Path) -> int:
        assert self._process is not None, "the agent was launched"
        give_up_at = time.monotonic() + _START_S
        while not published.exists():
            if self._process.poll() is not None or time.monotonic() > give_up_at:
                self._process.kill()
                tail = log.read_text(encoding="utf-8", errors="replace").strip()[-_LOG_TAIL:]
                raise RuntimeError(tail or f"the agent does not listen within {_START_S:g} s")
            time.sleep(_POLL_S)
        return int(json.loads(published.read_text(encoding="ascii"))["port"])


def agent_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a Ray worker without what Ray adds for itself."""
    return {name: value for name, value in environment.items() if not name.startswith(_OF_RAY)}


def delete_stale_folders(parent: Path) -> None:
    """Delete this user's folders of agents that were killed together with their actors."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError, ValueError):
            is_own = folder.stat().st_uid == os.getuid()
            pid = int((folder / "agent.pid").read_text(encoding="ascii"))
            if is_own and not Path(f"/proc/{pid}").exists() and not ExecutorSocket(folder / "executor").executor_pid:
                shutil.rmtree(folder)


def supervise(actor: int, options: Sequence[str]) -> int:
    """Run the agent and pass SIGTERM on to it, which also comes when the actor's process exits."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGCHLD])
    exit_with_parent(actor, signal.SIGTERM)
    agent = subprocess.Popen([sys.executable, "-P", "-m", _MODULE, "agent", str(os.getpid()), *options])
    while (code := agent.poll()) is None:
        if signal.sigwait([signal.SIGTERM, signal.SIGCHLD]) is signal.SIGTERM:
            agent.send_signal(signal.SIGTERM)
    return code


def become_agent(supervisor: int, options: Sequence[str]) -> None:
    """Replace this process by an agent that receives SIGTERM when the supervisor exits."""
    Path("agent.pid").write_text(str(os.getpid()), encoding="ascii")
    exit_with_parent(supervisor, signal.SIGTERM)  # survives the exec
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGCHLD])
    os.execv(sys.executable, [sys.executable, "-P", "-m", "carpool", "agent", *options])


if __name__ == "__main__":
    what, parent, *words = sys.argv[1:]
    if what == "supervise":
        sys.exit(supervise(int(parent), words))
    become_agent(int(parent), words)
