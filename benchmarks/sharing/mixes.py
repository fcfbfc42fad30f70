"""The mixes, and the ways of running them that need no scheduler."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace

from colocation.tasks import Task, labelled
from sharing.room import PLAIN, Guest, Room
from sharing.table import Table
from zoo import MODELS

EQUAL = (33, 40, 50, 60, 100)


@dataclass(frozen=True, slots=True)
class Mix:
    """Trainings that share a GPU; in skewed ones the first is the large one."""

    name: str
    tasks: tuple[Task, ...]
    ours: bool = False  # on seats too, steps are made and fed by carpool's trainer

    def at(self, *shares: int, ours: bool = False, moved: bool = False) -> list[Guest]:
        """Each at its share; one share is for all."""
        given = shares if len(shares) == len(self.tasks) else shares * len(self.tasks)
        ours = ours or self.ours
        return [Guest(*each, place, ours, moved) for place, each in enumerate(zip(self.tasks, given, strict=True))]


def task(model: str, batch: int) -> Task:
    """A net as published, on pictures of CIFAR-10's shape."""
    published = {"stem": "imagenet"} if "stem" in inspect.signature(MODELS[model]).parameters else {}
    return Task(model, batch, sizes=published)


def mix(name: str, *tasks: tuple[str, int]) -> Mix:
    """By model and batch."""
    return Mix(name, tuple(task(*each) for each in tasks))


def tiny(whole: Mix) -> Mix:
    """The same with nets and batches that a CPU can bear, to try the benchmark out."""
    return replace(whole, tasks=tuple(map(_narrow, whole.tasks)))


def _narrow(task: Task) -> Task:
    if task.is_fed:
        return replace(task, batch=4, image=32, sizes={**task.sizes, "image": 32})
    smaller = {"vgg": {"width": 0.1}, "res": {"width": 0.1}, "lst": {"hidden": 16}}
    return replace(task, batch=4, sizes={**task.sizes, **smaller.get(task.model[:3], {})})


PAIRED = (
    mix("V16+R18+M3", ("vgg16", 128), ("resnet18", 128), ("mobilenet_v3", 128)),
    mix("R50+S2+D121", ("resnet50", 128), ("shufflenet_v2", 128), ("densenet121", 128)),
)
SKEWED = (
    mix("V16@512+2", ("vgg16", 512), ("mobilenet_v3", 64), ("shufflenet_v2", 64)),
    mix("V16@512+2s", ("vgg16", 512), ("mobilenet_v3", 32), ("shufflenet_v2", 32)),
    Mix("R18@512+2s", (Task("resnet18", 512), task("mobilenet_v3", 32), task("shufflenet_v2", 32))),
    Mix(
        "R101@256+2",  # with the stem that is usual for small pictures: what fills a device
        (Task("resnet101", 256), task("mobilenet_v3", 32), task("shufflenet_v2", 32)),
    ),
    mix(
        "V16@512+5",
        *(("vgg16", 512), ("mobilenet_v3", 32), ("shufflenet_v2", 32), ("squeezenet", 32)),
        *(("ncf", 1024), ("shufflenet_v2", 64)),
    ),
    # one that the host link holds up: it takes every multiprocessor it may have, and needs a third of them
    Mix("LSTM+fed", (Task("lstm", 32), labelled("mlp-fed", 256))),
    Mix("D121+fed", (task("densenet121", 128), labelled("mlp-fed", 256))),
    Mix("S@512+fed", (task("squeezenet", 512), labelled("mlp-fed", 256))),
)
# The same through carpool's own input: the second takes the device for a third of the time, or a third of the device.
FED = (
    Mix("LSTM+R18 fed", (Task("lstm", 32), Task("resnet18", 512, per_s=12_000)), ours=True),
    Mix("LSTM+R50 fed", (Task("lstm", 32), Task("resnet50", 128, per_s=2_900)), ours=True),
    Mix("LSTM+M3 fed", (Task("lstm", 32), Task("mobilenet_v3", 512, per_s=21_000)), ours=True),
)
MANY = (
    mix("8 x R18", *[("resnet18", 128)] * 8),
    mix("six CNNs", *[(each.model, 128) for whole in PAIRED for each in whole.tasks]),
    mix(
        "six unlike",
        *(("resnet18", 128), ("mobilenet_v3", 128), ("shufflenet_v2", 128)),
        *(("lstm", 32), ("ncf", 1024), ("bert_small", 8)),
    ),
)


def alone(room: Room, whole: Mix, seconds: float, *, eager: bool = False) -> list[float]:
    """Each by itself on the whole GPU; the same training twice is measured once."""
    known = {guest.task.name: room.run([guest], seconds, eager=eager)[0] for guest in each_once(whole)}
    return [known[task.name] for task in whole.tasks]


def each_once(whole: Mix) -> list[Guest]:
    """One of each training, with the whole GPU."""
    return list({guest.task.name: guest for guest in reversed(whole.at(100))}.values())


def baselines(table: Table, room: Room, whole: Mix, *, deterministic: bool, seconds: float, brief: bool) -> None:
    """One mix: alone, sliced in time, isolated, under hand-set equal shares; by the code and as graphs."""
    plain = whole.at(PLAIN)
    took_s = room.invite(
        [*plain, *[guest for share in EQUAL for guest in whole.at(share)]], deterministic=deterministic
    )
    more = {"deterministic": deterministic, "load_s": round(took_s, 1)}
    stage = "mixes"
    solo = alone(room, whole, seconds)
    table.add(stage, whole.name, "alone, graph", solo, solo, **more)
    by_code = alone(room, whole, seconds, eager=True)
    table.add(stage, whole.name, "alone, eager", by_code, solo, **more)
    for share in EQUAL:
        rates = room.run(whole.at(share), seconds)
        table.add(stage, whole.name, f"MPS {share} % each, graph", rates, solo, share=share, **more)
    table.add(stage, whole.name, "time slicing, eager", room.run(plain, seconds, eager=True), solo, **more)
    if brief:
        return
    for share in (33, 50):
        capped = [room.run([guest], seconds / 3)[0] for guest in whole.at(share)]
        table.add(stage, whole.name, f"alone at {share} %, graph", capped, solo, share=share, **more)
    table.add(stage, whole.name, "time slicing, graph", room.run(plain, seconds), solo, **more)
    for share in (33, 100):
        rates = room.run(whole.at(share), seconds, eager=True)
        table.add(stage, whole.name, f"MPS {share} % each, eager", rates, solo, share=share, **more)


def equal_rows(table: Table, room: Room, stage: str, whole: Mix, shares: Sequence[int], seconds: float) -> list[float]:
    """Each alone, then all at each equal share; the rates alone."""
    solo = alone(room, whole, seconds / 2)
    table.add(stage, whole.name, "alone, graph", solo, solo)
    for share in shares:
        rates = room.run(whole.at(share), seconds)
        table.add(stage, whole.name, f"MPS {share} % each, graph", rates, solo, share=share)
    return solo


def levels_for(whole: Mix) -> tuple[int, ...]:
    """As many of the policy's shares as there may be clients."""
    return (20, 25, 33, 40, 50, 60, 80, 100) if len(whole.tasks) <= 4 else (25, 33, 50, 60, 100)


def progress(rates: Sequence[float], own: Mix, now: Mix) -> list[float]:
    """Samples per second, each worth (φ + m0)/(φ + m) at a gradient noise scale φ of eight own batches m0."""
    pairs = zip(rates, own.tasks, now.tasks, strict=True)
    return [rate * 9.0 * before.batch / (8.0 * before.batch + after.batch) for rate, before, after in pairs]
