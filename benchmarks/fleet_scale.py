"""Runs the real daemon over many fake machines: events per second, decision times, memory, journal growth.

    python benchmarks/fleet_scale.py [--members 1000] [--jobs 5000] [--seconds 600] [--sweep] [--profile FILE]

The scheduling loop, the scheduler, the policy, the live estimator, accounting, event feed and the SQLite store are the
real ones; seconds of plans are CPU time. A fake member of 8 devices acknowledges orders, reports progress of its jobs
every `--report-s` seconds and their ends, in virtual time: the loop gets the next event as soon as it has handled the
last one, so that events per CPU second are what one daemon can handle. Half of the jobs are submitted at the start, the
others one after another; after three quarters of the time one member is lost and returns.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from decision_time import Timed
from measured import save

from carpool.backends.executors import ExecutorPort
from carpool.backends.fleet import Member
from carpool.core.messages import Assign, AssignApplied, Fact, JobFinished, Order, ProgressReported, ReleaseApplied
from carpool.core.model import JobId, JobSpec
from carpool.jobs.devices import LocalDevice
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.policies.registry import parse_policy
from carpool.runtime.executor.reports import Facts, Gone, HandedOver, Report, Sized
from carpool.service.daemon.bootstrap import DaemonInstance, DaemonOptions
from carpool.service.daemon.gc_tuning import GcFreezer
from carpool.service.daemon.loop import LoopEnd, LoopOptions
from carpool.service.daemon.policy_guard import PlanningBudget
from carpool.service.fleet.executor_access import ClaimSource, FleetMember

DEVICES = 8  # of a member
SIZES = [(2, 10), (12, 60), (125, 625), (1_000, 5_000)]  # members, jobs
STEP_S = 0.5  # of a job on one device
_YIELDS = 4  # turns of the event loop in which a report reaches the daemon


@dataclass(slots=True)
class Running:
    """A job on a fake member."""

    generation: int
    width: int
    since: float


class World:
    """Virtual time and the events in it; the clock of the daemon."""

    def __init__(self, until: float, report_s: float) -> None:
        self.at = 0.0
        self.report_s = report_s
        self.num_reports = 0
        self._until = until
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.over = asyncio.Event()

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        """Let something happen after so many seconds."""
        self._count += 1
        heappush(self._events, (self.at + seconds, self._count, event))

    def now(self) -> float:
        """Virtual seconds."""
        return self.at

    async def wait(self, tasks: set[asyncio.Task[Any]], until: float | None) -> None:
        """Return when a task is done; while none is, the time goes on to the next event."""
        for _ in range(_YIELDS):
            await asyncio.sleep(0)
        while not any(task.done() for task in tasks):
            at = self._events[0][0] if self._events else float("inf")
            if until is not None and until < at:
                self.at = max(self.at, until)
                return
            if at > self._until:
                self.over.set()
                return
            self.at, _, event = heappop(self._events)
            event()
            for _ in range(_YIELDS):
                await asyncio.sleep(0)


@dataclass
class FakeMember:
    """Implements `ExecutorPort`: acknowledges orders, reports progress and ends in virtual time."""

    world: World
    steps: dict[JobId, float]  # of all jobs
    done: dict[JobId, float]  # likewise, as far as they are
    life: int = 1
    heard: int = 0
    running: dict[JobId, Running] = field(default_factory=dict)
    queue: asyncio.Queue[Report] = field(default_factory=asyncio.Queue)

    def introduce(self, job: JobId, program: Program, *, resume: bool = False) -> None:
        """Nothing to prepare."""

    def carry(self, orders: Sequence[Order]) -> None:
        """Apply orders at once and report that together."""
        facts: list[Fact] = []
        for order in orders:
            self._settle(order.job)
            done = self.done.setdefault(order.job, 0.0)
            if isinstance(order, Assign):
                self.running[order.job] = Running(order.generation, order.allocation.num_devices, self.world.at)
                if not done:
                    self._say(Sized(order.job, int(self.steps[order.job]), 64))
                facts.append(AssignApplied(order.job, order.generation, done))
                self._schedule(order.job)
            else:
                self.running.pop(order.job, None)
                facts.append(ReleaseApplied(order.job, order.generation, done))
        self._say(Facts(tuple(facts)))

    def _rate(self, width: int) -> float:
        return float(width**0.8) / STEP_S

    def _settle(self, job: JobId) -> None:
        if (run := self.running.get(job)) is not None:
            self.done[job] += self._rate(run.width) * (self.world.at - run.since)
            run.since = self.world.at

    def _schedule(self, job: JobId) -> None:
        run = self.running[job]
        left_s = max(0.0, (self.steps[job] - self.done[job]) / self._rate(run.width))
        self.world.later(min(left_s, self.world.report_s), lambda: self._tick(job, run))

    def _tick(self, job: JobId, run: Running) -> None:
        if self.running.get(job) is not run:
            return
        self._settle(job)
        if self.done[job] >= self.steps[job] - 1e-6:
            del self.running[job]
            self._say(Facts((JobFinished(job, run.generation),)))
            return
        rate = self._rate(run.width)
        self._say(Facts((ProgressReported(job, run.generation, self.done[job], rate, 1.0, step_s=1.0 / rate),)))
        self._schedule(job)

    def _say(self, report: Report) -> None:
        self.world.num_reports += 1
        self.queue.put_nowait(report)

    def die(self) -> None:
        """End without warning."""
        self.running.clear()
        self._say(Gone("the benchmark ended it"))

    def forget(self, job: JobId) -> None:
        """Nothing is kept."""

    def hand_over(self, job: JobId) -> None:
        """Drop a job."""
        self._settle(job)
        self.running.pop(job, None)
        self._say(HandedOver(job, int(self.done.get(job, 0.0))))

    def acknowledge(self, number: int) -> None:
        """Nothing is kept."""

    def proceed(self) -> None:
        """Nothing stands still."""

    async def receive(self) -> Report:
        """The next report."""
        report = await self.queue.get()
        self.heard += 1
        return report

    async def stop(self, *, checkpoint: bool) -> None:
        """End."""
        self.running.clear()
        self.queue.put_nowait(Gone("stopped"))

    async def leave(self) -> None:
        """Nothing is connected."""


class FakeAccess:
    """Starts fake members."""

    max_restarts = 5
    found: Member | None = None

    def __init__(self, start: Callable[[], FakeMember]) -> None:
        self._start = start
        self.port = start()

    async def find(self, claims: ClaimSource, tell: Callable[[str], None]) -> None:
        """No earlier daemon left one."""

    async def start(self, claims: ClaimSource) -> ExecutorPort:
        """A new one."""
        claims.next()
        life = self.port.life + 1
        self.port = self._start()
        self.port.life = life
        return self.port

    def job_in_hand(self) -> JobId | None:
        """None."""
        return None

    def close(self) -> None:
        """Nothing is left."""


class AtEnd(LoopEnd):
    """Ends the loop with the world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def is_over(self, scheduler: Any) -> bool:
        """Whether the time is up."""
        return self._world.over.is_set()


