"""Measures the cost of switching one GPU between jobs, for the eight models of Hare's table.

Usage: PYTHONPATH=src python benchmarks/gpu_switching.py [--models vgg19,bert_base,…] [--out FILE]

Eight resident jobs take turns through an executor, as in `carpool run` without MPS. Each step stamps its begin and end
with the GPU's global timer (trials/timed.py): the gap is from the end of one job's step to the begin of the next.
Baselines: the same jobs in plain processes (cold start, and reference losses and weights), and our reading of
PipeSwitch, which streams the state in while the step runs. Stamps are kept in `.stamps.json`. `--devices cpu:1x1
--models mlp:4,cnn:4 --parts plain` tries it without a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from measured import RESULTS, ROOT, conditions
from trials.baselines import Plain, plain, streamed
from trials.desk import Desk
from trials.gaps import Steps, gaps_ms, spread, steps_ms
from trials.gpu import open_desk
from trials.timed import arguments, read, read_losses

from carpool.jobs.program import Program

MODELS = ("vgg19", "resnet50", "inception_v3:32", "bert_base", "transformer", "deepspeech", "fastgcn", "graphsage")
STEPS = 140  # of each job: more than a thousand switches that count at turns of one
_LONG_TURNS = 72  # steps of each job, where a turn has several


def program(model: str, steps: int, stamps: Path, company: int = 1) -> Program:
    """A job that notes when its steps begin and end."""
    args = {**arguments(model), "steps": steps, "stamps": str(stamps), "company": company}
    return Program(entry=f"{ROOT / 'benchmarks' / 'trials' / 'timed.py'}:stamped", args=args, checkpoint_s=1e6)


@dataclass(frozen=True, slots=True)
class Setting:
    """Which jobs take turns, and where."""

    models: tuple[str, ...]
    steps: int  # of each
    devices: str
    heirs: int  # whose next steps are queued while another computes

    @property
    def kind(self) -> str:
        """Of the devices, as torch calls it."""
        return self.devices.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Made:
    """What a job that took turns has made."""

    steps: Steps
    losses: tuple[float, ...]
    digest: str


async def opened(setting: Setting, turn: int, folder: Path) -> Desk:
    """An executor that gives turns of so many steps.

    Jobs take them in the order in which they ask, each as often as the others, whatever their steps take.
    """
    await asyncio.to_thread(folder.mkdir)
    rules: dict[str, Any] = {"quantum_s": 0.0, "max_wait_s": 0.0, "mirror_s": 1e6}
    rules |= {"turn_steps": turn, "heirs": setting.heirs}
    return await open_desk(folder, devices=setting.devices, mps=False, patience_s=100.0, **rules)


async def run(desk: Desk, setting: Setting, folder: Path) -> dict[str, Made]:
    """Let jobs run to their ends on one device by turns."""
    models = setting.models
    try:
        for model in models:
            desk.introduce(model, program(model, setting.steps, folder / model, len(models)))
            desk.assign(model, 0, fraction=1.0 / len(models))
        digests = {model: await desk.end_of(model) for model in models}
        for model, story in desk.stories.items():
            for words in {words for words in story if "graph" in words.lower()}:
                print(f"# {model}: {words}", flush=True)
    finally:
        await desk.close()
    for model, digest in digests.items():
        if digest.startswith("FAILED"):
            print(f"# {model}: {digest}", flush=True)
    written = {model: folder / model for model in models if (folder / model).exists()}
    return {model: Made(read(path), tuple(read_losses(path)), digests[model]) for model, path in written.items()}


class Table:
    """Rows by model, and the stamps they were made of, written down after every change."""

    def __init__(self, path: Path, setting: Setting | None = None) -> None:
        self._path = path
        self._head: dict[str, Any] = {"schema": 1, "benchmark": "gpu_switching", **conditions()}
        self.rows: dict[str, dict[str, Any]] = {}
        self.stamps: dict[str, dict[str, Steps]] = {}
        if path.exists():  # of parts that were measured before
            self._head = json.loads(path.read_text(encoding="utf-8"))
            self.rows = {row["model"]: row for row in self._head.pop("results")}
            if self._stamps_path.exists():
                self.stamps = json.loads(self._stamps_path.read_text(encoding="utf-8"))
        if setting is not None:
            self._head |= {**conditions(), **asdict(setting)}

    def add(self, model: str, **figures: Any) -> None:
        """More figures of a model."""
        self.rows.setdefault(model, {"model": model}).update(figures)
        print(f"{model:14} " + "  ".join(f"{name} {value}" for name, value in figures.items()), flush=True)
        rows = list(self.rows.values())
        self._path.write_text(json.dumps({**self._head, "results": rows}, indent=1) + "\n", encoding="utf-8")

    def keep(self, name: str, steps_of: Mapping[str, Steps]) -> None:
        """Keep the stamps of a run, so that other questions can be asked of it later."""
        self.stamps[name] = dict(steps_of)
        self._stamps_path.write_text(json.dumps(self.stamps) + "\n", encoding="utf-8")

    @property
    def _stamps_path(self) -> Path:
        return self._path.with_suffix(".stamps.json")


async def by_turns(table: Table, desk: Desk, setting: Setting, turn: int, folder: Path) -> dict[str, Made]:
    """All jobs by turns of so many steps."""
    steps = setting.steps if turn == 1 else min(setting.steps, _LONG_TURNS)
    made = await run(desk, replace(setting, steps=steps), folder)
    steps_of = {model: each.steps for model, each in made.items()}
    table.keep(f"turns_of_{turn}", steps_of)
    show(table, turn, steps_of, {model: each.digest for model, each in made.items()})
    return made


def show(table: Table, turn: int, steps_of: Mapping[str, Steps], digests: Mapping[str, str]) -> None:
    """What the stamps of jobs that took turns of so many steps say."""
    gaps, took = gaps_ms(steps_of), steps_ms(steps_of)
    for model, found in gaps.items():
        gap = spread(found)
        figures: dict[str, Any] = {"gap_ms": gap, "step_ms": took.get(model), "digest": digests[model]}
        if gap["count"]:
            figures["share"] = round(gap["median"] / (gap["median"] + turn * took[model]["all"]), 5)
        table.add(model, **{f"turns_of_{turn}": figures})
    everything = [each for found in gaps.values() for each in found]
    table.add("all", **{f"turns_of_{turn}": {"gap_ms": spread(everything)}})


def show_again(table: Table, stamps: Mapping[str, Mapping[str, Steps]]) -> None:
    """The same figures from stamps that were kept."""
    for name, steps_of in stamps.items():
        digests = {model: table.rows[model][name]["digest"] for model in steps_of}
        show(table, int(name.rpartition("_")[2]), steps_of, digests)


def compare(table: Table, turn: int, found: Mapping[str, Made], wanted: Mapping[str, Plain]) -> None:
    """Whether jobs by turns had the losses of those that were never switched, and ended with their weights.

    Steps that are fewer are compared with the first ones, and say nothing of the weights.
    """
    for model in found.keys() & wanted.keys():
        made, alone = found[model], wanted[model]
        count = len(made.losses)
        figures: dict[str, Any] = {"losses": count, "equal_losses": made.losses == alone.losses[:count]}
        if count == len(alone.losses):
            figures["equal_weights"] = made.digest == alone.digest
        table.add(model, **{f"turns_of_{turn}_against_plain": figures})


async def measure(table: Table, setting: Setting, turns: Sequence[int], parts: Sequence[str]) -> None:
    """Everything, part by part; what fails is told and the rest goes on.

    All processes that have to import torch do so at once, beside the cold starts; the device is free from then on.
    """
    with tempfile.TemporaryDirectory() as folder:
        work, wanted = Path(folder), dict[str, Plain]()
        folders = {turn: work / f"turns{turn}" for turn in turns}
        desks = dict(
            zip(turns, await asyncio.gather(*[opened(setting, *each) for each in folders.items()]), strict=True)
        )
        baseline = streamed(setting.models, setting.kind) if "streamed" in parts else None
        if "plain" in parts:
            with told("plain"):
                wanted = await asyncio.to_thread(plain, setting.models, setting.kind, setting.steps, work / "plain")
            for model, each in wanted.items():
                table.add(model, cold_start_s=each.first_step_s)
        for turn, desk in desks.items():
            with told(f"turns of {turn}"):
                made = await by_turns(table, desk, setting, turn, folders[turn])
                compare(table, turn, made, wanted)
        if baseline is not None:
            with told("streamed"):
                for model, row in (await asyncio.to_thread(baseline.rows)).items():
                    table.add(model, streamed=row)


@contextmanager
def told(part: str) -> Iterator[None]:
    """A part that fails is told, and the others go on."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - see above
        print(f"# {part}: {type(error).__name__}: {error}", flush=True)


def main() -> None:
    """All models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--turns", default="1,10", help="steps in a turn")
    parser.add_argument("--parts", default="plain,streamed", help="what it is compared with")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each job")
    parser.add_argument("--heirs", type=int, default=2, help="jobs whose next steps are queued while another computes")
    parser.add_argument("--devices", default="cuda:0")
    parser.add_argument("--out", default="", help=f"write JSON here instead of {RESULTS.name}/gpu_switching.json")
    parser.add_argument("--more", action="store_true", help="keep what the file says of other parts")
    parser.add_argument("--again", action="store_true", help="measure nothing: look at the stamps that were kept")
    options = parser.parse_args()
    path = Path(options.out) if options.out else RESULTS / "gpu_switching.json"
    if options.again:
        table = Table(path)
        show_again(table, table.stamps)
        return
    if not options.more:
        path.unlink(missing_ok=True)
    turns = [int(turn) for turn in options.turns.split(",") if turn]
    setting = Setting(tuple(options.models.split(",")), options.steps, options.devices, options.heirs)
    asyncio.run(measure(Table(path, setting), setting, turns, options.parts.split(",")))


if __name__ == "__main__":
    main()
