"""Trainings whose co-location is measured: nine of one study, the CNNs of another, and two probes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

SHARES = (100, 50, 40, 25)  # MPS percentages; a process keeps the one it started with


@dataclass(frozen=True, slots=True)
class Task:
    """A model at a batch size."""

    model: str  # in the zoo
    batch: int
    label: str = ""  # what it is called where two tasks train one model
    sizes: Mapping[str, Any] = field(default_factory=dict, compare=False)  # what the model takes
    image: int = 32
    is_fed: bool = False  # its batch comes from pinned host memory at every step, as from a data loader
    per_s: int = 0  # samples that a store delivers (sharing/fed.py); 0: as many as are wanted

    @property
    def name(self) -> str:
        """Such as ``vgg16@128``."""
        return f"{self.label or self.model}@{self.batch}"

    @property
    def host_bytes(self) -> int:
        """Bytes that come over the host link in each step: a picture of floats and a label for each sample."""
        return self.batch * (3 * self.image**2 * 4 + 8) if self.is_fed else 0


def labelled(label: str, batch: int) -> Task:
    """A training by what it is called in the table."""
    if label == "resnet18-imagenet":
        return Task("resnet18", batch, label, {"stem": "imagenet", "classes": 1000}, image=224, is_fed=True)
    if label == "mlp-fed":  # hardly any arithmetic for each byte that comes over PCIe
        return Task("mlp", batch, label, {"image": 224}, image=224, is_fed=True)
    return Task(label, batch)


# All tasks of a wave are resident at once, each at every share; pairs and larger groups are formed within a wave.
_WAVES: tuple[tuple[tuple[str, int], ...], ...] = (
    (
        ("vgg16", 128), ("resnet18", 128), ("mobilenet_v3", 128), ("resnet50", 128), ("shufflenet_v2", 128),
        ("densenet121", 128), ("squeezenet", 128), ("ncf", 1024), ("lstm", 32), ("bert_small", 8), ("gcn", 140),
    ),
    (
        ("vgg16", 512), ("squeezenet", 512), ("resnet50", 256), ("ncf", 16384), ("gcn", 140), ("lstm", 256),
        ("bert_base", 8), ("yolo", 32), ("resnet18-imagenet", 128), ("resnet18", 64), ("mobilenet_v3", 32),
    ),
    (
        ("resnet101", 256), ("mobilenet_v3", 32), ("shufflenet_v2", 32), ("densenet121", 32), ("vgg16", 64),
        ("resnet18", 512), ("bert_base", 32), ("yolo", 8), ("mlp-fed", 256), ("resnet18-imagenet", 32), ("lstm", 32),
    ),
    (
        ("resnet101", 64), ("mobilenet_v3", 512), ("shufflenet_v2", 512), ("resnet50", 64), ("bert_small", 32),
        ("mlp-fed", 64), ("resnet18-imagenet", 128), ("yolo", 32), ("resnet18", 128), ("vgg16", 512), ("ncf", 1024),
    ),
)  # fmt: skip
WAVES: tuple[tuple[Task, ...], ...] = tuple(tuple(labelled(*named) for named in wave) for wave in _WAVES)

# Standard neighbours: what a training does to them and they to it says how it uses memory and arithmetic.
PROBES = (Task("probe-copy", 0), Task("probe-matmul", 0))

Step = Callable[[], Any]


@dataclass(slots=True)
class Built:
    """A training on a device: one step of it, and the pieces that a graph must keep alive."""

    step: Step
    parameters: list[Any]
    keeps: tuple[Any, ...]


def build(task: Task, device: str) -> Built:
    """The task's model, optimizer and one batch, on the device."""
    import torch

    if task.model.startswith("probe"):
        return _probe(task, device)
    from zoo import MODELS
    from zoo_trainings import OPTIMIZERS, RECIPES

    made = RECIPES[task.model]
    model = MODELS[task.model](**task.sizes).to(device)
    batch = _batch(task, device)
    if batch[0].dim() == 4:
        model.to(memory_format=torch.channels_last)
        batch = (batch[0].to(memory_format=torch.channels_last), *batch[1:])
    optimizer = OPTIMIZERS[made.optimizer](model.parameters(), lr=made.lr * 1e-3)  # not to diverge on one batch
    for group in optimizer.param_groups:
        group["capturable"] = device == "cuda"
    staging = [tensor.clone() for tensor in batch] if task.is_fed else []
    host = [tensor.cpu().pin_memory() if device == "cuda" else tensor.clone() for tensor in staging]
    aside = torch.cuda.Stream() if task.is_fed and device == "cuda" else None

    def step() -> Any:
        """One step; the next batch of a fed task comes in while this one is computed, as a data loader would do it."""
        if aside is not None:
            here = torch.cuda.current_stream()
            for tensor, arrived in zip(batch, staging, strict=True):
                tensor.copy_(arrived)
            aside.wait_stream(here)
            with torch.cuda.stream(aside):
                for arrived, source in zip(staging, host, strict=True):
                    arrived.copy_(source, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        loss = made.loss(model, batch)
        (loss[0] / loss[1] if isinstance(loss, tuple) else loss).backward()
        optimizer.step()
        if aside is not None:
            torch.cuda.current_stream().wait_stream(aside)
        return loss

    return Built(step, list(model.parameters()), (model, optimizer, batch, staging, host))


def _batch(task: Task, device: str) -> Any:
    """One batch of made-up data; pictures are plain noise, which costs the same to train on."""
    import torch
    from zoo import made
    from zoo_trainings import RECIPES

    from carpool.runtime.data.batches import to_device

    torch.manual_seed(0)
    data = RECIPES[task.model].data
    if data is made.images:
        pictures = torch.randn(task.batch, 3, task.image, task.image).to(device)
        return pictures, torch.arange(task.batch, device=device) % task.sizes.get("classes", 10)
    halves = data(task.batch, 0)
    return to_device(halves.train.batch(torch.arange(min(task.batch, len(halves.train)))), torch.device(device))


def _probe(task: Task, device: str) -> Built:
    """A neighbour that does one thing: it moves bytes, or it multiplies matrices."""
    import torch

    if task.model == "probe-copy":
        source = torch.zeros(1 << (26 if device == "cuda" else 16), device=device)  # 256 MiB: far beyond the cache
        target = torch.empty_like(source)

        def copy() -> Any:
            return target.copy_(source)

        return Built(copy, [], (source, target))
    size = 4096 if device == "cuda" else 128
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    product = torch.empty_like(left)

    def multiply() -> Any:
        return torch.mm(left, right, out=product)

    return Built(multiply, [], (left, right, product))
