"""On a GPU: every model at its full size runs, a captured step equals the plain one, and bits repeat."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo_trainings as trainings
from zoo import MODELS

from carpool.runtime.data.batches import to_device
from carpool.runtime.engine.determinism import reseed
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.state.digest import digest

pytestmark = pytest.mark.gpu

BATCH = {"bert_base": 4, "bert_small": 4, "deepspeech": 4, "transformer": 8, "yolo": 4, "ncf": 256, "gcn": 140}


def small(name: str, **options: Any) -> Any:
    batch_size = BATCH.get(name, 16)
    return trainings.training(name, batch_size, seed=0, samples=2 * batch_size, steps=2, **options)


@pytest.mark.parametrize("name", MODELS)
def test_a_repeated_training_has_the_same_bits(name: str) -> None:
    first, second = (Trainer(small(name), device="cuda") for _ in range(2))
    for trainer in (first, second):
        for _ in trainer.steps():
            pass
    assert first.nondeterministic_ops.operations == []
    assert digest(first.training.model) == digest(second.training.model)


@pytest.mark.parametrize("name", MODELS)
def test_a_pass_can_be_captured(name: str) -> None:
    """Forward and backward without dropout, so that only the capture can differ."""
    training = small(name)
    model = training.model.to("cuda").eval()
    if name in {"lstm", "deepspeech"}:
        for module in model.modules():  # cuDNN computes gradients of recurrent layers in training mode only
            module.training = isinstance(module, torch.nn.RNNBase)
    batch = to_device(training.dataset.batch(torch.arange(training.batch_size)), torch.device("cuda"))

    def one_pass() -> torch.Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        result = training.loss(model, batch)
        loss: torch.Tensor = result[0] / result[1] if isinstance(result, tuple) else result
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        plain = [one_pass().clone() for _ in range(3)][-1]
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = one_pass()
    reseed(0)
    graph.replay()
    torch.cuda.synchronize()
    captured = [p.grad for p in model.parameters() if p.grad is not None]
    if name != "graphsage":  # it draws neighbours even when evaluating
        torch.testing.assert_close(loss, plain, rtol=1e-4, atol=1e-5)
        for one, two in zip(captured, gradients, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
    assert torch.isfinite(loss)
