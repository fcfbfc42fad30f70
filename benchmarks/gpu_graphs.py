"""Checks that CUDA graph replay is bit-identical to eager steps, and reports which steps fall back and why.

Usage: PYTHONPATH=src python benchmarks/gpu_graphs.py [--steps 100] [--only resnet18,vgg16_flat] [--out FILE]
Needs a GPU. One line per model.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import zoo_trainings as trainings
from measured import RESULTS, ROOT, conditions
from torch import nn
from torch.optim import lr_scheduler
from zoo import MODELS

from carpool.runtime.data.datasets import synthetic
from carpool.runtime.engine.determinism import seed_entry
from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.engine.training import Training
from carpool.runtime.state.digest import digest
from carpool.runtime.worker.entry_loader import load_training

BATCH = {"bert_base": 8, "bert_small": 8, "deepspeech": 8, "transformer": 32, "yolo": 8, "ncf": 1024, "gcn": 140}
EXAMPLES = {"examples/digits cnn": "digits.py:cnn", "examples/cifar10 cnn": "cifar10_cnn.py:cnn"}
_LIMIT_S = 120.0
_WARM = 10  # steps before the clock starts


def zoo(name: str, steps: int) -> Callable[[], Training]:
    """A model of the zoo with 2.5 batches of data, so that every third batch is a partial one."""
    batch_size = BATCH.get(name, 128)
    return lambda: trainings.training(name, batch_size, seed=0, samples=2 * batch_size + batch_size // 2, steps=steps)


def example(name: str, steps: int) -> Callable[[], Training]:
    """A CNN of the examples, as it is, for so many steps."""

    def make() -> Training:
        training = load_training(EXAMPLES[name], {}, seed=0, folder=ROOT / "examples")
        return replace(training, stop=Stop(steps=steps), evaluate=None, best="")

    return make


def small(steps: int, **changes: Any) -> Training:
    """A small CNN with dropout in which anything can be replaced."""
    seed_entry(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.2),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip
    model = changes.pop("model", lambda: model)()
    optimizer = changes.pop("optimizer", lambda p: torch.optim.Adam(p, lr=0.01))(model.parameters())
    if "schedule" in changes:
        changes["schedule"] = changes["schedule"](optimizer)
    options: dict[str, Any] = {
        "loss": lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]),
        "dataset": synthetic((3, 16, 16), size=100).train,
        "batch_size": 36,
        "stop": Stop(steps=steps),
    }
    return Training(model=model, optimizer=optimizer, **options | changes)


def item_in_loss(model: nn.Module, batch: Any) -> Any:
    """Looks at the loss, as code that logs does."""
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    assert loss.item() > 0
    return loss


def host_random(model: nn.Module, batch: Any) -> Any:
    """Draws in Python."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1]) * (1.0 + random.random())


def dynamic(model: nn.Module, batch: Any) -> Any:
    """A shape that hangs on the data."""
    kept = batch[1] > 2
    return nn.functional.cross_entropy(model(batch[0])[kept], batch[1][kept])


class Replacing(nn.Module):
    """Puts another tensor in the place of a buffer, as code that keeps a running mean may."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(3))
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(768, 10))

    def forward(self, images: torch.Tensor) -> Any:
        """Keep the mean, and classify."""
        self.mean = 0.9 * self.mean + 0.1 * images.detach().mean((0, 2, 3))
        return self.body(images - self.mean[:, None, None])


class Counting(torch.optim.SGD):
    """Counts its steps in a plain number."""

    def step(self, closure: Any = None) -> Any:
        """Count, and step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
        return super().step(closure)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The usual one."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


SMALL: dict[str, dict[str, Any]] = {
    "adam": {},
    "adamw, cosine": {
        "optimizer": lambda p: torch.optim.AdamW(p, lr=0.01),
        "schedule": lambda o: lr_scheduler.CosineAnnealingLR(o, 60),
    },
    "sgd, clip, step": {"optimizer": sgd, "clip_norm": 0.1, "schedule": lambda o: lr_scheduler.StepLR(o, 7)},
    "sgd, one cycle": {"optimizer": sgd, "schedule": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=200)},
    "rmsprop": {"optimizer": lambda p: torch.optim.RMSprop(p, lr=0.001)},
    "adagrad": {"optimizer": lambda p: torch.optim.Adagrad(p, lr=0.01)},
    "bf16": {"autocast": "bf16"},
    "fp16": {"autocast": "fp16"},
    ".item() in the loss": {"loss": item_in_loss},
    "random.random() in the loss": {"loss": host_random},
    "shape by data": {"loss": dynamic},
    "buffer replaced": {"model": Replacing},
    "optimizer counts in Python": {"optimizer": lambda p: Counting(p, lr=0.1, momentum=0.9)},
}


def made(training: Training, device: str, *, graph: bool) -> dict[str, Any]:
    """Train to the end; what was learned, and how long a step took after the first few."""
    trainer = Trainer(training, device=device, graph=graph)
    news: list[str] = []
    losses = []
    began = time.perf_counter()
    since, counted = began, 0
    for done in trainer.steps():
        losses.append(done.loss)
        if trainer.graphs is not None:
            news += trainer.graphs.notes
            trainer.graphs.notes.clear()
        if done.step == _WARM:
            trainer.synchronize()
            since = time.perf_counter()
        counted = done.step - _WARM
        if trainer.evaluation_due:
            break
    trainer.synchronize()
    seconds = time.perf_counter() - since
    return {
        "digest": digest(training.model),
        "losses": losses,
        "step_ms": 1e3 * seconds / max(1, counted),
        "news": news,
        "caveats": list(trainer.nondeterministic_ops.operations),
        "wall_s": time.perf_counter() - began,
    }


