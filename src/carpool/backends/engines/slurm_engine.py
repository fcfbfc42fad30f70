"""Slurm engine: one agent per node of this allocation, launched by one ``srun`` and reached over TCP.

Each agent gets a token of its own in a private folder on the shared disk and publishes its port there. Members are
named by their place in the allocation (``node-0``): the next allocation, on other hosts, continues with the same nodes.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from carpool.core.errors import InputError
from carpool.jobs.code_archive import MAX_BYTES
from carpool.jobs.hosts_file import Host, HostsFile

_START_S = 180.0  # for the agents: a shared disk may be slow to load Python from
_END_S = 60.0  # for the agents' executors to write checkpoints
_ANSWER_S = 120.0  # for a command of Slurm: sbatch itself retries while slurmctld is busy
_POLL_S = 0.1
_LEASE_S = 30.0
_LOG_TAIL = 600  # characters
# Runs on every node until its standard input ends, which srun passes on; srun itself would kill it without checkpoints.
# Its state is on the node's own disk: the run fetches what it needs.
_AGENT = """\
there=$(mktemp -d "${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/carpool-XXXXXXXX") || exit 2
python=$1 folder=$2; shift 2
exec 3<&0
"$python" -m carpool agent --listen "$(cat "$folder/$SLURMD_NODENAME.address"):0" --state "$there" \\
  --token-file "$folder/$SLURMD_NODENAME.token" --publish "$folder/$SLURMD_NODENAME.json" "$@" 3<&- &
agent=$!
trap 'kill -TERM "$agent"' TERM
{ cat > /dev/null; kill -TERM "$agent"; } <&3 3<&- &
watcher=$!
while kill -0 "$agent" 2> /dev/null; do wait "$agent"; code=$?; done
kill "$watcher" 2> /dev/null
rm -rf "$there"
exit "$code"
"""
# The end of one agent does not end the others; each sees all cores, memory and GPUs of its node.
_SRUN = ("--ntasks-per-node=1", "--overlap", "--cpu-bind=none", "--mem=0", "--kill-on-bad-exit=0", "--wait=0")


@dataclass(frozen=True, slots=True)
class Allocation:
    """The nodes of a Slurm allocation, in its order, and the addresses at which they reach each other."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]


class SlurmEngine:
    """The agents of the allocation that this process runs in, from `start` to `close`."""

    def __init__(
        self,
        state: Path,
        devices: str = "",
        environment: Mapping[str, str] = os.environ,
        *,
        max_code_bytes: int = MAX_BYTES,
    ) -> None:
        self._state = state  # on a disk that all nodes share
        self._devices = devices  # of each node, as --devices
        self._max_code_bytes = max_code_bytes
        self._environment = environment
        self._folder: Path | None = None
        self._srun: subprocess.Popen[bytes] | None = None
        self.notes: list[str] = []

    def start(self) -> HostsFile:
        """Launch the agents and wait until all listen; InputError outside of an allocation, or if they do not start."""
        allocation = find_allocation(self._environment)
        self._state.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder = Path(tempfile.mkdtemp(prefix="agents-", dir=self._state))
        tokens = [secrets.token_hex(32) for _ in allocation.names]
        for name, address, token in zip(allocation.names, allocation.addresses, tokens, strict=True):
            _write_private(folder / f"{name}.address", address)
            _write_private(folder / f"{name}.token", token)
        self._srun = self._launch(folder, len(tokens))
        ports = [self._port(name) for name in allocation.names]
        self.notes = [f"node-{place} is {name}" for place, name in enumerate(allocation.names)]
        hosts = [
            Host(f"node-{place}", address, port, token, tls=not ipaddress.ip_address(address).is_loopback)
            for place, (address, port, token) in enumerate(zip(allocation.addresses, ports, tokens, strict=True))
        ]
        return HostsFile(tuple(hosts), _LEASE_S, self._max_code_bytes)

    def close(self) -> None:
        """End the agents, which stop what still runs with checkpoints, and delete the tokens."""
        if self._srun is not None:
            assert self._srun.stdin is not None, "agents run until it is closed"
            self._srun.stdin.close()
            try:
                self._srun.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._srun.kill()
                self._srun.wait()
            self._srun = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    @property
    def _log(self) -> Path:
        return self._state / "agents.log"

    def _launch(self, folder: Path, count: int) -> subprocess.Popen[bytes]:
        size = (f"--nodes={count}", f"--ntasks={count}")
        devices = ("--devices", self._devices) if self._devices else ()
        agent = ("sh", "-c", _AGENT, "sh", sys.executable, str(folder), *devices)
        with self._log.open("ab") as log:
            return subprocess.Popen(
                ["srun", *size, *_SRUN, *agent],
                env=dict(self._environment),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the run, which ends the agents after its jobs
            )

    def _port(self, name: str) -> int:
        """The port that an agent has published."""
        assert self._folder is not None and self._srun is not None, "the agents are launched"  # noqa: PT018
        published, give_up_at = self._folder / f"{name}.json", time.monotonic() + _START_S
        while not published.exists():
            if self._srun.poll() is not None or time.monotonic() > give_up_at:
                tail = self._log.read_text(encoding="utf-8", errors="replace").strip()[-_LOG_TAIL:]
                problem = f"the agent of node {name} does not start: {tail or 'it does not answer in time'}"
                self.close()
                raise InputError(problem, where="--engine slurm", way_out=f"Read {self._log}.")
            time.sleep(_POLL_S)
        return int(json.loads(published.read_text(encoding="ascii"))["port"])


