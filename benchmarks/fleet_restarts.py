"""Kills the daemon of a fleet with SIGKILL while jobs train, and starts it again: what jobs lose by it.

    python benchmarks/fleet_restarts.py [--engine hosts|ray] [--no-save]

`carpool serve` over three agents on loopback (lease of 10 s), or over three raylets of a real cluster (30 s). One job
per machine appends a line for each step to a file. The daemon stays away for 2 s, and for longer than the lease.
Columns: the longest pause between two steps of a job; from the start of the next daemon to the next step of the slowest
job; processes that made a job's steps (1: no job was started again); steps made again; and whether every job ended once
with the weights of one device.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fleet_faults import STEP_S, WARM_S, Ledgers, until_steps
from measured import RESULTS, save

from tests.support.daemon_crash import check_journal, outcomes, read
from tests.support.fleet_rig import AgentProcess

MEMBERS = 3
LEASES_S = {"hosts": 10.0, "ray": 30.0}
BEYOND_S = 10.0  # of the lease
SHORT_S = 2.0
AFTER_S = 15.0  # of steps after the restart
PATIENCE_S = 240.0


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one restart."""

    engine: str
    lease_s: float
    down_s: float
    longest_pause_s: float
    resumed_s: float  # from the start of the next daemon
    processes: int  # of the job with most
    steps_again: int
    ended_once: bool
    are_digests_equal: bool


class Server:
    """`carpool serve` in a process of its own, with the daemon's folder."""

    def __init__(self, state: Path, options: Sequence[str]) -> None:
        self._state = state
        self._command = [sys.executable, "-m", "carpool", "serve", "--state", str(state), "--policy", "fifo"]
        self._command += ["--port", "0", *options]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self._state.parent / "serve.log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def end(self, *, kill: bool) -> None:
        if self._process is not None:
            self._process.kill() if kill else self._process.terminate()
            self._process.wait(PATIENCE_S)
            self._process = None

    def ask(self, *words: str) -> str:
        """The output of a command to the daemon; empty while it does not answer."""
        server = ("--server", f"unix:{self._state / 'api.sock'}")
        done = subprocess.run([sys.executable, "-m", "carpool", *words, *server], capture_output=True, check=False)
        return "" if done.returncode else done.stdout.decode()

    def wait_for(self, *words: str) -> str:
        give_up_at = time.monotonic() + PATIENCE_S
        while not (answer := self.ask(*words)):
            if time.monotonic() > give_up_at:
                raise RuntimeError((self._state.parent / "serve.log").read_text(encoding="utf-8")[-2000:])
            time.sleep(0.2)
        return answer

    def jobs(self) -> list[dict[str, Any]]:
        return list(json.loads(self.wait_for("ps", "--json", "--all"))["jobs"])


@contextlib.contextmanager
def hosts(folder: Path) -> Iterator[list[str]]:
    """Three agents; the options of the engine."""
    agents = [AgentProcess(folder, f"box{number}") for number in range(MEMBERS)]
    try:
        for agent in agents:
            agent.start()
        tables = [
            f'[[host]]\nname = "{agent.name}"\naddress = "127.0.0.1"\nport = {agent.port}\n'
            'token_file = "fleet.token"\ntls = false\n'
            for agent in agents
        ]
        (folder / "lab.toml").write_text("\n".join([f"lease = {LEASES_S['hosts']}", *tables]), encoding="utf-8")
        yield ["--engine", "hosts", "--hosts", str(folder / "lab.toml")]
    finally:
        for agent in agents:
            agent.close()


@contextlib.contextmanager
def ray(folder: Path) -> Iterator[list[str]]:
    """Three raylets; the options of the engine."""
    from tests.support.ray_rig import ENVIRONMENT, three_raylets

    os.environ.update(ENVIRONMENT, RAY_AUTH_MODE="disabled")
    with three_raylets() as (cluster, _):
        yield ["--engine", "ray", "--ray-address", cluster.address, "--devices", "cpu:1"]


def restart(engine: str, down_s: float) -> Row:
    """Kill the daemon in the middle of its jobs and start it again after a while."""
    with tempfile.TemporaryDirectory(prefix="carpool-restart-", ignore_cleanup_errors=True) as room:
        folder = Path(room)
        ledgers = Ledgers.make(folder, MEMBERS, round((WARM_S + AFTER_S) / STEP_S))
        state = folder / "state"
        with (hosts if engine == "hosts" else ray)(folder) as options:
            server = Server(state, options)
            try:
                server.start()
                server.jobs()
                server.wait_for("submit", "--detach", str(folder / "code" / "jobs.toml"))
                asyncio.run(until_steps(ledgers))
                killed_at = time.monotonic()
                server.end(kill=True)
                time.sleep(down_s)
                started_at = time.monotonic()
                server.start()
                while any(job["phase"] != "finished" for job in server.jobs()):
                    time.sleep(0.5)
            finally:
                server.end(kill=False)
            return row_of(engine, down_s, ledgers, state, killed_at, started_at)


def row_of(engine: str, down_s: float, ledgers: Ledgers, state: Path, killed_at: float, started_at: float) -> Row:
    """Measure a restart from the files of steps and the journal."""
    pauses, resumed, processes, again = [], [], [], 0
    for job in ledgers.jobs:
        made = ledgers.steps(job.spec.id)
        around = [step.at for step in made if step.at >= killed_at - 1.0]
        pauses.append(max(later - earlier for earlier, later in itertools.pairwise(around)))
        resumed.append(next(step.at for step in made if step.at >= started_at) - started_at)
        processes.append(len({step.process for step in made}))
        again += sum(count - 1 for count in Counter(step.number for step in made).values())
    entries = read(state)
    try:
        check_journal(entries, [job.spec.id for job in ledgers.jobs])
        ended_once = True
    except AssertionError:
        ended_once = False
    found = outcomes(entries)
    equal = all(job.spec.id in found and found[job.spec.id].digest == ledgers.digest(job) for job in ledgers.jobs)
    figures = (round(max(pauses), 2), round(max(resumed), 2), max(processes), again)
    return Row(engine, LEASES_S[engine], down_s, *figures, ended_once, equal)


def main() -> None:
    """Restart the daemon of one engine, or of both, and keep the rows of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=tuple(LEASES_S), help="run only this one")
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    path = RESULTS / "fleet_restarts.json"
    found = dict(json.loads(path.read_text(encoding="utf-8"))["results"]) if path.is_file() else {}
    for engine in [args.engine] if args.engine else list(LEASES_S):
        found[engine] = []
        for down_s in (SHORT_S, LEASES_S[engine] + BEYOND_S):
            found[engine].append(asdict(restart(engine, down_s)))
            print("  ".join(f"{name} {value}" for name, value in found[engine][-1].items()), flush=True)
        if not args.no_save:
            save("fleet_restarts", found)


if __name__ == "__main__":
    main()
