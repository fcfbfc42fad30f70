"""What it costs to hand one GPU from a job to the next, for the eight models of Hare's table.

Usage: PYTHONPATH=src python benchmarks/gpu_switching.py [--models vgg19,bert_base,…] [--out FILE]
Eight jobs in processes of their own, all resident, take turns through an executor, as `carpool run` lets them without
MPS. Each step stamps its begin and its end with the GPU's global timer (trials/timed.py): the gap is the time from
the end of the predecessor's step to the begin of the next one, on the device, all work of the hosts in it included.
Beside it: the same steps without any turn (side by side in lanes of the whole GPU, or alone: weights must be equal),
a cold start, and a PipeSwitch-like baseline that streams the state in, group by group, while the step runs.
`--devices cpu:1x1 --models mlp:4,cnn:4` tries it without a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measured import RESULTS, ROOT, conditions
from trials.gpu import open_desk
from trials.timed import read

from carpool.runtime.program import Program

MODELS = ("vgg19", "resnet50", "inception_v3", "bert_base", "transformer", "deepspeech", "fastgcn", "graphsage")
STEPS = 130  # of each job: more than a thousand switches
_WARM = 12  # steps that are made by the code, recorded and proved
Steps = list[tuple[int, int]]


def program(model: str, steps: int, stamps: Path, company: int = 1) -> Program:
    """A job that notes when its steps begin and end; ``mlp:8`` has 8 samples in a batch instead of its usual ones."""
    name, _, batch = model.partition(":")
    args: dict[str, Any] = {"model": name, "steps": steps, "stamps": str(stamps), "company": company}
    args["batch_size"] = int(batch) if batch else None
    args["channels_last"] = any(kind in name for kind in ("net", "inception", "vgg"))
    if name.startswith("resnet"):
        args["stem"] = "imagenet"
    entry = f"{ROOT / 'benchmarks' / 'trials' / 'timed.py'}:stamped"
    return Program(entry=entry, args=args, checkpoint_s=1e6)


async def run(
    steps: Mapping[str, int], folder: Path, devices: str, *, mps: bool = False, **options: Any
) -> dict[str, tuple[Steps, str]]:
    """Let jobs run to their ends on one device, all at once; the steps and the digest of each.

    They take their turns in the order in which they ask, each as often as the others, whatever their steps take.
    """
    await asyncio.to_thread(folder.mkdir)
    desk = await open_desk(folder, devices=devices, mps=mps, patience_s=150.0, mirror_s=1e6, max_wait_s=0.0, **options)
    try:
        for model, count in steps.items():
            desk.introduce(model, program(model, count, folder / model, len(steps)))
            desk.assign(model, 0, fraction=1.0 if mps else 1.0 / len(steps))
        digests = {model: await desk.end_of(model) for model in steps}
        for model, digest in digests.items():
            if digest.startswith("FAILED"):
                print(f"# {model}: {digest}", flush=True)
        for model, story in desk.stories.items():
            for words in {words for words in story if "graph" in words.lower() or "turns" in words}:
                print(f"# {model}: {words}", flush=True)
    finally:
        await desk.close()
    return {model: (read(folder / model), digests[model]) for model in steps if (folder / model).exists()}


def gaps_ms(all_steps: Mapping[str, Steps]) -> dict[str, list[float]]:
    """For each job, the gaps before those of its steps that follow another job's, once both have settled."""
    line = sorted(
        (begin, end, model, number) for model, steps in all_steps.items() for number, (begin, end) in enumerate(steps)
    )
    found: dict[str, list[float]] = {model: [] for model in all_steps}
    for (_, left, before, earlier), (begin, _, model, number) in itertools.pairwise(line):
        if before != model and min(earlier, number) >= _WARM:
            found[model].append((begin - left) / 1e6)
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """How many, the median and the 99th percentile."""
    if not values:
        return {"count": 0}
    ordered = sorted(values)
    high = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"count": len(ordered), "median": round(statistics.median(ordered), 4), "p99": round(high, 4)}


def cold_s(models: Sequence[str], device: str) -> dict[str, float]:
    """From the start of an interpreter to the end of a job's first step, four at a time."""
    script = str(ROOT / "benchmarks" / "trials" / "first_step.py")
    found: dict[str, float] = {}
    for few in itertools.batched(models, 4) if sys.version_info >= (3, 12) else [tuple(models)]:
        began = {model: time.time() for model in few}
        children = {
            model: subprocess.Popen([sys.executable, script, model, device], stdout=subprocess.PIPE, text=True)
            for model in few
        }
        for model, child in children.items():
            try:
                out, _ = child.communicate(timeout=60)
                found[model] = round(float(out.split()[-1]) - began[model], 3)
            except (subprocess.TimeoutExpired, IndexError, ValueError):
                child.kill()
    return found


