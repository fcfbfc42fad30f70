"""Kills a daemon at random moments while it runs many jobs, and checks that nothing is lost, doubled or changed.

    python benchmarks/service_crashes.py [--jobs 100] [--kills 20] [--seed 7] [--devices cpu:2]

Three rows: undisturbed; the daemon killed with SIGKILL; and with every fourth kill the executor too. Half of the
moments are a number of records after a start, half a time after it, so that starts, claims and recoveries are hit as
well. Columns: jobs that ended exactly once, digests equal to the undisturbed row, steps repeated (after an executor's
death jobs continue from their last checkpoint or mirror), journal invariants, and processes left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from measured import save

from carpool.backends.executors import LOCAL
from carpool.core.model import JobId
from tests.support.daemon_crash import SLOW_TRAINING, CrashingDaemon, check_journal, outcomes, read, steps_made

ENTRY = SLOW_TRAINING


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one way of killing."""

    name: str
    jobs: int
    kills: int  # of the daemon
    executors_killed: int
    ended_once: int
    equal_digests: int
    steps: int
    steps_made_again: int
    records: int
    epochs: int
    executors: int
    invariants: str  # "hold", or what does not
    left_behind: int
    wall_s: float
    restart_s: float | None  # from the start of a process to its first record, median


class Killer:
    """Chooses the moments, and strikes."""

    def __init__(self, victim: CrashingDaemon, seed: int, records: int, seconds: float) -> None:
        self._victim = victim
        self._chance = random.Random(seed)
        self._records = records
        self._seconds = seconds
        self.restarts_s: list[float] = []

    def strike(self, *, with_executor: bool) -> bool:
        """Start the victim and kill it; False if it came to its end before."""
        by_record = self._chance.random() < 0.5
        after = self._chance.randrange(1, self._records) if by_record else self._chance.uniform(0.0, self._seconds)
        began = time.monotonic()
        process = self._victim.start()
        assert process.stdout is not None
        if by_record:
            for number in range(int(after)):
                if not process.stdout.readline():
                    break
                if number == 0:
                    self.restarts_s.append(time.monotonic() - began)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(after)
        if process.poll() is None:
            if with_executor:
                self._kill_executor()
            process.send_signal(signal.SIGKILL)
        process.stdout.close()
        return process.wait() == -signal.SIGKILL

    def _kill_executor(self) -> None:
        path = self._victim.state / "executor" / "executor.pid"
        if path.is_file():
            try:
                os.kill(int(path.read_text()), signal.SIGKILL)
            except (ProcessLookupError, ValueError):
                return

    def let_end(self, patience_s: float) -> None:
        """Let the victim come to its end."""
        process = self._victim.start()
        assert process.stdout is not None
        try:
            process.communicate(timeout=patience_s)
        finally:
            process.kill()
            process.wait()


def write_jobs(folder: Path, count: int, seed: int) -> Path:
    """A file of tiny trainings of unlike lengths."""
    (folder / "jobs.py").write_text(ENTRY, encoding="utf-8")
    chance = random.Random(seed)
    lines = [
        f'[[job]]\nname = "job-{number}"\nentry = "jobs.py:tiny"\n'
        f"args = {{ seed = {number}, steps = {chance.randrange(20, 60)}, step_s = 0.005, norm = true }}\n"
        for number in range(count)
    ]
    path = folder / "jobs.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def run(
    name: str, folder: Path, args: argparse.Namespace, kills: int, every: int, expected: dict[JobId, str | None]
) -> Row:
    """One row; `every` so many kills take the executor along, 0: none does."""
    jobs = [JobId(f"job-{number}") for number in range(args.jobs)]
    victim = CrashingDaemon(folder / name, folder / "jobs.toml", args.devices, mark=f"crashes-{os.getpid()}-{name}")
    killer = Killer(victim, args.seed, max(2, 6 * args.jobs // max(1, kills)), args.seconds)
    began = time.monotonic()
    struck = taken = 0
    while struck < kills:
        takes = bool(every) and struck % every == every - 1
        if not killer.strike(with_executor=takes):
            break
        struck += 1
        taken += takes
    killer.let_end(args.patience)
    wall_s = time.monotonic() - began
    left = len(victim.left_behind())
    entries = read(victim.state)
    try:
        check_journal(entries, jobs)
        invariants = "hold"
    except AssertionError as error:
        invariants = f"broken: {error}"
    found = outcomes(entries)
    made = [steps_made(victim.state, job) for job in jobs]
    if not expected:
        expected.update({job: outcome.digest for job, outcome in found.items()})
    return Row(
        name,
        len(jobs),
        struck,
        taken,
        len(found),
        sum(found[job].digest is not None and found[job].digest == expected.get(job) for job in jobs if job in found),
        sum(len(steps) for steps in made),
        sum(sum(steps.values()) - len(steps) for steps in made),
        len(entries),
        max(entry.mark.epoch for entry in entries),
        len({life for entry in entries if (life := entry.mark.of(LOCAL).life)}),
        invariants,
        left,
        round(wall_s, 1),
        round(statistics.median(killer.restarts_s), 2) if killer.restarts_s else None,
    )


def main() -> None:
    """Run all rows, and keep them as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--devices", default="cpu:2")
    parser.add_argument("--seconds", type=float, default=6.0, help="the longest time from a start to a kill")
    parser.add_argument("--patience", type=float, default=1800.0, help="for the last start of a row")
    args = parser.parse_args()
    expected: dict[JobId, str | None] = {}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="carpool-crashes-") as room:
        folder = Path(room)
        write_jobs(folder, args.jobs, args.seed)
        print(f"{'row':>14} {'kills':>5} {'ended once':>10} {'digests':>8} {'again':>6} {'invariants':>10} {'wall':>8}")
        for name, kills, every in (
            ("undisturbed", 0, 0),
            ("daemon", args.kills, 0),
            ("and-executor", args.kills, 4),
        ):
            row = run(name, folder, args, kills, every, expected)
            rows.append(row)
            print(
                f"{row.name:>14} {row.kills:>5} {row.ended_once:>6}/{row.jobs:<3} {row.equal_digests:>4}/{row.jobs:<3} "
                f"{row.steps_made_again:>6} {row.invariants:>10} {row.wall_s:>6.0f} s"
                + (f"  {row.left_behind} processes left behind" if row.left_behind else ""),
                flush=True,
            )
            save("service_crashes", [asdict(each) for each in rows])


if __name__ == "__main__":
    main()
