"""Stops, cuts off and kills machines of a fleet while they train, and checks that nothing runs twice or is lost.

    python benchmarks/fleet_faults.py [--part hosts|short|ray|head] [--stop 30] [--cut 20]

`hosts`: agents on loopback with a lease of 10 s. At one moment the executor of one is stopped with SIGSTOP, of another
its agent as well, the link of a third is cut, and a fourth is killed; stopped ones wake after `--stop` seconds, the
link heals after `--cut`. `short`: the same cut with the default lease of 30 s, which it does not outlast. `ray`: raylets
of a real cluster killed with SIGKILL, one reaped and one left as a zombie. `head`: all processes of the head of a Ray
cluster killed with SIGKILL and started again after `--cut` seconds on the same port; with its tables in Redis, the same
with the scheduler's driver killed as well, and without Redis: its raylets then end by themselves and are started anew.

Trainings append a line for each step to one file each, with the time, their process and the file they run from, which
lies in the folder of a machine. Columns: seconds from the fault until the machine counted as lost; from then to the
first step of its job on another machine, and the longest pause of the jobs on other machines around that moment; steps
made again and the time they stand for, against the mirror interval (1 s between mirrors, 1 s between fetches, 3 s of
silence after which a job stands still); steps made by the lost machine after it counted as lost, and files that changed
in the job's folder there, looked at every 20 ms for as long as the lost executor lives, and at the end; and whether the
job ended once with the weights of one device.
"""  # noqa: E501

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from measured import RESULTS, save

from carpool.backends.remote_member import _SYNC_S
from carpool.core.messages import NodeLost, Record
from carpool.core.model import JobId
from carpool.jobs.job_file import ListedJob, read_jobs
from carpool.runtime.executor.client import ExecutorSocket
from carpool.runtime.executor.lease import SILENCE_S
from carpool.runtime.worker.entry_loader import load_training
from carpool.service.daemon.bootstrap import DaemonInstance
from carpool.service.fleet.remote_access import _MIRROR_S, agent_facts
from carpool.testing.reference import plain_loop
from tests.support.daemon_crash import check_journal, outcomes, read
from tests.support.fleet_rig import AgentProcess, Link, fleet_daemon, hosts_of, until

STEP_S = 0.05
MIRROR_INTERVAL_S = _MIRROR_S + _SYNC_S + SILENCE_S
LEASE_S = 10.0
DEFAULT_LEASE_S = 30.0
WARM_S = 8.0  # of steps before the fault
PARTS = ("hosts", "short", "ray", "head")
FLEET = ("executor", "both", "link", "killed")

TRAINING = """
import os
import time
from dataclasses import replace
from pathlib import Path

from slow_training import tiny


def training(seed, steps, step_s, ledger):
    def made(model, step):
        if ledger:
            with Path(ledger).open("a") as file:
                file.write(f"{os.getpid()} {step} {time.monotonic()} {__file__}\\n")
            time.sleep(step_s)

    return replace(tiny(seed=seed, steps=steps), after_update=made)
"""


