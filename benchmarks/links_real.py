"""Predicts the synchronisation of jobs across machines on placements they have not run on, and measures it.

    python benchmarks/links_real.py [--steps 30] [--widths 512,768]

Needs root: three network namespaces stand for machines of one CPU device; each has a link to a bridge, limited by
`tc tbf` both ways to its own rate. Real agents, executors, gloo process groups and the daemon, which measures the links
when the machines join. A policy leads each job through all placements. The prediction of a placement is the live
estimator's when the job is assigned there; it is compared with the median synchronisation reported from there. A first
placement over two machines counts as seen; those after it are the unseen ones.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measured import save

from carpool.core.draft import Draft
from carpool.core.messages import JobCancelled, ProgressReported, Record
from carpool.core.model import Allocation, Job, JobId
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.jobs.hosts_file import Host, HostsFile
from carpool.jobs.job_file import read_jobs
from carpool.runtime.executor.client import ExecutorOptions
from carpool.service.daemon.bootstrap import DaemonInstance, DaemonOptions
from carpool.service.fleet.remote_access import remote_members

HUB, MACHINES = "links-hub", ("links-a", "links-b", "links-c")
RATES = {"links-a": "240mbit", "links-b": "160mbit", "links-c": "48mbit"}
TOKEN = "0123456789abcdef0123456789abcdef"
PLACES = ((0,), (0, 1), (0, 2), (1, 2), (0, 1, 2))
SEEN = 2  # of these, until the first job has run over a link
WARM = 2  # reports of a placement that are left out
PATIENCE_S = 400.0

TRAINING = """
import torch
from torch import nn

from carpool.runtime.data.datasets import TensorData
from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.training import Training


def training(width, steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    inputs, labels = torch.randn(512, width), torch.randint(0, 10, (512,))
    return Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        dataset=TensorData(inputs, labels),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batch_size=96,
        stop=Stop(steps=steps),
    )
