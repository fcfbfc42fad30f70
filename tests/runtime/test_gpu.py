"""Exact and default mode, CUDA graphs and mirrors on a GPU."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from carpool.runtime.data.batches import GatherBuffer
from carpool.runtime.data.datasets import synthetic
from carpool.runtime.data.tensor_rows import DeviceRows, TensorRows
from carpool.runtime.engine.determinism import seed_entry
from carpool.runtime.engine.forward_backward import Contributions
from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.engine.training import Training
from carpool.runtime.graphs.capture import CudaGraphCapture
from carpool.runtime.memory.swap_client import SwapClient
from carpool.runtime.process.protocol import Message, Published
from carpool.runtime.process.shared_memory import new_memory_file
from carpool.runtime.reduce.shm_layout import ShmLayout
from carpool.runtime.reduce.shm_reducer import ShmReducer, contribution_bytes
from carpool.runtime.state.checkpoint import load, save
from carpool.runtime.state.digest import digest
from carpool.runtime.state.mirror import MirrorWriter, read_mirror
from carpool.testing import plain_loop
from tests.runtime.fake_capture import REPLAYED
from tests.support.outsider_trainings import gan, gan_step

pytestmark = pytest.mark.gpu

CASES: dict[str, dict[str, Any]] = {
    "adam": {},
    "sgd, clip, cosine": {
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "schedule": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
        "clip_norm": 0.1,
    },
    "bf16": {"autocast": "bf16"},
    "fp16": {"autocast": "fp16"},
}


def mean_loss(model: nn.Module, batch: Any) -> Any:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def convolutional(**changes: Any) -> Training:
    seed_entry(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.2),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip
    optimizer = changes.pop("optimizer", lambda p: torch.optim.Adam(p, lr=0.01))(model.parameters())
    if "schedule" in changes:
        changes["schedule"] = changes["schedule"](optimizer)
    options: dict[str, Any] = {"loss": mean_loss, "stop": Stop(epochs=2)}
    data = synthetic((3, 16, 16), size=100).train
    return Training(model=model, optimizer=optimizer, dataset=data, batch_size=36, **options | changes)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_owners_and_the_plain_loop_agree(case: dict[str, Any]) -> None:
    plain = plain_loop(convolutional(**case), shards=8, device="cuda")
    for cuts in ((0, 8), (0, 3, 4, 8), (0, 1, 8)):
        trainer = Trainer(convolutional(**case), exact=True, device="cuda")
        losses = []
        while not trainer.stop_reason:
            step = trainer.next_step()
            gathered: Contributions = []
            for start, stop in itertools.pairwise(cuts):
                gathered += trainer.contribute(step, range(start, stop))
            total = trainer.combine(step, gathered)
            losses.append(trainer.advance(step, trainer.apply(step, total)).loss)
        assert (digest(trainer.training.model), losses) == (plain.digest, plain.losses)
        assert trainer.nondeterministic_ops.operations == []


def test_ranks_that_reduce_in_host_memory_equal_one_process() -> None:
    plain = plain_loop(convolutional(stop=Stop(steps=9)), shards=8, device="cuda")
    trainers = [Trainer(convolutional(stop=Stop(steps=9)), exact=True, device="cuda") for _ in range(2)]
    slots = ShmLayout(((0, 3), (3, 8)), contribution_bytes(trainers[0].layout))
    fd = new_memory_file("test", slots.num_bytes)
    segments = [ShmReducer(fd, slots, trainer.layout) for trainer in trainers]
    while not trainers[0].stop_reason:  # its pages are registered on the way
        for segment, trainer, owned in zip(segments, trainers, slots.owners, strict=True):
            segment.write(trainer.next_step(), trainer.contribute(trainer.next_step(), range(*owned)))
        for segment, trainer in zip(segments, trainers, strict=True):
            step = trainer.next_step()
            trainer.advance(step, trainer.apply(step, segment.total(step)))
    os.close(fd)
    assert [digest(trainer.training.model) for trainer in trainers] == [plain.digest] * 2


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_default_mode_and_resuming(case: dict[str, Any], tmp_path: Any) -> None:
    plain = plain_loop(convolutional(**case), device="cuda")
    first = Trainer(convolutional(**case), device="cuda")
    losses = [first.step().loss for _ in range(2)]
    save(tmp_path / "a.ckpt", first.state_dict())
    second = Trainer(convolutional(**case), device="cuda")
    second.load_state_dict(load(tmp_path / "a.ckpt"))
    losses += [done.loss for done in second.steps()]
    assert (digest(second.training.model), losses) == (plain.digest, plain.losses)


@pytest.mark.parametrize("case", [CASES[name] for name in CASES if name != "fp16"])
def test_graphs_train_the_same(case: dict[str, Any]) -> None:
    """Three batches per epoch, the last one partial, so that each shape is verified and then replayed."""
    stop = Stop(steps=30)
    code = Trainer(convolutional(**case, stop=stop), device="cuda", graph=False)
    graph = Trainer(convolutional(**case, stop=stop), device="cuda")
    for trainer in (code, graph):
        assert len(list(trainer.steps())) == 30
    assert code.progress.last_loss == graph.progress.last_loss, "eager steps report theirs one step late"
    assert digest(code.training.model) == digest(graph.training.model)
    assert graph.graphs is not None
    assert graph.graphs.notes == [REPLAYED]


def test_a_failed_capture_changes_nothing() -> None:
    def looks(model: nn.Module, batch: Any) -> Any:
        loss = mean_loss(model, batch)
        assert loss.item() > 0
        return loss

    code = Trainer(convolutional(loss=looks), device="cuda", graph=False)
    graph = Trainer(convolutional(loss=looks), device="cuda")
    assert len(list(code.steps())) == len(list(graph.steps()))
    assert code.progress.last_loss == graph.progress.last_loss
    assert digest(code.training.model) == digest(graph.training.model)
    assert graph.graphs is not None
    assert "capturing" in graph.graphs.eager_reason
    after = Trainer(convolutional(), device="cuda")  # neither the allocator nor the generator is left in disorder
    assert [done.loss for done in after.steps()] == plain_loop(convolutional(), device="cuda").losses


def test_a_checkpoint_moves_between_gpu_and_cpu(tmp_path: Any) -> None:
    trainer = Trainer(convolutional(), device="cuda")
    trainer.step()
    save(tmp_path / "a.ckpt", trainer.state_dict())
    here = Trainer(convolutional(), device="cpu")
    here.load_state_dict(load(tmp_path / "a.ckpt"))
    assert digest(here.training.model) == digest(trainer.training.model)
    here.step()
    save(tmp_path / "b.ckpt", here.state_dict())
    trainer.load_state_dict(load(tmp_path / "b.ckpt"))
    trainer.step()


def test_branches_of_a_graph_are_detected() -> None:
    device = torch.device("cuda", 0)
    recorder, value = CudaGraphCapture(device), torch.zeros(4, device=device)
    other = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def beside() -> None:
        here = torch.cuda.current_stream(device)
        other.wait_stream(here)
        with torch.cuda.stream(other):
            value.mul_(2.0)
        value.clone()
        here.wait_stream(other)

    kept = [recorder.capture(lambda: value.add_(1.0).mul_(3.0))]  # torch drops a pool with its last graph
    found = [recorder.has_branches]
    kept.append(replay := recorder.capture(beside))
    assert [*found, recorder.has_branches] == [False, True]
    value.fill_(1.0)
    replay()
    assert value.tolist() == [2.0] * 4
    replay.head()
    assert value.tolist() == [2.0] * 4, "the whole of it must not stand queued"


def test_a_graph_is_split_at_its_first_fork() -> None:
    device = torch.device("cuda", 0)
    recorder, value, drawn = CudaGraphCapture(device), torch.ones(4, device=device), torch.zeros(4, device=device)
    other = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def work() -> None:
        value.add_(1.0)
        value.mul_(3.0)
        here = torch.cuda.current_stream(device)
        other.wait_stream(here)
        with torch.cuda.stream(other):
            value.add_(0.5)
        drawn.uniform_()
        here.wait_stream(other)
        value.add_(drawn)

    replay = recorder.capture(work, starts_step=True)
    found = []
    for _ in range(2):
        torch.manual_seed(7)
        value.fill_(1.0)
        replay.head()
        assert value.tolist() == [6.0] * 4, "the chain before the fork"
        replay.tail()
        found.append(value.tolist())
    torch.manual_seed(7)
    drawn.uniform_()
    assert found == [(drawn + 6.5).tolist()] * 2


def test_rows_are_gathered_by_an_index_on_the_host() -> None:
    rows = torch.arange(10.0, device="cuda").view(5, 2)
    gathering = GatherBuffer(DeviceRows(TensorRows((rows,)), rows.device), 2)
    recorder = CudaGraphCapture(torch.device("cuda", 0))
    gathering.gather()
    replay = recorder.capture(gathering.gather)
    for chosen in ([3, 1], [0, 4]):
        gathering.set_samples(np.array(chosen))
        replay()
        torch.cuda.synchronize()
        assert torch.equal(gathering.batch[0], rows[chosen])


def test_adaptive_pooling_is_named() -> None:
    pool = nn.AdaptiveAvgPool2d(2)

    def pooled(model: nn.Module, batch: Any) -> Any:
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) + pool(next(model.parameters())).mean()

    trainer = Trainer(convolutional(loss=pooled), device="cuda")
    trainer.step()
    assert trainer.nondeterministic_ops.operations == ["adaptive_avg_pool2d_backward_cuda"]


def test_a_mirror_is_written_during_replayed_steps() -> None:
    sent: list[Message] = []
    sgd = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "channels_last": True}
    one, other = (Trainer(convolutional(**sgd, stop=Stop(epochs=8)), device="cuda") for _ in range(2))
    writer, fd = MirrorWriter(one, SwapClient(None, sent.append), sent.append), new_memory_file("test")
    for _ in range(9):
        one.step()
    writer.publish(fd)
    for _ in range(9):
        one.step()
    writer.finish()
    assert sent == [Published(9)]
    other.load_state_dict(read_mirror(fd)[1])
    for parameter, state in other.training.whole_optimizer.state.items():
        assert state["momentum_buffer"].stride() == parameter.stride()
    for _ in range(9):
        other.step()
    assert digest(other.training.model) == digest(one.training.model)


def adversarial(step: Any = gan_step) -> Training:
    """Full and partial batches, each verified and then replayed."""
    seed_entry(0)
    return replace(gan(), step=step, stop=Stop(steps=40))


def test_graphs_of_step_functions_train_the_same() -> None:
    code, graph = (Trainer(adversarial(), device="cuda", graph=graph) for graph in (False, True))
    for trainer in (code, graph):
        assert len(list(trainer.steps())) == 40
    assert digest(code.training.model) == digest(graph.training.model)
    assert code.progress.last_loss == graph.progress.last_loss
    assert graph.take_notes() == [REPLAYED]


def test_a_step_function_that_waits_for_the_device_runs_eagerly() -> None:
    def looks(net: Any, batch: Any, optimizers: Any) -> Any:
        loss = gan_step(net, batch, optimizers)
        if loss[0].item() > 1e9:
            raise ValueError(loss)
        return loss

    code, graph = (Trainer(adversarial(looks), device="cuda", graph=graph) for graph in (False, True))
    for trainer in (code, graph):
        assert len(list(trainer.steps())) == 40
    assert digest(code.training.model) == digest(graph.training.model)
    assert graph.function_graph is not None
    assert "capturing" in graph.function_graph.eager_reason
