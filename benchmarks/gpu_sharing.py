"""Measures several trainings on one GPU: alone, time-sliced, isolated, at equal and unequal shares, many at once.

Usage: PYTHONPATH=src python benchmarks/gpu_sharing.py [--stages mixes,many,map,live,fed,crowd,…] [--seconds 1]

Every training is a resident process at a fixed share; rows are windows of a second in which some of them run. The
measure is Σ rate / (rate alone as a graph): sequential with graphs is 1.00. Needs a GPU and MPS; `--device cpu` tries
it with tiny nets. Rows are written as they come.
"""

from __future__ import annotations

import argparse
import time
from math import inf
from pathlib import Path

import torch
from colocation.daemon import mps
from measured import RESULTS
from sharing.live import WALK, LiveRun, compared
from sharing.mixes import FED, MANY, PAIRED, SKEWED, Mix, baselines, tiny
from sharing.room import Room
from sharing.stages import HAND, MAP, many, mapped, skewed, steps
from sharing.table import Table

STAGES = ("mixes", "steps", "skewed", "many", "map", "live", "fed", "crowd")
LIVE = {"live": "mixes", "fed": "fed", "crowd": "many"}  # through `carpool run`: which mixes
_MOST = 8  # trainings on one GPU in the stage with crowds


def main() -> None:
    """Stage by stage; one that fails is told, and the others go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--mixes", default="", help="only mixes whose names begin so, divided by commas")
    parser.add_argument("--seconds", type=float, default=1.0, help="that each row is measured")
    parser.add_argument("--deterministic", default="true,false", help="settings of the mixes: for equal bits, or not")
    parser.add_argument("--brief", action="store_true", help="only what chosen shares are compared with")
    parser.add_argument("--levels", default="", help="shares in percent that skewed mixes may have, divided by commas")
    parser.add_argument(
        "--hand", default="", help="shares of the large and of each small training, such as 50/100,60/33"
    )
    parser.add_argument("--policy", default="competitive", help="of the live stage")
    parser.add_argument("--walk", default="0.33/0.4/0.5/0.6/0.8/1.0", help="equal shares of the fed stage")
    parser.add_argument(
        "--hold", type=float, default=3.0, help="seconds that each of them, and the chosen ones before, are held"
    )
    parser.add_argument("--steady", type=float, default=4.0, help="seconds that settled shares are measured live")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for shares to settle live")
    parser.add_argument("--until", type=float, default=inf, help="seconds after which no live run goes on")
    parser.add_argument("--keep", type=Path, help="folder to copy the journals of live runs to")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_sharing.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(options.out, {"device": options.device})
    began = time.monotonic()
    stages = options.stages.split(",")
    with mps() as environment, Room(environment, options.device) as room:
        for stage in (stage for stage in stages if stage not in LIVE):
            for whole in _chosen(stage, options.mixes, options.device):
                try:
                    _measure(stage, table, room, whole, options)
                except Exception as error:  # noqa: BLE001 - see above
                    table.fail(f"{stage} {whole.name}", error)
                spent = f"{time.monotonic() - began:.0f} s, {room.measured_s:.0f} s of them measuring"
                print(f"{whole.name}: {spent}", flush=True)
                table.facts |= room.facts
                table.save()
    for stage in (stage for stage in stages if stage in LIVE):
        _live(table, _runs(stage, options), options, began)
    for whole in FED if "fed" in stages else ():
        compared(table, whole.name)


def _runs(stage: str, options: argparse.Namespace) -> list[LiveRun]:
    """Mixes through `carpool run`, by the policy; those with fed trainings then at one equal share after the other."""
    devices = "cuda:0" if options.device == "cuda" else "cpu:1"
    policy, settings = options.policy, options.deterministic.split(",")
    if stage == "fed":
        policy, settings = f"{WALK}:Compared:walk={options.walk}:hold_s={options.hold}", settings[:1]
    elif stage == "crowd":
        policy, settings = f"{policy}:most={_MOST}", settings[:1]
    return [
        LiveRun(whole, policy=policy, devices=devices, deterministic=setting == "true")
        for whole in _chosen(LIVE[stage], options.mixes, options.device)
        for setting in settings
    ]


def _live(table: Table, runs: list[LiveRun], options: argparse.Namespace, began: float) -> None:
    """One run after the other, once the seats are gone; against what was measured alone before."""
    try:
        for run, following in zip(runs, [*runs[1:], None], strict=True):
            try:
                run.start()
                run.measure(table, options.steady, options.limit, began + options.until)
                if following is not None:
                    following.start()
                run.finish(table, _alone(table, run, "graph"), _alone(table, run, "eager"))
            except Exception as error:  # noqa: BLE001 - the others go on
                table.fail(f"live {run.whole.name}", error)
            print(f"{run.whole.name}, live: {time.monotonic() - began:.0f} s", flush=True)
    finally:
        for run in runs:
            run.close(options.keep)


def _alone(table: Table, run: LiveRun, how: str) -> list[float]:
    """Rates alone on seats, in this call; none where they were not measured."""
    rows = [row for row in table.rows if row.get("mix") == run.whole.name and row.get("mode") == f"alone, {how}"]
    return next((row["rates"] for row in rows if row.get("deterministic", True) == run.deterministic), [])


def _chosen(stage: str, names: str, device: str) -> list[Mix]:
    every = {"mixes": PAIRED, "steps": PAIRED, "skewed": (*SKEWED, *FED), "many": MANY, "map": MAP, "fed": FED}[stage]
    found = [whole for whole in every if not names or whole.name.startswith(tuple(names.split(",")))]
    return found if device == "cuda" else [tiny(whole) for whole in found]


def _measure(stage: str, table: Table, room: Room, whole: Mix, options: argparse.Namespace) -> None:
    if stage == "mixes":
        for setting in options.deterministic.split(","):
            on = setting == "true"
            baselines(table, room, whole, deterministic=on, seconds=options.seconds, brief=options.brief)
    elif stage == "skewed":
        levels = tuple(int(level) for level in options.levels.split(",") if level)
        pairs = [each.split("/") for each in options.hand.split(",") if each]
        hand = [(int(large), int(small)) for large, small in pairs]
        skewed(table, room, whole, options.seconds * 0.6, levels, hand or HAND)
    else:
        {"steps": steps, "many": many, "map": mapped}[stage](table, room, whole, options.seconds * 0.6)


if __name__ == "__main__":
    main()