"""


def run(*words: object) -> None:
    """Run a command that must succeed."""
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


@contextlib.contextmanager
def machines() -> Iterator[None]:
    """Three namespaces and a bridge between them in a fourth; only those made here are deleted."""
    made = []
    try:
        for name in (HUB, *MACHINES):
            run("ip", "netns", "add", name)
            made.append(name)
        run("ip", "-n", HUB, "link", "set", "lo", "up")
        run("ip", "-n", HUB, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", HUB, "addr", "add", "10.78.0.254/24", "dev", "br0")
        run("ip", "-n", HUB, "link", "set", "br0", "up")
        for number, name in enumerate(MACHINES):
            run("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"p{number}", "netns", HUB)
            run("ip", "-n", HUB, "link", "set", f"p{number}", "master", "br0")
            run("ip", "-n", HUB, "link", "set", f"p{number}", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "addr", "add", f"10.78.0.{number + 1}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            limit = ("rate", RATES[name], "burst", "64kb", "latency", "100ms")
            for space, device in ((name, "eth0"), (HUB, f"p{number}")):
                run("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", device, "root", "tbf", *limit)
        yield
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextlib.contextmanager
def agents(folder: Path) -> Iterator[None]:
    """An agent on each machine."""
    token = folder / "fleet.token"
    token.touch(mode=0o600)
    token.write_text(TOKEN, encoding="ascii")
    started = []
    try:
        for number, name in enumerate(MACHINES):
            words = ["--listen", f"10.78.0.{number + 1}:7638", "--token-file", str(token), "--devices", "cpu:1x1"]
            command = [sys.executable, "-m", "carpool", "agent", *words, "--state", str(folder / name), "--insecure"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            agent = subprocess.Popen(
                ["ip", "netns", "exec", name, *command], stderr=subprocess.PIPE, text=True, env=environment
            )
            started.append(agent)
            assert agent.stderr is not None
            line = agent.stderr.readline()
            assert "listening" in line, line
        yield
    finally:
        for agent in started:
            agent.terminate()
            agent.wait()


@dataclass(frozen=True)
class Tour(Policy):
    """Runs one job at a time on each placement in turn, so many steps on each at least."""

    steps: int
    begun: dict[JobId, list[float]] = field(default_factory=dict)  # steps done at the start on each placement

    def plan(self, view: Snapshot) -> Plan:
        """The placement that follows from the steps done."""
        draft = Draft(view)
        for job in sorted(view.active(), key=lambda job: job.seq)[:1]:
            begun = self.begun.setdefault(job.id, [0.0])
            if not job.is_starting and job.done >= begun[-1] + self.steps and len(begun) < len(PLACES):
                begun.append(job.done)
            if len(view.cluster.links) == len(MACHINES):
                draft.assign(job, Allocation.of(*PLACES[len(begun) - 1]))
        return draft.finish("the next placement", wake_at=view.at + 0.2)

    def ended(self, jobs: Iterable[Job]) -> list[Job]:
        """The jobs that were on all placements."""
        over = {name for name, begun in self.begun.items() if len(begun) == len(PLACES)}
        return [job for job in jobs if job.id in over and job.done >= self.begun[job.id][-1] + self.steps]


class Comparison:
    """Keeps what was predicted at each assignment and what was reported afterwards."""

    def __init__(self, daemon: DaemonInstance) -> None:
        self._daemon = daemon
        self._predicted: dict[tuple[JobId, tuple[int, ...]], float] = {}
        self._measured: dict[tuple[JobId, tuple[int, ...]], list[float]] = {}

    def record(self, record: Record) -> None:
        """Take in a record."""
        scheduler, estimator = self._daemon.scheduler, self._daemon.observers.estimator
        for fact in record.facts:
            job = scheduler.jobs.get(fact.job) if isinstance(fact, ProgressReported) else None
            if isinstance(fact, ProgressReported) and job is not None and job.observed is not None and fact.sync_s:
                place = tuple(job.observed.devices())
                self._measured.setdefault((job.id, place), []).append(fact.sync_s)
        for change in record.planned.changes if record.planned is not None else ():
            if change.allocation is not None:
                spec, place = scheduler.jobs[change.job].spec, tuple(change.allocation.devices())
                found = estimator.sync_s(spec, scheduler.cluster.placement(change.allocation))
                if found is not None:
                    self._predicted.setdefault((change.job, place), found.mean)

    def rows(self) -> list[dict[str, Any]]:
        """Predicted and measured, by job and placement."""
        found = []
        for (job, place), predicted in self._predicted.items():
            reports = self._measured.get((job, place), [])[WARM:]
            if len(reports) >= WARM:
                measured = statistics.median(reports)
                is_seen = job == min(self._predicted)[0] and PLACES.index(place) < SEEN
                row = {"job": job, "place": place, "predicted_s": round(predicted, 4), "measured_s": round(measured, 4)}
                found.append({**row, "error": round(predicted / measured - 1.0, 3), "is_unseen": not is_seen})
        return found


async def lead(folder: Path, steps: int, widths: list[int]) -> dict[str, Any]:
    """Run the jobs through all placements."""
    code = folder / "code"
    await asyncio.to_thread(write_code, code, steps, widths)
    jobs = await asyncio.to_thread(lambda: read_jobs(code / "jobs.toml").jobs)
    hosts = [Host(name, f"10.78.0.{number + 1}", 7638, TOKEN, tls=False) for number, name in enumerate(MACHINES)]
    members = await remote_members(HostsFile(tuple(hosts), 60.0), folder / "state")
    executors = ExecutorOptions(mirror_s=2.0, grace_s=0.5, tick_s=0.02)
    tour = Tour(steps)
    options = DaemonOptions(
        folder / "state", (), "1", "tour", find_policy=lambda text: tour, options=executors, members=members
    )
    daemon = DaemonInstance.open(options)
    comparison = Comparison(daemon)
    daemon.scheduler.add_observer(comparison)
    await daemon.start()
    running = asyncio.create_task(daemon.run())
    await daemon.loop.submit(jobs)
    async with asyncio.timeout(PATIENCE_S):
        while daemon.scheduler.jobs and not running.done():
            await asyncio.sleep(0.2)
            for job in tour.ended(daemon.scheduler.jobs.values()):
                await daemon.loop.apply(JobCancelled(job.id))
    links = {"-".join(link.ends): [round(link.bytes_per_s), link.latency_s] for link in daemon.scheduler.cluster.links}
    daemon.stop()
    await running
    daemon.close()
    return {"rates": RATES, "links": links, "rows": comparison.rows()}


def write_code(code: Path, steps: int, widths: list[int]) -> None:
    """The training and its jobs."""
    code.mkdir()
    (code / "spanned.py").write_text(TRAINING, encoding="utf-8")
    tables = [
        f'[[job]]\nname = "w{width}"\nentry = "spanned.py:training"\nmin_devices = 1\nmax_devices = 3\nmax_nodes = 3\n'
        f"args = {{ width = {width}, steps = 1000000 }}\n"
        for width in widths
    ]
    (code / "jobs.toml").write_text("\n".join(tables), encoding="utf-8")


def main() -> None:
    """Measure, inside the hub's namespace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="on each placement")
    parser.add_argument("--widths", default="512,768", help="of the models, one job each")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        with tempfile.TemporaryDirectory() as folder, machines(), agents(Path(folder)):
            again = [sys.executable, __file__, "--steps", str(options.steps), "--widths", options.widths]
            subprocess.run(["ip", "netns", "exec", HUB, *again, "--inside", folder], check=True)
        return
    found = asyncio.run(lead(Path(options.inside), options.steps, [int(width) for width in options.widths.split(",")]))
    for row in found["rows"]:
        print(row)
    errors = [abs(row["error"]) for row in found["rows"] if row["is_unseen"]]
    found["median_error"], found["worst_error"] = round(statistics.median(errors), 3), max(errors)
    print(f"links {found['links']}; unseen placements: median error {found['median_error']}, worst {max(errors)}")
    print(f"wrote {save('links_real', found)}")


if __name__ == "__main__":
    main()