@dataclass(frozen=True, slots=True)
class Step:
    """A line of a training's file."""

    process: int
    number: int
    at: float
    file: str  # of the training, in the folder of its machine


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one fault."""

    fault: str
    lease_s: float
    is_lost: bool
    detected_s: float | None  # from the fault until the machine counted as lost
    first_step_s: float | None  # of its job elsewhere, from then
    longest_pause_s: float  # between two steps of jobs on other machines, from the fault to the first step elsewhere
    steps_again: int
    again_s: float
    mirror_interval_s: float
    steps_after_loss: int  # by processes of the lost machine
    files_after_loss: int  # written on the lost machine
    ended_once: bool
    is_digest_equal: bool


@dataclass(slots=True)
class Ledgers:
    """The jobs of a run and what they have written."""

    folder: Path
    jobs: tuple[ListedJob, ...] = ()

    @classmethod
    def make(cls, folder: Path, count: int, steps: int) -> Ledgers:
        code = folder / "code"
        code.mkdir()
        (code / "jobs.py").write_text(TRAINING, encoding="utf-8")
        slow = Path(__file__).parents[1] / "tests" / "support" / "slow_training.py"
        (code / "slow_training.py").write_bytes(slow.read_bytes())
        tables = [
            f'[[job]]\nname = "job-{number}"\nentry = "jobs.py:training"\nexact = true\n'
            f'args = {{ seed = {number}, steps = {steps}, step_s = {STEP_S}, ledger = "{folder}/job-{number}.steps" }}\n'  # noqa: E501
            for number in range(count)
        ]
        (code / "jobs.toml").write_text("\n".join(tables), encoding="utf-8")
        for number in range(count):
            (folder / f"job-{number}.steps").touch()
        return cls(folder, read_jobs(code / "jobs.toml").jobs)

    def steps(self, job: str) -> list[Step]:
        lines = (self.folder / f"{job}.steps").read_text(encoding="ascii").splitlines()
        words = [line.split(maxsplit=3) for line in lines]
        return [Step(int(process), int(number), float(at), file) for process, number, at, file in words]

    def digest(self, job: ListedJob) -> str:
        args = {**job.program.args, "ledger": ""}
        training = load_training(job.program.entry, args, folder=self.folder / "code")
        return plain_loop(training, shards=job.program.shards).digest


@dataclass(slots=True)
class LossTimes:
    """When nodes counted as lost, by name."""

    daemon: DaemonInstance
    at: dict[str, float] = field(default_factory=dict)

    def record(self, record: Record) -> None:
        for fact in record.facts:
            if isinstance(fact, NodeLost):
                self.at.setdefault(self.daemon.scheduler.cluster.nodes[fact.node].name, time.monotonic())


Files = dict[str, tuple[int, int]]  # size and time of change, by path


@dataclass(slots=True)
class Fault:
    """A fault of a member that runs a job."""

    name: str
    member: str
    job: str
    state: Path  # folder of the member's jobs
    executor: int  # process of the member
    struck_at: float = 0.0
    healed_at: float | None = None  # where it lasts longer than the lease
    lost_at: float | None = None
    before: Files = field(default_factory=dict)  # the job's files when the member was lost
    written: set[str] = field(default_factory=set)  # since then, by the lost executor

    def look(self) -> None:
        """Note which files the lost executor has written; the next executor may write, too."""
        is_alive = Path(f"/proc/{self.executor}").exists()
        changed = self.changed()
        if is_alive and Path(f"/proc/{self.executor}").exists():
            self.written |= changed

    def changed(self) -> set[str]:
        return {path for path, status in self.files().items() if self.before.get(path) != status}

    def files(self) -> Files:
        found = {}
        for path in (self.state / "jobs" / self.job).rglob("*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                if not path.is_dir():
                    found[str(path)] = (status.st_size, status.st_mtime_ns)
        return found

    def is_here(self, step: Step) -> bool:
        """Whether a step was made on the member's machine."""
        return step.file.startswith(f"{self.state}/")


def placed(daemon: DaemonInstance, job: str) -> str:
    """The member that a job runs on."""
    found = daemon.scheduler.jobs.get(JobId(job))
    held = None if found is None else found.desired
    return "" if held is None else daemon.scheduler.cluster.node_of(next(iter(held.devices()))).name


