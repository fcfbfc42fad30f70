"""Scenes of the seeds' policies: devices, trainings, jobs and the policies to compare."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from seeds.runs import Model, Planned

LANES, EQUAL = "cuda:0@50,cuda:0@25,cuda:0@12", ",".join(["cuda:0@25"] * 4)
CORES, EQUAL_CORES = "cpu:1x1,1x2", "cpu:2x1"

GPU_MODELS = {
    "resnet18": Model("resnet18", "vision", {"name": "resnet18", "size": 64, "batch": 128}, 120),
    "mobilenet": Model("mobilenet", "vision", {"name": "mobilenet_v3_small", "size": 64, "batch": 128}, 120),
    "encoder": Model("encoder", "encoder", {"width": 512, "depth": 6, "length": 64, "batch": 64}, 60),
    "lstm": Model("lstm", "recurrent", {"width": 256, "length": 32, "batch": 64}, 250),
    "mlp": Model("mlp", "mlp", {"width": 2048, "depth": 4, "batch": 256}, 500),
    "conv": Model("conv", "conv", {"width": 96, "depth": 5, "size": 32, "batch": 256}, 50),
}
CPU_MODELS = {
    "small": Model("small", "mlp", {"width": 128, "depth": 2, "features": 64, "batch": 32, "samples": 512}, 400),
    "large": Model("large", "mlp", {"width": 512, "depth": 3, "features": 64, "batch": 64, "samples": 512}, 120),
    "conv": Model("conv", "conv", {"width": 8, "depth": 2, "size": 16, "batch": 32, "samples": 256}, 250),
}
WIDE_GPU = Model("wide", "mlp", {"width": 3072, "depth": 2, "batch": 2048}, 100)  # 42 MB of gradients
WIDE_CPU = Model("wide", "mlp", {"width": 1024, "depth": 2, "features": 64, "batch": 32, "samples": 256}, 60)


@dataclass(frozen=True, slots=True)
class Scene:
    """One table."""

    name: str
    devices: str
    jobs: tuple[Planned, ...]
    policies: tuple[str, ...]
    counts: tuple[int, ...] = (1,)  # numbers of devices on which speeds are measured
    note: str = ""
    is_simulated: bool = False  # too, from the measured speeds


def scene_models(scene: Scene) -> list[Model]:
    """The trainings to measure."""
    return list({job.model.name: job.model for job in scene.jobs}.values())


def _stream(models: dict[str, Model], count: int, scale: float, span_s: float, seed: int, **keys: Any) -> list[Planned]:
    """Jobs of random models, lengths, weights and submission times."""
    random = Random(seed)
    names = list(models)
    jobs = []
    for number in range(count):
        model = models[names[number % len(names)]]
        seconds = scale * min(4.0, max(0.4, random.lognormvariate(0.0, 0.7)))
        at_s = 0.0 if number < 3 else random.uniform(0.0, span_s * scale)
        weight = float(random.randint(1, 5))
        jobs.append(Planned(f"{model.name}{number}", model, seconds, weight=weight, at_s=round(at_s, 2), keys=keys))
    return jobs


def hare(*, is_gpu: bool, scale: float) -> list[Scene]:
    """Weighted jobs on lanes of different sizes; and a job across lanes whose gaps others may fill."""
    models = GPU_MODELS if is_gpu else CPU_MODELS
    devices = LANES if is_gpu else CORES
    jobs = _stream(models, 9 if is_gpu else 5, scale, 1.5, seed=1)
    rows = ("hare", "wsrtf", "srtf", "hare-literal", "carpool")
    gang = Planned(
        "gang", WIDE_GPU if is_gpu else WIDE_CPU, 2.0 * scale, weight=40.0, keys={"devices": 2, "min_devices": 2}
    )
    filler = models["mlp" if is_gpu else "small"]
    fillers = [Planned(f"filler{n}", filler, 1.0 * scale, at_s=0.5 * scale) for n in range(2)]
    two = "cuda:0@50,cuda:0@25" if is_gpu else CORES
    return [
        Scene("hare", devices, tuple(jobs), rows, is_simulated=True),
        Scene(
            "gaps",
            two,
            (gang, *fillers),
            ("hare", "hare:gaps=false", "hare-literal", "carpool"),
            note="a job across lanes",
        ),
    ]


def iadeep(*, is_gpu: bool, scale: float) -> list[Scene]:
    """More jobs than devices, which share devices; batch sizes may be tuned."""
    models = GPU_MODELS if is_gpu else CPU_MODELS
    jobs = _stream(models, 12 if is_gpu else 5, scale, 1.0, seed=2)
    tuned = [
        Planned(job.name, job.model, job.seconds, at_s=job.at_s, keys={"batch": _range(int(job.model.args["batch"]))})
        for job in jobs
    ]
    rows = ("iadeep:settle_s=2", "iadeep:tuner=false", "iadeep-literal", "kernel-est", "mps-equal", "fifo", "carpool")
    return [Scene("iadeep", LANES if is_gpu else CORES, tuple(tuned), rows)]


def _range(own: int) -> dict[str, Any]:
    return {"size": own, "tune": True, "min": max(4, own // 2), "max": own * 2}


def elastic(*, is_gpu: bool, scale: float) -> list[Scene]:
    """Jobs that may use one to all of equal lanes."""
    models = (
        {"conv": GPU_MODELS["conv"], "resnet18": GPU_MODELS["resnet18"]} if is_gpu else {"conv": CPU_MODELS["conv"]}
    )
    keys = {"devices": 1, "min_devices": 1, "max_devices": 4 if is_gpu else 2}
    jobs = _stream(models, 7 if is_gpu else 4, scale, 3.0, seed=3, **keys)
    rows = ("elastic", "afs", "optimus", "las", "srtf", "carpool")
    return [Scene("elastic", EQUAL if is_gpu else EQUAL_CORES, tuple(jobs), rows, (1, 2, 4) if is_gpu else (1, 2))]


BUILDERS = {"hare": hare, "iadeep": iadeep, "elastic": elastic}