def streamed_ms(models: Sequence[str], device: str) -> dict[str, Any]:
    """The PipeSwitch-like baseline, all models in one process."""
    script = str(ROOT / "benchmarks" / "trials" / "streamed.py")
    made = subprocess.run(
        [sys.executable, script, device, *models], capture_output=True, text=True, timeout=120, check=False
    )
    rows = [json.loads(line) for line in made.stdout.splitlines() if line.startswith("{")]
    if made.returncode:
        print("# streamed:", made.stderr.strip().splitlines()[-1:], flush=True)
    return {row.pop("model"): row for row in rows}


class Table:
    """Rows by model, written down after every change."""

    def __init__(self, path: Path, devices: str) -> None:
        self._path = path
        self._devices = devices
        self.rows: dict[str, dict[str, Any]] = {}

    def add(self, model: str, **figures: Any) -> None:
        """More figures of a model."""
        self.rows.setdefault(model, {"model": model}).update(figures)
        print(f"{model:14} " + "  ".join(f"{name} {value}" for name, value in figures.items()), flush=True)
        rows = list(self.rows.values())
        document = {"schema": 1, "benchmark": "gpu_switching", **conditions(), "devices": self._devices}
        self._path.write_text(json.dumps({**document, "results": rows}, indent=1) + "\n", encoding="utf-8")


async def by_turns(table: Table, counts: dict[str, int], turn: int, work: Path, devices: str) -> dict[str, str]:
    """All jobs by turns of so many steps; their digests."""
    made = await run(counts, work / f"turns{turn}", devices, quantum_s=0.0, turn_steps=turn)
    gaps = gaps_ms({model: steps for model, (steps, _) in made.items()})
    for model, (steps, _) in made.items():
        step_ms = statistics.median((end - begin) / 1e6 for begin, end in steps[_WARM:])
        gap = spread(gaps[model])
        share = gap["median"] / (gap["median"] + turn * step_ms) if gap["count"] else None
        table.add(model, **{f"turns_of_{turn}": {"gap_ms": gap, "step_ms": round(step_ms, 4), "share": share}})
    return {model: digest for model, (_, digest) in made.items()}


async def unswitched(
    table: Table, counts: dict[str, int], parts: Sequence[str], work: Path, devices: str
) -> dict[str, str]:
    """The digests of jobs that are never switched: one after another, or side by side in lanes of the whole GPU."""
    digests: dict[str, str] = {}
    groups = [[model] for model in counts] if "alone" in parts else [list(counts)] if "beside" in parts else []
    for number, group in enumerate(groups):
        try:
            chosen = {model: counts[model] for model in group}
            made = await run(chosen, work / f"unswitched{number}", devices, mps=len(group) > 1)
        except Exception as error:  # noqa: BLE001 - the others go on
            print(f"# {group} unswitched: {type(error).__name__}: {error}", flush=True)
            continue
        for model, (steps, digest) in made.items():
            digests[model] = digest
            if len(group) == 1:
                step_ms = statistics.median((end - begin) / 1e6 for begin, end in steps[_WARM:])
                own = spread([(b - a) / 1e6 for (_, a), (b, _) in itertools.pairwise(steps[_WARM:])])
                table.add(model, alone={"step_ms": round(step_ms, 4), "own_gap_ms": own})
    return digests


async def measure(
    table: Table, counts: dict[str, int], turns: Sequence[int], parts: Sequence[str], devices: str
) -> None:
    """Everything, part by part; what fails is told and the rest goes on."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        alone = await unswitched(table, counts, parts, work, devices)
        for turn in turns:
            try:
                digests = await by_turns(table, counts, turn, work, devices)
            except Exception as error:  # noqa: BLE001 - see above
                print(f"# turns of {turn}: {type(error).__name__}: {error}", flush=True)
                continue
            for model in set(alone) & set(digests):
                table.add(model, **{f"equal_after_turns_of_{turn}": digests[model] == alone[model]})
    device = devices.partition(":")[0]
    if "cold" in parts:
        for model, seconds in cold_s(list(counts), device).items():
            table.add(model, cold_start_s=seconds)
    if "streamed" in parts:
        for model, row in streamed_ms(list(counts), device).items():
            table.add(model, streamed=row)


def main() -> None:
    """All models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--turns", default="1,10", help="steps in a turn")
    parser.add_argument("--parts", default="beside,cold,streamed", help="also alone, instead of beside")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each job")
    parser.add_argument("--devices", default="cuda:0")
    parser.add_argument("--out", default="", help=f"write JSON here instead of {RESULTS.name}/gpu_switching.json")
    options = parser.parse_args()
    path = Path(options.out) if options.out else RESULTS / "gpu_switching.json"
    table = Table(path, options.devices)
    counts = dict.fromkeys(options.models.split(","), options.steps)
    turns = [int(turn) for turn in options.turns.split(",")]
    asyncio.run(measure(table, counts, turns, options.parts.split(","), options.devices))


if __name__ == "__main__":
    main()
