"""Compares parts balanced by speed with equal parts on two devices of different size.

    python benchmarks/runtime_unlike.py [--job perceptron --job cnn] [--pairs 6] [--block 12] [--fast 4] [--slow 2]
    python benchmarks/runtime_unlike.py --exact --job cnn

A job (a perceptron, or the CNN of examples/) runs over one device with twice the cores of the other and alternates
between equal and balanced splits every few seconds; neighbouring blocks of the same number of steps are compared, so
that other load on the machine cancels out. First each device runs alone: if one is s times as fast as the other,
balancing gains at most (1 + s) / 2; the target is 1.35. An exact job uses one core per device, so with --exact there
is nothing to gain, and only the weights are compared. Devices get one thread of each physical core where possible; on
virtual machines the cores are probed (trials/physical.py). By default devices have a quarter and an eighth of the
cores, so that the memory bus suffices for both.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from measured import ROOT, Patience, save
from trials.clocked import ENTRY, ends
from trials.desk import Desk, JobEnded, dealt, marked, new_mark, one_of_each
from trials.physical import felt_apart

from carpool.core.messages import AssignApplied, ProgressReported
from carpool.jobs.program import Program
from carpool.runtime.executor.job_folder import JobFolder

ASKED = 1.35
SETTLING = {"equal": 3, "balanced": 3, "alone": 2}  # steps that are not timed; a cut by order is left at once
FOREVER = 10**6  # steps
BATCHES = {"perceptron": 4096, "cnn": 96}  # so that a step is its passes, and little else
SHARD = {"perceptron": 128, "cnn": 8}  # samples of a shard in exact mode, for the same reason
CHECKED = 4  # steps whose weights are compared
ENTRIES = {"cnn": "examples/cifar10_cnn.py:cnn", "perceptron": "benchmarks/trials/wide.py:training"}


@dataclass(frozen=True, slots=True)
class Contest:
    """One job, and where it runs."""

    desk: Desk
    folder: Path
    job: str
    options: argparse.Namespace

    @property
    def name(self) -> str:
        """Of the job, for the executor."""
        return f"unlike-{self.options.out}-{self.job}"

    @property
    def pieces(self) -> int:
        """That are dealt in every step: samples, or shards."""
        return int(self.options.shards) if self.options.exact else self.batch

    @property
    def program(self) -> Program:
        """What the job runs, but for its entry."""
        options = self.options
        return Program(folder=str(self.folder), exact=options.exact, shards=options.shards if options.exact else 8)

    @property
    def notes(self) -> Path:
        """Where the workers write down when steps ended."""
        return self.folder / self.name

    @property
    def batch(self) -> int:
        """Samples of a step."""
        options = self.options
        return int(options.batch or (SHARD[self.job] * options.shards if options.exact else BATCHES[self.job]))

    @property
    def arguments(self) -> dict[str, int]:
        """Of the entry."""
        options = self.options
        sizes = {"channels": options.channels} if self.job == "cnn" else {"width": options.width, "layers": 3}
        return {**sizes, "batch_size": self.batch, "samples": 4 * self.batch}

    def introduce(self, name: str = "", steps: int = FOREVER) -> str:
        """Make the job, or another one with the same training, known."""
        name = name or self.name
        (self.folder / name).mkdir()
        entry = f"{ROOT}/{ENTRIES[self.job]}"
        clocked = {"entry": entry, "notes": str(self.folder / name), "steps": steps, "args": self.arguments}
        self.desk.introduce(name, replace(self.program, entry=ENTRY, args=clocked))
        return name

    def parts(self, way: str) -> tuple[int, ...]:
        """What is ordered of how steps are cut."""
        half = self.pieces // 2
        return (self.pieces - half, half) if way == "equal" else ()

    async def block(self, way: str, devices: Sequence[int], steps: int) -> dict[str, Any]:
        """Some steps cut in one way: how long they took, and how much of a step was not the longest pass."""
        order = self.desk.assign(self.name, *devices, parts=self.parts(way))
        answer = await self.desk.answered(self.name, order)
        assert isinstance(answer, AssignApplied)
        first = int(answer.done) + SETTLING[way]
        await self.desk.step(self.name, first + steps)
        at = ends(self.notes)
        steps_ms = [1e3 * (at[step + 1] - at[step]) for step in range(first, first + steps)]
        sync_s = self.desk.of(self.name, ProgressReported)[-1].sync_s
        return {
            "from_step": first,
            "taken_s": round(sum(steps_ms) / 1e3, 3),
            "sync_ms": None if sync_s is None else round(1e3 * sync_s, 1),
            "steps_ms": [round(ms, 1) for ms in steps_ms],
        }

    async def alone(self) -> dict[str, Any]:
        """What each device does alone with whole steps, and what can be gained by that."""
        steps = max(3, self.options.block // 2)
        speeds = []
        for device in self.options.devices:
            found = await self.block("alone", [device], steps)
            speeds.append(round(self.batch / (statistics.median(found["steps_ms"]) / 1e3), 1))
        return {"samples_per_s": speeds, "possible": round((1 + speeds[0] / speeds[1]) / 2, 3)}

    async def digests(self) -> dict[str, str]:
        """The weights after a few steps cut in either way, and on one device: in exact mode all the same."""
        found = {}
        for way in ("equal", "balanced", "alone"):
            name = self.introduce(f"{self.name}-{way}", CHECKED)
            devices = self.options.devices[1:] if way == "alone" else self.options.devices
            self.desk.assign(name, *devices, parts=self.parts(way))
            found[way] = await self.desk.end_of(name)
        return found

    def cuts(self) -> list[list[int]]:
        """What was dealt to the devices, each with the step from which it was; of shards that is not known."""
        if not self.options.exact:
            known = JobFolder(self.folder / "state", self.name).batch_splits()
            return [[cut.step, *cut.parts] for cut in known]
        told = [words for words in self.desk.stories.get(self.name, ()) if "shards" in words]
        return [[int(number) for number in re.findall(r"cpu:\d+ (\d+)", words)] for words in told]


async def compare(desk: Desk, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Both ways by turns, job by job."""
    results: dict[str, Any] = {}

    def keep(job: str, found: dict[str, Any]) -> None:
        results[job] = found
        save(options.out, results)

    for job in options.job or BATCHES:
        contest = Contest(desk, folder, job, options)
        contest.introduce()
        try:
            await by_turns(contest, lambda found, job=job: keep(job, found))  # type: ignore[misc]
            await desk.answered(contest.name, desk.release(contest.name))
            if options.exact and job in results:
                digests = await contest.digests()
                results[job] |= {"digests": digests, "same_weights": len(set(digests.values())) == 1}
                keep(job, results[job])
                print(
                    f"{job}: the same weights either way, and on one device: {results[job]['same_weights']}", flush=True
                )
        except (JobEnded, TimeoutError) as error:
            print(f"{job}: {error!r}", flush=True)
        if job not in results:
            continue
        ratio, each = results[job]["times_faster"], results[job]["times_faster_each"]
        print(f"{job}: balanced is {ratio:.2f} x as fast as equal ({ASKED} asked); each pair {each}", flush=True)
    return results