def row_of(fault: Fault, ledgers: Ledgers, state: Path, lease_s: float) -> Row:
    """Measure one fault from the files of steps."""
    entries = read(state)
    job = next(each for each in ledgers.jobs if each.spec.id == fault.job)
    made = ledgers.steps(fault.job)
    lost_at = fault.lost_at
    old = {step.process for step in made if step.at <= (lost_at or fault.struck_at)}
    elsewhere = [step.at for step in made if step.at > fault.struck_at and not fault.is_here(step)]
    if not any(fault.is_here(step) and step.process not in old for step in made):  # no later stay there
        fault.written |= fault.changed() if lost_at is not None else set()
    until_s = elsewhere[0] if elsewhere else fault.healed_at or fault.struck_at + lease_s
    numbers = [step.number for step in made]
    again = len(numbers) - len(set(numbers))
    gaps = [later.at - earlier.at for earlier, later in itertools.pairwise(made)]
    try:
        check_journal(entries, [each.spec.id for each in ledgers.jobs])
        ended_once = True
    except AssertionError:
        ended_once = False
    outcome = outcomes(entries).get(job.spec.id)
    return Row(
        fault.name,
        lease_s,
        lost_at is not None,
        None if lost_at is None else round(lost_at - fault.struck_at, 2),
        None if lost_at is None or not elsewhere else round(elsewhere[0] - lost_at, 2),
        round(longest_pause(fault, ledgers, until_s), 2),
        again,
        round(again * statistics.median(gaps), 2),
        MIRROR_INTERVAL_S,
        0
        if lost_at is None
        else sum(fault.is_here(step) and step.process in old and step.at > lost_at for step in made),
        len(fault.written),
        ended_once,
        outcome is not None and outcome.digest == ledgers.digest(job),
    )


def longest_pause(fault: Fault, ledgers: Ledgers, until_at: float) -> float:
    """The longest time without a step of a job on another machine, around the fault; -1 if there is none."""
    longest = -1.0
    for job in ledgers.jobs:
        times = [step.at for step in ledgers.steps(job.spec.id)]
        moments = [at for at in times if fault.struck_at - 1.0 <= at <= until_at + 1.0]
        if job.spec.id in BYSTANDERS and len(moments) > 1:
            longest = max(longest, *(later - earlier for earlier, later in itertools.pairwise(moments)))
    return longest


BYSTANDERS: set[str] = set()


async def until_steps(ledgers: Ledgers) -> None:
    """Wait until all jobs have made steps for a while."""
    async with asyncio.timeout(180.0):
        while not all(  # noqa: ASYNC110
            len(steps := ledgers.steps(job.spec.id)) > 1 and steps[-1].at - steps[0].at > WARM_S for job in ledgers.jobs
        ):
            await asyncio.sleep(0.2)


async def note_losses(faults: Sequence[Fault], losses: LossTimes) -> None:
    """Note when each machine was lost, and what changes on its disk from then on."""
    while True:
        for fault in faults:
            if fault.lost_at is not None:
                fault.look()
            elif fault.member in losses.at:
                fault.lost_at, fault.before = losses.at[fault.member], fault.files()
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def watched(daemon: DaemonInstance, faults: Sequence[Fault]) -> AsyncIterator[LossTimes]:
    """Note when each member counts as lost and when its job steps again."""
    losses = LossTimes(daemon)
    daemon.scheduler.add_observer(losses)
    noting = asyncio.create_task(note_losses(faults, losses))
    try:
        yield losses
    finally:
        noting.cancel()


async def run_hosts(folder: Path, names: Sequence[str], lease_s: float, stop_s: float, cut_s: float) -> list[Row]:
    """Strike machines of the engine `hosts`, each with a fault of its own."""
    steps = int((WARM_S + max(stop_s, cut_s) + 30.0) / STEP_S)
    ledgers = Ledgers.make(folder, len(names) + 1, steps)
    agents = {name: AgentProcess(folder, name) for name in (*names, "survivor")}
    agents["survivor"].devices = f"cpu:{len(names) + 1}"
    state = folder / "state"
    faults: list[Fault] = []
    links: dict[str, Link] = {}
    try:
        for each in agents.values():
            each.start()
        links = {name: await Link(each.port).open() for name, each in agents.items()}
        hosts = hosts_of(*agents.values(), lease_s=lease_s, ports={name: link.port for name, link in links.items()})
        async with fleet_daemon(state, hosts) as daemon:
            await daemon.loop.submit(ledgers.jobs)
            await until_steps(ledgers)
            where = {placed(daemon, job.spec.id): job.spec.id for job in ledgers.jobs}
            BYSTANDERS.clear()
            BYSTANDERS.add(where["survivor"])
            faults += [Fault(name, name, where[name], agents[name].state, pid_of(agents[name].state)) for name in names]
            async with watched(daemon, faults):
                await strike(faults, agents, links, stop_s, cut_s)
                await until(daemon, lambda: not daemon.scheduler.snapshot().occupancy.lost)
                await until(daemon, lambda: not daemon.scheduler.jobs)
    finally:
        for link in links.values():
            await link.close()
        for each in agents.values():
            each.close()
    return [row_of(fault, ledgers, state, lease_s) for fault in faults]


