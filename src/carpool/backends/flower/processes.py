"""Processes of Flower: a SuperLink, SuperNodes, and the run whose apps relay."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from carpool.backends.flower.relay_app import write_app
from carpool.core.errors import InputError

_START_S = 120.0
_STOP_S = 10.0
_CONNECTION = "carpool"
_CHECK = "Check that it runs, its address, and --root-certificates (or --insecure)."
_LAUNCH = """import os, sys
from carpool.runtime.compat.process_lifetime import exit_with_parent
exit_with_parent(int(sys.argv[1]))
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class Security:
    """How connections to a SuperLink are secured.

    TLS unless ``insecure``; ``root_certificates`` instead of the system's; ``node_key`` authenticates a SuperNode.
    """

    insecure: bool = False
    root_certificates: str = ""
    node_key: str = ""

    def connection(self, superlink: str) -> str:
        """The configuration file of Flower's commands."""
        lines = [f'[superlink]\ndefault = "{_CONNECTION}"\n[superlink.{_CONNECTION}]\naddress = "{superlink}"']
        if self.insecure:
            lines.append("insecure = true")
        elif self.root_certificates:
            lines.append(f"root-certificates = {json.dumps(str(Path(self.root_certificates).resolve()))}")
        return "\n".join(lines) + "\n"

    def check(self, address: str) -> None:
        """InputError if an insecure connection would leave this machine."""
        host = address.rpartition(":")[0].strip("[]")
        with contextlib.suppress(ValueError):
            if ip_address("127.0.0.1" if host == "localhost" else host).is_loopback:
                return
        if self.insecure:
            raise InputError(
                f"an insecure connection to {address} would send weights unencrypted",
                way_out="Give --root-certificates, or tunnel the port to 127.0.0.1.",
            )


def check_installed() -> None:
    """InputError if Flower is not installed."""
    if importlib.util.find_spec("flwr") is None:
        raise InputError("Flower is not installed", way_out="pip install 'carpool[federated]'")


@dataclass(slots=True)
class FlowerProcesses:
    """Starts processes of Flower with logs in a folder; all end with this process."""

    folder: Path
    children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """Flower finds its own commands by PATH; its telemetry is turned off."""
        commands = str(Path(sys.executable).parent)
        return {
            **os.environ,
            "PATH": f"{commands}:{os.environ.get('PATH', '')}",
            "FLWR_HOME": str(self.folder.resolve() / "flower"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }

    async def start_superlink(self) -> str:
        """Start a SuperLink for this machine alone; its address."""
        port = free_port()
        words = ["--insecure", "--host", "127.0.0.1", "--port", str(port), "--disable-runtime-dependency-installation"]
        child = self._start("superlink", ["flower-superlink", *words])
        ends = asyncio.get_running_loop().time() + _START_S
        while not _is_open(port):
            if child.poll() is not None or asyncio.get_running_loop().time() > ends:
                raise InputError("the SuperLink did not start", way_out=f"See {self.folder / 'superlink.log'}.")
            await asyncio.sleep(0.1)
        return f"127.0.0.1:{port}"

    def start_supernode(self, name: str, superlink: str, config: Mapping[str, str], security: Security) -> None:
        """Start a SuperNode; it retries until the SuperLink answers."""
        values = " ".join(f'{key}="{value}"' for key, value in config.items())
        words = ["--superlink", superlink, "--port", str(free_port()), "--node-config", values]
        words += ["--insecure"] if security.insecure else []
        words += ["--root-certificates", security.root_certificates] if security.root_certificates else []
        words += ["--auth-supernode-private-key", security.node_key] if security.node_key else []
        self._start(f"supernode-{name}", ["flower-supernode", *words])

    async def submit(self, superlink: str, config: Mapping[str, str], security: Security) -> str:
        """Start the run whose apps relay; its id."""
        home = self.folder / "flower"
        write_app(home / "app")
        (home / "config.toml").write_text(security.connection(superlink), encoding="utf-8")
        values = " ".join(f'{key}="{value}"' for key, value in config.items())
        words = ["run", str(home / "app"), _CONNECTION, "--format", "json", "--run-config", values]
        child = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).parent / "flwr"), *words, env=self.environment(), stdout=subprocess.PIPE
        )
        try:
            out, _ = await asyncio.wait_for(child.communicate(), _START_S)
            answer = json.loads(out)
        except (TimeoutError, ValueError):
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            raise InputError(f"`flwr run` did not answer for the SuperLink {superlink}", way_out=_CHECK) from None
        if not answer.get("success"):
            lines = [line.strip() for line in str(answer.get("error-message", "")).splitlines()]
            why = " ".join(line for line in lines if line and not line.startswith("Using SuperLink"))
            raise InputError(f"the SuperLink {superlink} did not accept the run: {why}", way_out=_CHECK)
        return str(answer["run-id"])

    def _start(self, name: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        path = str(Path(sys.executable).parent / words[0])
        command = [sys.executable, "-c", _LAUNCH, str(os.getpid()), path, *words[1:]]
        with (self.folder / f"{name}.log").open("ab") as log:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment(),
                start_new_session=True,
            )
        self.children[name] = child
        return child

    def stop(self) -> None:
        """End all of them, and what they have started."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            for child in self.children.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, sign)
            for child in self.children.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_STOP_S)
        self.children.clear()


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