async def by_turns(contest: Contest, keep: Callable[[dict[str, Any]], None]) -> None:
    """Both ways by turns, in one training; what is known is kept after every pair."""
    options = contest.options
    found: dict[str, list[dict[str, Any]]] = {"equal": [], "balanced": []}
    patience = Patience(options.limit_s)
    alone = await contest.alone()
    print(f"{contest.job}: alone {alone['samples_per_s']} samples/s, {alone['possible']} x is possible", flush=True)
    await contest.block("balanced", options.devices, options.block)  # memory is touched
    if options.exact:
        beside = list(marked(contest.desk.mark).values()).count("carpool-twin")
        alone["processes_beside"] = beside
        print(f"{contest.job}: {beside} processes pass shards beside the workers", flush=True)
        if not beside and options.fast > 1:
            log = JobFolder(contest.folder / "state", contest.name).path / "log"
            raise SystemExit(log.read_text(encoding="utf-8")[-4000:])
    for _ in range(options.pairs):
        for way, blocks in found.items():
            blocks.append(await contest.block(way, options.devices, options.block))
        cuts = contest.cuts()
        keep({"alone": alone, **judged(found, cuts, contest)})
        equal, balanced = (blocks[-1] for blocks in found.values())
        print(
            f"equal {equal['taken_s']:7.2f} s, balanced {balanced['taken_s']:7.2f} s, "
            f"{equal['taken_s'] / balanced['taken_s']:5.2f} x; cut {cuts[-1:]}; beside the longest pass "
            f"{equal['sync_ms']} and {balanced['sync_ms']} ms of a step",
            flush=True,
        )
        if patience.is_over:
            break


