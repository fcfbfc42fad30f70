"""Endless trainings for measuring the cost of a step, on a CPU core and (gpu_…) on a data-centre GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import carpool
from carpool.runtime.data.datasets import TensorData


def cnn() -> carpool.Training:
    """Much to compute for each parameter."""
    body = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten()]
    return declared(nn.Sequential(*body, nn.Linear(32 * 49, 10)), (3, 16, 16), 256)


def mlp(batch_size: int = 128) -> carpool.Training:
    """A million parameters."""
    layers = [nn.Linear(256, 896), nn.ReLU(), nn.Linear(896, 896), nn.ReLU(), nn.Linear(896, 10)]
    return declared(nn.Sequential(*layers), (256,), batch_size)


def tiny() -> carpool.Training:
    """Next to nothing to compute: what is left are hooks, whatever memory does to larger steps."""
    return declared(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10)), (8,), 8)


class Walk(nn.Module):
    """Passes on what it gets, after a walk through more memory than the caches hold, as a large model's step is one."""

    def __init__(self) -> None:
        super().__init__()
        self._ground = [torch.zeros(8 << 20)]  # neither parameter nor buffer

    def forward(self, inputs: Tensor) -> Tensor:
        """As it came."""
        self._ground[0].add_(1.0)
        return inputs


def tiny_cold() -> carpool.Training:
    """The same, between whose steps the caches forget all else: what hooks cost beside a step that is not tiny."""
    return declared(nn.Sequential(Walk(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10)), (8,), 8)


def declared(
    model: nn.Module,
    shape: tuple[int, ...],
    batch_size: int,
    optimizer: torch.optim.Optimizer | None = None,
    size: int = 2048,
) -> carpool.Training:
    """A training that never ends."""
    data = TensorData(torch.randn(size, *shape), torch.randint(0, 10, (size,)))
    return carpool.Training(
        model=model,
        optimizer=optimizer or torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        dataset=data,
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        batch_size=batch_size,
        stop=carpool.Stop(steps=10**9),
    )


def mlp_short() -> carpool.Training:
    """The same with a step below 10 ms: what does not shrink with the step shows."""
    return mlp(48)


def mlp_long() -> carpool.Training:
    """The same, with more to compute for each update."""
    return mlp(512)


def norm_cnn() -> carpool.Training:
    """Many small parameters and buffers, and Adam."""
    layers: list[nn.Module] = []
    for number in range(12):
        width = 3 if number == 0 else 16
        layers += [nn.Conv2d(width, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 256, 10))
    return declared(model, (3, 16, 16), 32, torch.optim.Adam(model.parameters(), lr=1e-3))


def gpu_mlp(batch_size: int = 24576) -> carpool.Training:
    """Large products: some 10 ms and more on a data-centre GPU."""
    layers = [nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)]
    return declared(nn.Sequential(*layers), (1024,), batch_size, size=4 * batch_size)


def gpu_mlp_short() -> carpool.Training:
    """The same with a tenth of the samples."""
    return gpu_mlp(2048)


def gpu_transformer() -> carpool.Training:
    """Six layers, Adam: many kernels for each step."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    model = nn.Sequential(encoder, nn.Flatten(), nn.Linear(512 * 64, 10))
    return declared(model, (64, 512), 192, torch.optim.Adam(model.parameters(), lr=1e-4), size=768)


def gpu_cnn() -> carpool.Training:
    """Convolutions with BatchNorm: what deterministic algorithms cost shows here."""
    layers: list[nn.Module] = []
    for number in range(12):
        width = 3 if number == 0 else 128
        layers += [nn.Conv2d(width, 128, 3, padding=1, bias=False), nn.BatchNorm2d(128), nn.ReLU()]
    model = nn.Sequential(*layers, nn.MaxPool2d(8), nn.Flatten(), nn.Linear(128 * 16, 10))
    return declared(model, (3, 32, 32), 256, size=1024)


MODELS: dict[str, tuple[Callable[[], carpool.Training], ...]] = {
    "cpu": (tiny, tiny_cold, cnn, norm_cnn, mlp, mlp_short, mlp_long),
    "cuda": (gpu_mlp, gpu_transformer, gpu_cnn, gpu_mlp_short),
}