def jobs_of(count: int) -> list[JobSpec]:
    """Elastic jobs for one to eight devices and gangs, of unknown speed."""
    random = Random(0)
    found = []
    for number in range(count):
        name, weight = JobId(f"job-{number:06d}"), float(random.randint(1, 3))
        if random.random() < 0.25:
            found.append(JobSpec(name, random.choice((1, 2, 4, 8)), weight=weight, user=f"user{number % 40}"))
        else:
            most = random.choice((2, 4, 8))
            found.append(JobSpec(name, weight=weight, min_devices=1, max_devices=most, user=f"user{number % 40}"))
    return found


def journal_size(folder: Path) -> tuple[int, int]:
    """Bytes and records of the accept log, one of the two equal copies of a journal."""
    log = (folder / "accepted.log").read_bytes()
    return len(log), log.count(b"\n") - 1


async def measure(members: int, jobs: int, seconds: float, report_s: float, policy: str) -> dict[str, Any]:
    """One size."""
    world, random = World(seconds, report_s), Random(1)
    specs = jobs_of(jobs)
    steps = {spec.id: random.lognormvariate(6.0, 1.0) / STEP_S for spec in specs}
    done: dict[JobId, float] = {}
    devices = tuple(LocalDevice(n, f"cuda:{n}", "H200", (), n, 1 << 37) for n in range(DEVICES))
    accesses = [FakeAccess(lambda: FakeMember(world, steps, done)) for _ in range(members)]
    fleet = tuple(FleetMember(Member(f"host{n:05d}", devices), access) for n, access in enumerate(accesses))
    timed = Timed(parse_policy(policy))
    program = Program("train.py:resnet", folder="/nowhere")
    listed = [ListedJob(spec, program) for spec in specs]
    with tempfile.TemporaryDirectory() as folder, GcFreezer():
        began = time.perf_counter()
        options = DaemonOptions(
            Path(folder),
            (),
            "1",
            policy,
            find_policy=lambda text: timed,
            members=fleet,
            clock=lambda at, begun_at: world,
            notifies=False,
            loop=LoopOptions(end=AtEnd(world)),
        )
        daemon = DaemonInstance.open(options)
        await daemon.start()
        # Planning is limited to a fifth of the time: here of CPU time, whatever else the machine does.
        daemon.loop._budget = PlanningBudget(clock=time.thread_time, cpu_clock=time.thread_time)
        start_s = time.perf_counter() - began
        half = listed[: jobs // 2]
        gap_s = 0.9 * seconds / max(1, jobs - len(half))
        tasks: set[asyncio.Task[None]] = set()

        def submit(number: int) -> None:
            tasks.add(asyncio.get_running_loop().create_task(daemon.loop.submit([listed[number]])))
            if number + 1 < jobs:
                world.later(gap_s, lambda: submit(number + 1))

        world.later(gap_s, lambda: submit(len(half)))
        lost = {}

        def lose() -> None:
            lost["jobs"] = len(accesses[0].port.running)
            accesses[0].port.die()

        world.later(0.75 * seconds, lose)
        began, cpu = time.perf_counter(), time.process_time()
        await daemon.run(half)
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        await asyncio.gather(*tasks, return_exceptions=True)
        log_bytes, records = journal_size(Path(folder))
        finished = sum(account.phase.is_over for account in daemon.observers.accounting.accounts.values())
        daemon.close()
    plans = sorted(timed.seconds)
    return {
        "members": members,
        "devices": members * DEVICES,
        "jobs": jobs,
        "virtual_s": seconds,
        "report_s": report_s,
        "start_s": round(start_s, 2),
        "wall_s": round(wall_s, 1),
        "cpu_s": round(cpu_s, 1),
        "reports": world.num_reports,
        "reports_per_cpu_s": round(world.num_reports / cpu_s),
        "reports_per_cpu_s_besides_plans": round(world.num_reports / max(1e-9, cpu_s - sum(plans))),
        "plans": len(plans),
        "plan_first_s": round(timed.seconds[0], 3),
        "plan_median_s": round(median(plans), 4),
        "plan_p99_s": round(plans[min(len(plans) - 1, int(0.99 * len(plans)))], 4),
        "plan_share_of_cpu": round(sum(plans) / cpu_s, 3),
        "finished": finished,
        "lost_jobs": lost.get("jobs", 0),
        "records": records,
        "log_bytes": log_bytes,
        "log_bytes_per_record": round(log_bytes / max(1, records)),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def main() -> None:
    """Measure one size, or a sweep of sizes, each in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--members", type=int, default=1_000)
    parser.add_argument("--jobs", type=int, default=5_000)
    parser.add_argument("--seconds", type=float, default=600.0, help="virtual")
    parser.add_argument("--report-s", type=float, default=5.0, help="between reports of a job")
    parser.add_argument("--policy", default="carpool")
    parser.add_argument("--sweep", action="store_true", help="smaller fleets too, and save the results")
    parser.add_argument("--profile", default="", help="write a cProfile file")
    options = parser.parse_args()
    sizes = SIZES if options.sweep else [(options.members, options.jobs)]
    rows = []
    for members, jobs in sizes:
        profile = cProfile.Profile() if options.profile else None
        if profile is not None:
            profile.enable()
        row = asyncio.run(measure(members, jobs, options.seconds, options.report_s, options.policy))
        if profile is not None:
            profile.disable()
            profile.dump_stats(options.profile)
        print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        rows.append(row)
        if options.sweep:
            save("fleet_scale", rows)


if __name__ == "__main__":
    main()