def judged(found: dict[str, list[dict[str, Any]]], cuts: Sequence[Sequence[int]], contest: Contest) -> dict[str, Any]:
    """How many times faster balanced parts are, pair by pair."""
    pairs = zip(found["equal"], found["balanced"], strict=True)
    ratios = [equal["taken_s"] / balanced["taken_s"] for equal, balanced in pairs]
    return {
        "arguments": contest.arguments,
        "devices": f"cpu:1x{contest.options.fast},1x{contest.options.slow}",
        "cores": [list(device.cores) for device in contest.options.dealt],
        "steps_of_a_block": contest.options.block,
        "times_faster": round(statistics.median(ratios), 3),
        "times_faster_each": [round(each, 3) for each in ratios],
        "asked": ASKED,
        "exact": contest.options.exact,
        "parts": cuts,
        "blocks": found,
    }


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What is asked for."""
    found = sorted(os.sched_getaffinity(0))
    apart = one_of_each(found)
    cores = len(apart)
    slow = max(1, cores // 8)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    fast = 2 * slow if cores > 2 else slow
    parser.add_argument("--fast", type=int, default=fast, help="cores of the one device (a quarter of all)")
    parser.add_argument("--slow", type=int, default=slow, help="cores of the other one (an eighth of all)")
    parser.add_argument("--job", choices=list(ENTRIES), action="append", help="by default all of them")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--block", type=int, default=12, help="steps that are timed each time")
    parser.add_argument("--limit-s", type=float, default=150.0, help="begin no pair of a job after so many seconds")
    parser.add_argument("--exact", action="store_true", help="shards instead of samples, and equal weights")
    parser.add_argument("--shards", type=int, default=64, help="of a step in exact mode, a power of two")
    parser.add_argument("--batch", type=int, default=0, help=f"samples of a step, instead of {BATCHES}")
    parser.add_argument("--channels", type=int, default=0, help="of the CNN: 64, 32 in exact mode, 8 on few cores")
    parser.add_argument("--width", type=int, default=1024 if cores >= 8 else 64, help="of the perceptron")
    parser.add_argument("--out", default="runtime_unlike", help="name of the result file, without .json")
    options = parser.parse_args(words)
    options.channels = options.channels or (8 if cores < 8 else 32 if options.exact else 64)
    if apart == found and options.fast + options.slow <= len(found) // 2:
        apart = list(felt_apart(tuple(found)))
        print(f"cores that do not feel each other, the quickest first: {apart}", flush=True)
    options.devices, options.apart, options.dealt = (0, 1), apart, dealt((options.fast, options.slow), apart)
    return options


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """In an executor of its own."""
    sizes = (options.fast, options.slow)
    desk = await Desk.open(folder / "state", sizes, mark=new_mark(), patience_s=600.0, apart=options.apart)
    try:
        return await compare(desk, folder, options)
    finally:
        await desk.close()


def main() -> None:
    """Measure, print the ratio, and keep it."""
    options = parsed()
    with tempfile.TemporaryDirectory() as name:
        results = asyncio.run(measure(Path(name), options))
    ratios = [each["times_faster"] for each in results.values()]
    if not all(each.get("same_weights", True) for each in results.values()):
        raise SystemExit(1)
    if options.fast == 2 * options.slow and min(ratios, default=0.0) < ASKED:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