async def strike(
    faults: Sequence[Fault], agents: dict[str, AgentProcess], links: dict[str, Link], stop_s: float, cut_s: float
) -> None:
    """Strike all at one moment, and wake or heal each after its time."""
    woken: list[int] = []
    for fault in faults:
        agent, executor = agents[fault.name], fault.executor
        fault.struck_at = time.monotonic()
        if fault.name == "link":
            links["link"].cut()
        elif fault.name == "killed":
            agent.kill()
        else:
            os.kill(executor, signal.SIGSTOP)
            woken.append(executor)
            if fault.name == "both":
                agent.send(signal.SIGSTOP)
    await asyncio.sleep(cut_s)
    if "link" in links:
        links["link"].heal()
    if "killed" in {fault.name for fault in faults}:
        await asyncio.to_thread(agents["killed"].start)
    if not woken:
        return
    await asyncio.sleep(max(0.0, stop_s - cut_s))
    for pid in woken:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    if "both" in agents:
        agents["both"].send(signal.SIGCONT)


def pid_of(state: Path) -> int:
    """The executor of an agent with this state folder."""
    pid = ExecutorSocket(state / "executor").executor_pid
    assert pid is not None, "it runs a job"
    return pid


async def run_ray(folder: Path) -> list[Row]:
    """Kill two of four raylets, one of them reaped."""
    from tests.support.ray_rig import ray_daemon, three_raylets

    names = ("raylet killed, reaped", "raylet killed, zombie")
    ledgers = Ledgers.make(folder, 3, int((WARM_S + 60.0) / STEP_S))
    state = folder / "state"
    with three_raylets() as (cluster, raylets):
        raylets.append(await asyncio.to_thread(cluster.add))  # beside the head
        async with ray_daemon(state, cluster.address, lease_s=LEASE_S) as (daemon, engine):
            await daemon.loop.submit(ledgers.jobs)
            await until_steps(ledgers)
            where = {placed(daemon, job.spec.id): job.spec.id for job in ledgers.jobs}
            victims = [name for name in where if engine.node_id(name) in raylets][:2]
            BYSTANDERS.clear()
            BYSTANDERS.update(job for name, job in where.items() if name not in victims)
            states = [(await agent_facts(await engine.start(name))).state for name in victims]
            faults = [
                Fault(fault, name, where[name], there, pid_of(there))
                for fault, name, there in zip(names, victims, states, strict=True)
            ]
            async with watched(daemon, faults):
                for fault, how in zip(faults, (cluster.kill, cluster.leave_zombie), strict=True):
                    fault.struck_at = time.monotonic()
                    await asyncio.to_thread(how, engine.node_id(fault.member))
                await until(daemon, lambda: not daemon.scheduler.jobs)
            return [row_of(fault, ledgers, state, LEASE_S) for fault in faults]


