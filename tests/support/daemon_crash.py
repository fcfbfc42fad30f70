"""A daemon in a process of its own that tests kill, and the checks of its journal."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from carpool import __version__
from carpool.core.messages import (
    AssignApplied,
    JobCancelled,
    JobFailed,
    JobFinished,
    NodeLost,
    ProgressReported,
    Record,
)
from carpool.core.model import JobId
from carpool.jobs.devices import parse_devices
from carpool.jobs.job_file import read_jobs
from carpool.runtime.executor.client import ExecutorOptions
from carpool.runtime.executor.client_protocol import report_from_json
from carpool.runtime.executor.reports import Outcome
from carpool.service.daemon.bootstrap import DaemonInstance, DaemonOptions
from carpool.service.store.store import CommitMark, Store, StoredRecord

SLOW_TRAINING = Path(__file__).with_name("slow_training.py").read_text(encoding="utf-8")  # an entry file: tiny()
_ENDS = (JobFinished, JobFailed, JobCancelled)


@dataclass(frozen=True, slots=True)
class CrashingDaemon:
    """A daemon that submits the jobs of a file one by one and ends when all are over."""

    state: Path
    jobs: Path
    devices: str = "cpu:2"
    policy: str = "fifo"
    mark: str = ""  # stands in the environment of all its processes

    def start(self) -> subprocess.Popen[str]:
        """Start it, again or for the first time; it prints a line for every record."""
        command = [sys.executable, __file__, str(self.state), str(self.jobs), self.devices]
        environment = {**os.environ, "CARPOOL_TEST": self.mark}
        return subprocess.Popen([*command, self.policy], stdout=subprocess.PIPE, text=True, env=environment)

    def left_behind(self) -> dict[int, str]:
        """Processes of it that live, by number."""
        found = {}
        for pid in pids_with(f"CARPOOL_TEST={self.mark}"):
            with suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
        return found


def pids_with(variable: str) -> list[int]:
    """Processes that were started with a variable, given as NAME=value."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                if f"{variable}\0".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
    return found


def kill_after(process: subprocess.Popen[str], records: int) -> bool:
    """Kill a daemon after so many records; whether it was still running."""
    assert process.stdout is not None
    for _ in range(records):
        if not process.stdout.readline():
            break
    else:
        process.send_signal(signal.SIGKILL)
    process.stdout.close()
    return process.wait() == -signal.SIGKILL


# ---------------------------------------------------------------------------------------------------- what must hold
def read(state: Path) -> list[StoredRecord]:
    """All records of a journal."""
    with closing(
        Store.open(state, DaemonInstance.header(DaemonOptions(state, tuple(parse_devices("cpu:1")), __version__)))
    ) as store:
        assert store.findings.is_sound, store.findings.messages()
        return list(store.entries())


def outcomes(entries: list[StoredRecord]) -> dict[JobId, Outcome]:
    """How each training ended; AssertionError if one ended twice."""
    found: dict[JobId, Outcome] = {}
    for entry in entries:
        for note in entry.reports:
            report = report_from_json(dict(note.report))
            if isinstance(report, Outcome):
                assert report.job not in found, f"{report.job!r} has two outcomes"
                found[report.job] = report
    return found


def check_journal(entries: list[StoredRecord], jobs: list[JobId]) -> None:
    """Assert that every job ended once, that no record is missing, and that generations, steps and marks grow."""
    assert [entry.number for entry in entries] == list(range(1, len(entries) + 1)), "numbers without gaps"
    ends = Counter(fact.job for fact in _facts(entries) if isinstance(fact, _ENDS))
    assert ends == Counter(jobs), "every job ends exactly once"
    _check_marks([entry.mark for entry in entries])
    _check_growth([entry.record for entry in entries])


def _facts(entries: list[StoredRecord]) -> Iterator[object]:
    for entry in entries:
        yield from entry.record.facts


def _check_marks(marks: list[CommitMark]) -> None:
    before = CommitMark()
    for mark in marks:
        assert mark.epoch >= before.epoch, "epochs grow"
        assert all(
            mark.of(name).heard >= known.heard or mark.of(name).life > known.life
            for name, known in before.executors.items()
            if mark.is_whole or name in mark.executors
        ), "no report is taken in twice"
        before = mark if mark.is_whole else CommitMark(mark.epoch, {**before.executors, **mark.executors})


def _check_growth(records: list[Record]) -> None:
    """Generations grow; steps too, except where an executor was lost and the newest ones with it."""
    generations: dict[JobId, int] = {}
    steps: dict[JobId, float] = {}
    over: set[JobId] = set()
    at = 0.0
    for record in records:
        assert record.at >= at, "time goes on"
        at = record.at
        for fact in record.facts:
            match fact:
                case NodeLost():
                    steps.clear()
                case (
                    AssignApplied(job=job, generation=generation, done=done)
                    | ProgressReported(job=job, generation=generation, done=done)
                ):
                    assert job not in over, f"{job!r} went on after its end"
                    assert generation >= generations.get(job, 0), f"{job!r}: an old generation counted"
                    assert done >= steps.get(job, 0.0), f"{job!r}: steps were counted twice"
                    generations[job], steps[job] = generation, done
                case JobFinished(job=job) | JobFailed(job=job) | JobCancelled(job=job):
                    over.add(job)


def steps_made(state: Path, job: JobId) -> Mapping[int, int]:
    """How often each step was made, where the training prints ``step N`` at each."""
    log = (state / "jobs" / job / "log").read_text(encoding="utf-8")
    return Counter(int(line.partition(" ")[2]) for line in log.splitlines() if line.startswith("step "))


# --------------------------------------------------------------------------------------------------------- the victim
class _Printed:
    """Prints a line at every record."""

    def record(self, record: Record) -> None:
        print(f"{record.at:.3f}", flush=True)  # noqa: T201 - the test reads it


async def _live(state: Path, jobs: Path, devices: str, policy: str) -> None:
    options = ExecutorOptions(mirror_s=0.2, grace_s=0.5, tick_s=0.02, orphan_s=60.0)
    daemon = DaemonInstance.open(
        DaemonOptions(state, tuple(parse_devices(devices)), __version__, policy, options=options)
    )
    try:
        daemon.scheduler.add_observer(_Printed())
        await daemon.start()
        running = asyncio.create_task(daemon.run())
        for listed in read_jobs(jobs).jobs:
            if listed.spec.id not in daemon.observers.accounting.accounts:
                await daemon.loop.submit([listed])
        while daemon.scheduler.jobs and not running.done():
            await asyncio.wait({running}, timeout=0.02)
        daemon.stop()
        await running
    finally:
        daemon.close()


if __name__ == "__main__":
    asyncio.run(_live(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]))