def find_allocation(environment: Mapping[str, str]) -> Allocation:
    """The allocation that this process runs in; InputError outside of one."""
    if not (listed := environment.get("SLURM_JOB_NODELIST", "")):
        way_out = "Use carpool slurm JOBS.toml --nodes N, or run this inside of salloc or sbatch."
        raise InputError("--engine slurm outside of a Slurm allocation", way_out=way_out)

    def show(*words: str) -> list[str]:
        return run_slurm("scontrol", "show", *words, environment=environment).split()

    names = show("hostnames", listed)
    shown = [show("node", name, "--oneliner") for name in names]
    given = [_field(words, "NodeAddr") or name for words, name in zip(shown, names, strict=True)]
    return Allocation(tuple(names), tuple(reachable_addresses(given)))


def reachable_addresses(given: Sequence[str]) -> list[str]:
    """The IP addresses of names or addresses, as other nodes reach them.

    A node often resolves its own name to a loopback address. It is then replaced by the one towards the other nodes.
    """
    try:
        found = [socket.getaddrinfo(each, None, type=socket.SOCK_STREAM)[0][4][0] for each in given]
    except OSError as error:
        problem = f"the nodes {', '.join(given)} cannot be resolved: {error}"
        raise InputError(problem, where="--engine slurm", way_out="Ask for an entry in DNS or /etc/hosts.") from None
    addresses = [str(each) for each in found]
    others = [each for each in addresses if not ipaddress.ip_address(each).is_loopback]
    if not others:
        return addresses
    own = _own_address_towards(others[0])
    return [own if ipaddress.ip_address(each).is_loopback else each for each in addresses]


def _own_address_towards(address: str) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        return str(probe.getsockname()[0])


def run_slurm(*words: str, environment: Mapping[str, str], limit_s: float = _ANSWER_S) -> str:
    """What a command of Slurm prints; InputError if it is not installed, fails, or does not answer in time."""
    try:
        done = subprocess.run(
            words, env=dict(environment), capture_output=True, text=True, check=False, timeout=limit_s
        )
    except FileNotFoundError:
        raise InputError(f"{words[0]} is not installed here", way_out="Run it on a node of the cluster.") from None
    except subprocess.TimeoutExpired:
        problem = f"{shlex.join(words)} did not answer within {limit_s:g} s"
        raise InputError(problem, way_out="Check with `scontrol ping` that slurmctld runs.") from None
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"  # scontrol: on stdout
        raise InputError(f"{shlex.join(words)} failed: {said[-_LOG_TAIL:]}", way_out="See `sinfo` and `squeue`.")
    return done.stdout


def _field(words: Sequence[str], name: str) -> str:
    return next((word.partition("=")[2] for word in words if word.startswith(f"{name}=")), "")


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text, encoding="ascii")