async def run_head(folder: Path, name: str, away_s: float, *, with_redis: bool, driver_ends: bool = False) -> Row:
    """Kill the head of a Ray cluster beside two raylets, and start it again."""
    from tests.support.ray_rig import ray_daemon, restartable_cluster

    await asyncio.to_thread(folder.mkdir)
    ledgers = Ledgers.make(folder, 2, int((WARM_S + away_s + (30.0 if with_redis else 60.0)) / STEP_S))
    state = folder / "state"
    with restartable_cluster(2, with_redis=with_redis) as cluster:
        async with ray_daemon(state, cluster.address, lease_s=LEASE_S) as (daemon, engine):
            await daemon.loop.submit(ledgers.jobs)
            await until_steps(ledgers)
            where = {placed(daemon, job.spec.id): job.spec.id for job in ledgers.jobs}
            BYSTANDERS.clear()
            BYSTANDERS.update(where.values() if with_redis else ())
            member = min(where)
            there = (await agent_facts(await engine.start(member))).state
            fault = Fault(name, member, where[member], there, pid_of(there), time.monotonic())
            async with watched(daemon, [fault]):
                await asyncio.to_thread(cluster.kill_head)
                if driver_ends and engine.driver_pid is not None:
                    os.kill(engine.driver_pid, signal.SIGKILL)
                await asyncio.sleep(away_s)
                await asyncio.to_thread(cluster.start_head)
                if with_redis:
                    await asyncio.to_thread(cluster.add)
                    await until(daemon, lambda: len(daemon.scheduler.cluster.nodes) == len(where) + 1)
                    fault.healed_at = time.monotonic()
                else:
                    await asyncio.to_thread(cluster.wait_for_raylets)
                    for _ in where:
                        await asyncio.to_thread(cluster.add)
                await until(daemon, lambda: not daemon.scheduler.jobs)
            return row_of(fault, ledgers, state, LEASE_S)


async def run_heads(folder: Path, away_s: float) -> list[Row]:
    """Restart heads that keep their tables, and one that does not."""
    kept = "head restarted, tables in Redis"
    rows = []
    if shutil.which("redis-server"):
        rows.append(await run_head(folder / "kept", kept, away_s, with_redis=True))
        rows.append(
            await run_head(folder / "driver", f"{kept}, driver killed", away_s, with_redis=True, driver_ends=True)
        )
    else:
        print("head: no redis-server here (Debian: redis-server)", flush=True)
    return [*rows, await run_head(folder / "anew", "head restarted without its tables", away_s, with_redis=False)]


def run_part(part: str, args: argparse.Namespace) -> list[Row]:
    """Run the faults of one part."""
    with tempfile.TemporaryDirectory(prefix="carpool-faults-", ignore_cleanup_errors=True) as room:
        if part == "hosts":
            return asyncio.run(run_hosts(Path(room), FLEET, LEASE_S, args.stop, args.cut))
        if part == "short":
            return asyncio.run(run_hosts(Path(room), ("link",), DEFAULT_LEASE_S, 0.0, args.cut))
        from tests.support.ray_rig import ENVIRONMENT

        os.environ.update(ENVIRONMENT, RAY_AUTH_MODE="disabled")
        if part == "head":
            return asyncio.run(run_heads(Path(room), args.cut))
        return asyncio.run(run_ray(Path(room)))


def stored() -> dict[str, list[object]]:
    """The rows of parts that were measured before."""
    path = RESULTS / "fleet_faults.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))["results"]) if path.is_file() else {}


def shown(rows: Sequence[Row]) -> Iterator[str]:
    """Each row as a line."""
    for row in rows:
        yield "  ".join(f"{name} {value}" for name, value in asdict(row).items())


def main() -> None:
    """Run one part, or all, and keep the rows of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, help="run only this one")
    parser.add_argument("--stop", type=float, default=30.0, help="seconds for which executors are stopped")
    parser.add_argument("--cut", type=float, default=20.0, help="seconds for which links are cut, heads away")
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    found = stored()
    for part in [args.part] if args.part else PARTS:
        rows = run_part(part, args)
        print(f"{part}:", *shown(rows), sep="\n  ", flush=True)
        found[part] = [asdict(row) for row in rows]
        if not args.no_save:
            save("fleet_faults", found)


if __name__ == "__main__":
    main()
