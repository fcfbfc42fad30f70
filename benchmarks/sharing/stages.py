"""Stages in which the policy chooses, and the map of virtual totals and batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from colocation.tasks import Task
from sharing.closed_loop import choose
from sharing.mixes import PAIRED, Mix, alone, each_once, equal_rows, levels_for, progress
from sharing.room import Room
from sharing.table import Table, fair

HAND = ((60, 33), (80, 33), (60, 100), (50, 100))  # for the large training and for each small one, in percent
_CROWD = (20, 25, 33)  # percent for each of many
_MAPPED = (20, 33, 40, 50, 60, 80, 100)


def steps(table: Table, room: Room, whole: Mix, seconds: float, *, deterministic: bool = True) -> None:
    """What a step by carpool's trainer costs beside a bare graph: alone, and all at equal shares of 150 % together."""
    share = 150 // len(whole.tasks)
    ways = {"graph": {}, "our step": {"ours": True}, "our step, moved": {"ours": True, "moved": True}}
    guests = [guest for how in ways.values() for at in (100, share) for guest in whole.at(at, **how)]
    room.invite(guests, deterministic=deterministic)
    solo: list[float] = []
    for at in (100, share):
        for words, how in ways.items():
            rates = [room.run([guest], seconds)[0] for guest in whole.at(at, **how)]
            solo = solo or rates
            name = f"alone, {words}" if at == 100 else f"alone at {at} %, {words}"
            table.add("steps", whole.name, name, rates, solo, deterministic=deterministic)
    for words, how in (*ways.items(), *ways.items()):
        rates = room.run(whole.at(share, **how), seconds)
        name = f"MPS {share} % each, {words}"
        table.add("steps", whole.name, name, rates, solo, share=share, deterministic=deterministic)
    for guest in whole.at(100, ours=True) if deterministic else ():
        table.note("mirrors", {"model": guest.task.name, **room.mirror(guest, max(4, round(80 * seconds)))})
    work(table, room, whole, ways)


def work(table: Table, room: Room, whole: Mix, ways: dict[str, dict[str, bool]]) -> None:
    """What a step has the device do, bare and ours: how many kernels, how long, and where the two differ most."""
    for places in zip(*(whole.at(100, **how) for how in ways.values()), strict=True):
        found = [room.kernels(guest) for guest in places]
        for words, own in zip(ways, found, strict=True):
            unlike = {
                name: [
                    round(number - before, 1) for number, before in zip(row, found[0].get(name, (0, 0)), strict=True)
                ]
                for name in own.keys() | found[0].keys()
                for row in [own.get(name, [0.0, 0.0])]
            }
            most = sorted(unlike, key=lambda name: -abs(unlike[name][1]))[:12]
            told = {"model": places[0].task.name, "way": words, "nodes": round(sum(row[0] for row in own.values()), 1)}
            told["device_us"] = round(sum(row[1] for row in own.values()), 1)
            table.note("work", {**told, "beyond_bare": {name[:90]: unlike[name] for name in most if any(unlike[name])}})


def skewed(
    table: Table,
    room: Room,
    whole: Mix,
    seconds: float,
    levels: tuple[int, ...] = (),
    hand: Sequence[tuple[int, int]] = HAND,
) -> None:
    """Equal shares and some by hand, what the policy chooses, and what it chooses with the batches of small ones."""
    levels = levels or levels_for(whole)
    room.invite([guest for level in levels for guest in whole.at(level)])
    solo = equal_rows(table, room, "skewed", whole, [level for level in levels if level >= 25], seconds)
    share = max(level for level in levels if level * len(whole.tasks) <= 150)
    capped = [room.run([guest], seconds / 2)[0] for guest in whole.at(share)]
    table.add("skewed", whole.name, f"alone at {share} %, graph", capped, solo, share=share)
    for large, small in hand:
        if {large, small} <= set(levels):
            shares = [large, *[small] * (len(whole.tasks) - 1)]
            rates = room.run(whole.at(*shares), seconds)
            table.add("skewed", whole.name, f"MPS {large}/{small} %, graph", rates, solo, shares=shares)
    for batches in (False,) if whole.ours else (False, True):
        chosen = choose(room, whole, levels, seconds, batches=batches)
        if not chosen.shares:
            table.fail(f"skewed {whole.name}", RuntimeError("the policy gave the mix up"))
            continue
        words = "/".join(map(str, chosen.shares)) + " %"
        words += f", batches {'/'.join(map(str, chosen.batches))}" if batches else ", graph"
        now = replace(whole, tasks=tuple(map(_at_batch, whole.tasks, chosen.batches)))
        table.add(
            *("skewed", whole.name, f"chosen: {words}", chosen.rates, solo),
            shares=list(chosen.shares),
            batches=list(chosen.batches),
            fair_progress=round(fair(progress(chosen.rates, whole, now), solo), 4),
            vectors=[list(map(list, vector)) for vector in chosen.vectors],
            measuring_s=round(chosen.measuring_s, 2),
            cpu_s=round(chosen.cpu_s, 2),
        )


def _at_batch(task: Task, batch: int) -> Task:
    return replace(task, batch=batch)


def many(table: Table, room: Room, whole: Mix, seconds: float) -> None:
    """Many trainings at once, against one after another by the code and with graphs."""
    room.invite([*each_once(whole), *[guest for level in _CROWD for guest in whole.at(level)]])
    by_code = alone(room, whole, seconds, eager=True)
    solo = equal_rows(table, room, "many", whole, _CROWD, seconds)
    table.add("many", whole.name, "alone, eager", by_code, solo)
    best = max((row for row in table.rows if row.get("mix") == whole.name and "share" in row), key=lambda r: r["sum"])
    over = sum(rate / base for rate, base in zip(best["rates"], by_code, strict=True))
    best["sum_of_eager"] = round(over, 3)
    print(f"{'':12} best at {best['share']} %: {over:.2f} times one after another, eager", flush=True)
    table.save()


def mapped(table: Table, room: Room, whole: Mix, seconds: float) -> None:
    """One mix at three batches over all virtual totals."""
    for batch in (32, 128, 512) if whole.tasks[0].batch > 8 else (2, 4):
        now = Mix(f"{whole.name} @{batch}", tuple(replace(task, batch=batch) for task in whole.tasks))
        room.invite([guest for share in _MAPPED for guest in now.at(share)])
        equal_rows(table, room, "map", now, _MAPPED, seconds)


MAP = PAIRED[:1]