def compared(name: str, make: Callable[[], Training], device: str = "cuda") -> dict[str, Any]:
    """Both ways; a row of the table."""
    try:
        code, graph = made(make(), device, graph=False), made(make(), device, graph=True)
    except Exception as error:  # noqa: BLE001 - one row of the table is lost, not the others
        traceback.print_exc()
        return {"name": name, "error": f"{type(error).__name__}: {error}"[:300]}
    finally:
        torch.cuda.empty_cache()
    same = code["digest"] == graph["digest"]
    losses = code["losses"] == graph["losses"]
    row = {
        "name": name,
        "same_weights": same,
        "same_losses": losses,
        "code_step_ms": round(code["step_ms"], 3),
        "graph_step_ms": round(graph["step_ms"], 3),
        "news": graph["news"],
        "caveats": graph["caveats"],
        "wall_s": round(code["wall_s"] + graph["wall_s"], 1),
    }
    told = "equal" if same and losses else "UNEQUAL"
    print(
        f"{name:28} {told:8} code {row['code_step_ms']:8.3f} ms, graph {row['graph_step_ms']:8.3f} ms "
        f"({row['wall_s']} s) {'; '.join(graph['news'])} {graph['caveats'] or ''}",
        flush=True,
    )
    return row


Children = list[tuple[subprocess.Popen[bytes], Path]]


def side_by_side(names: list[str], steps: int, device: str, processes: int, folder: Path) -> Children:
    """Models dealt to processes that run at once: bits do not hang on that, times do and are left out."""
    children = []
    for number in range(min(processes, len(names))):
        out, dealt = folder / f"{number}.json", ",".join(names[number::processes])
        command = [sys.executable, __file__, "--steps", str(steps), "--device", device, "--only", dealt]
        command += ["--out", str(out)]
        children.append((subprocess.Popen(command), out))
    return children


def collected(children: Children) -> Iterator[dict[str, Any]]:
    """What they have found so far, again and again, until they have ended."""
    until, taken = time.monotonic() + _LIMIT_S, [0] * len(children)
    untimed = ("code_step_ms", "graph_step_ms", "wall_s")
    while True:
        are_over = all(child.poll() is not None for child, _ in children) or time.monotonic() > until
        for number, (_, out) in enumerate(children):
            try:
                rows = json.loads(out.read_text(encoding="utf-8"))["results"]
            except (OSError, ValueError):  # not yet, or just being written
                continue
            for row in rows[taken[number] :]:
                yield {key: value for key, value in row.items() if key not in untimed}
            taken[number] = len(rows)
        if are_over:
            break
        time.sleep(0.5)
    for child, _ in children:
        child.kill()


class Results:
    """Rows, written as they come: a run that is cut short leaves what it found."""

    def __init__(self, path: Path, steps: int) -> None:
        self.rows: list[dict[str, Any]] = []
        self._path = path
        self._about = {"schema": 1, "benchmark": "gpu_graphs", **conditions(), "steps": steps}

    def add(self, row: dict[str, Any]) -> None:
        """One more."""
        self.rows.append(row)
        document = {**self._about, "results": self.rows}
        self._path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Every model of the zoo and of the examples, then what can and cannot be recorded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", default="", help="models, by name, divided by commas; 'small': the other cases")
    parser.add_argument("--processes", type=int, default=0, help="so many models at once, without times")
    parser.add_argument("--device", default="cuda", help="cpu: a rehearsal, in which nothing is recorded")
    parser.add_argument("--out", default="", help=f"write JSON here instead of {RESULTS.name}/gpu_graphs.json")
    options = parser.parse_args()
    known: dict[str, Callable[[int], Callable[[], Training]]] = {name: partial(zoo, name) for name in MODELS}
    known |= {name: partial(example, name) for name in EXAMPLES}
    names = options.only.split(",") if options.only else list(known)
    models = [name for name in names if name in known]
    results = Results(Path(options.out) if options.out else RESULTS / "gpu_graphs.json", options.steps)
    with tempfile.TemporaryDirectory() as folder:
        children = side_by_side(models, options.steps, options.device, options.processes, Path(folder))
        for name in models if not options.processes else []:
            results.add(compared(name, known[name](options.steps), options.device))
        if not options.only or "small" in names:
            for name, case in SMALL.items():
                results.add(compared(name, partial(small, options.steps, **case), options.device))
        for row in collected(children):
            results.add(row)
    for name in models:
        if all(row["name"] != name for row in results.rows):
            results.add({"name": name, "error": f"its process did not come to it within {_LIMIT_S:.0f} s"})
    unlike = [row["name"] for row in results.rows if not (row.get("same_weights") and row.get("same_losses"))]
    print(f"{len(results.rows) - len(unlike)} of {len(results.rows)} equal; not: {unlike}", flush=True)


if __name__ == "__main__":
    main()
