"""A Slurm cluster on this machine: munged, slurmctld and one slurmd per node, all children of the test on loopback."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

_DAEMONS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
_READY_S = 60.0
_END_S = 30.0
_POLL_S = 0.2
_CONFIG = """\
ClusterName=carpool
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=10
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
CommunicationParameters=NoAddrCache
MinJobAge=300
KillWait=5
"""


def missing_programs() -> list[str]:
    """The programs of Slurm that are not installed here; root is needed to run them as daemons."""
    return [name for name in _DAEMONS if shutil.which(name, path=_path()) is None]


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


@dataclass(frozen=True, slots=True)
class SlurmCluster:
    """A running cluster; commands need its environment."""

    folder: Path
    environment: dict[str, str]

    def run(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert not check or not done.returncode, f"{words}: {done.stderr}"
        return done.stdout

    def field(self, job: str, name: str) -> str:
        """A field of ``scontrol show job``, such as JobState or Restarts."""
        words = self.run("scontrol", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def wait_until(self, holds: Callable[[], bool], limit_s: float = 240.0) -> None:
        """Wait until something holds; the state of all jobs if it does not in time."""
        limit = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > limit:
                raise AssertionError(self.run("scontrol", "show", "job", check=False))
            time.sleep(_POLL_S)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _write_config(folder: Path, nodes: Sequence[str]) -> None:
    host, (port, *ports) = socket.gethostname(), _free_ports(1 + len(nodes))
    lines = [_CONFIG.format(folder=folder, host=host, port=port)]
    for name, own in zip(nodes, ports, strict=True):
        lines.append(f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={own} CPUs=1 State=UNKNOWN\n")
    lines.append(f"PartitionName=all Nodes={','.join(nodes)} Default=YES MaxTime=INFINITE State=UP\n")
    (folder / "slurm.conf").write_text("".join(lines), encoding="ascii")
    for name in ("state", "munge"):
        (folder / name).mkdir(mode=0o755)
    key = folder / "munge" / "key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(64))


@contextmanager
def slurm_cluster(nodes: Sequence[str] = ("node1", "node2")) -> Iterator[SlurmCluster]:
    """Start a cluster in a folder of its own, and end all of it."""
    folder = Path(tempfile.mkdtemp(prefix="carpool-slurm-"))  # a short path: munge limits sockets to 108 bytes
    folder.chmod(0o755)
    _write_config(folder, nodes)
    environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
    cluster = SlurmCluster(folder, environment)
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> None:
        log = (folder / "daemons.log").open("ab")
        with log:
            started.append(subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    munge = [f"--{name}={folder}/munge/{file}" for name, file in _MUNGE_FILES]
    try:
        start("munged", "--foreground", "--force", *munge)
        _wait_for((folder / "munge" / "socket").exists, cluster, started)
        start("slurmctld", "-D", "-i")
        for name in nodes:
            start("slurmd", "-D", "-N", name)
        _wait_for(lambda: _idle_nodes(cluster) == len(nodes), cluster, started)
        yield cluster
    finally:
        _end_jobs(cluster)
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(folder, ignore_errors=True)


_MUNGE_FILES = (
    ("socket", "socket"),
    ("key-file", "key"),
    ("pid-file", "pid"),
    ("log-file", "log"),
    ("seed-file", "seed"),
)


def _end_jobs(cluster: SlurmCluster) -> None:
    """Cancel all jobs and wait for their processes."""
    cluster.run("scancel", "--user=root", check=False)
    limit = time.monotonic() + _END_S
    while cluster.run("squeue", "--noheader", check=False).strip() and time.monotonic() < limit:
        time.sleep(_POLL_S)


def _idle_nodes(cluster: SlurmCluster) -> int:
    return cluster.run("sinfo", "-h", "-N", "-o", "%t", check=False).split().count("idle")


def _wait_for(holds: Callable[[], bool], cluster: SlurmCluster, started: Sequence[subprocess.Popen[bytes]]) -> None:
    limit = time.monotonic() + _READY_S
    while not holds():
        dead = [process.args for process in started if process.poll() is not None]
        if dead or time.monotonic() > limit:
            logs = {p.name: p.read_text(errors="replace")[-3000:] for p in cluster.folder.glob("*.log")}
            raise AssertionError(f"the cluster did not start: {dead} {logs}")
        time.sleep(_POLL_S)
