"""The parts that torch has too, or that can be worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zoo.blocks import Grid, scaled, twice
from zoo.boxes import _overlap, detection_loss
from zoo.ctc import ctc_loss
from zoo.graphs import FastGCN, Graph, GraphSAGE
from zoo.shufflenet import Unit
from zoo.yolo import ANCHORS


def test_ctc_equals_torch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 17, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(1, 6, (5, 7))
    labels[0, :4] = torch.tensor([2, 2, 3, 3])  # repeats need a blank between them
    lengths = torch.tensor([4, 7, 1, 0, 5])
    ours = ctc_loss(logits.log_softmax(-1), labels, lengths)
    frames = torch.full((5,), 17)
    theirs = nn.functional.ctc_loss(logits.log_softmax(-1).transpose(0, 1), labels, frames, lengths, reduction="none")
    torch.testing.assert_close(ours, theirs)
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    for one, two in zip(*(torch.autograd.grad((loss * weights).sum(), logits) for loss in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("sides", [(1, 1), (7, 7), (14, 21), (4, 5)])
def test_grid_equals_adaptive_pooling(sides: tuple[int, int]) -> None:
    images = torch.randn(2, 3, *sides)
    torch.testing.assert_close(Grid(7)(images), nn.functional.adaptive_avg_pool2d(images, 7))


def test_twice_is_nearest_upsampling() -> None:
    images = torch.randn(2, 3, 4, 5)
    assert torch.equal(twice(images), nn.functional.interpolate(images, scale_factor=2, mode="nearest"))


def test_halves_are_shuffled_channel_by_channel() -> None:
    unit = Unit(4, 4, 1)
    unit.deep = nn.Sequential()  # both halves as they come
    images = torch.arange(4.0).view(1, 4, 1, 1)
    assert unit(images).flatten().tolist() == [0.0, 2.0, 1.0, 3.0]


def test_scaled_never_loses_much() -> None:
    assert [scaled(channels, 1.0) for channels in (8, 24, 64, 4096)] == [8, 24, 64, 4096]
    assert all(scaled(c, w) >= 0.9 * c * w and scaled(c, w) % 8 == 0 for c in (16, 40, 112) for w in (0.1, 0.5, 0.75))


def test_overlap_by_hand() -> None:
    def box(*numbers: float) -> tuple[torch.Tensor, ...]:
        return tuple(torch.tensor([number]) for number in numbers)

    equal = _overlap(box(0.5, 0.5, 0.2, 0.4), box(0.5, 0.5, 0.2, 0.4))
    assert equal.item() == pytest.approx(1.0, abs=1e-5)
    apart = _overlap(box(0.5, 0.5, 1.0, 1.0), box(3.5, 0.5, 1.0, 1.0))  # hull 4, union 2
    assert apart.item() == pytest.approx(-0.5)
    half = _overlap(box(0.5, 0.5, 1.0, 1.0), box(1.0, 0.5, 1.0, 1.0))
    assert half.item() == pytest.approx(1 / 3)


def empty_grids(count: int, classes: int) -> list[torch.Tensor]:
    return [torch.full((count, 3, side, side, 5 + classes), -9.0) for side in (8, 4, 2)]


def test_a_box_told_right_costs_little_and_rows_that_fill_up_cost_nothing() -> None:
    width, height = (side / 640.0 for side in ANCHORS[0][0])
    real = [1.0, 0.5625, 0.4375, width, height]  # middle of cell (row 3, column 4) of the finest grid
    fill = [-1.0, 0.5, 0.5, 0.5, 0.5]
    grids = empty_grids(1, 2)
    lost = detection_loss(grids, torch.tensor([[real, fill]]))
    assert detection_loss(grids, torch.tensor([[fill, real]])) == lost
    assert detection_loss(grids, torch.tensor([[fill, fill]])) < 1e-2 < lost
    found = empty_grids(1, 2)
    # σ(0) = ½: the middle of the cell and the anchor's own size; sure that it is there, and of class 1.
    found[0][0, :, 3, 4] = torch.tensor([0.0, 0.0, 0.0, 0.0, 9.0, -9.0, 9.0])
    assert detection_loss(found, torch.tensor([[real, fill]])) < 0.5 * lost


def test_pictures_count_alike_however_many_boxes_they_have() -> None:
    torch.manual_seed(0)
    grids = [torch.randn(2, 3, side, side, 7) for side in (8, 4, 2)]
    boxes = torch.tensor(
        [[[0, 0.3, 0.3, 0.05, 0.05], [1, 0.6, 0.6, 0.3, 0.2]], [[1, 0.5, 0.5, 0.1, 0.2], [-1, 0, 0, 0, 0]]]
    )
    together = detection_loss(grids, boxes)
    apart = [detection_loss([grid[i : i + 1] for grid in grids], boxes[i : i + 1]) for i in range(2)]
    torch.testing.assert_close(together, torch.stack(apart).mean())


def chain() -> Graph:
    """0 – 1 – 2."""
    return Graph.of(torch.eye(3), torch.tensor([[0, 1], [1, 2]]), most=3)


def test_a_graph_is_normalised_from_both_sides() -> None:
    root = 6**-0.5
    torch.testing.assert_close(chain().weights, torch.tensor([[1 / 2, root, 0], [root, 1 / 3, root], [0, root, 1 / 2]]))
    assert chain().degree.tolist() == [2, 3, 2]


def test_drawn_neighbours_are_neighbours() -> None:
    model = GraphSAGE(3, 4, 2, 0.0, (50, 50))
    drawn = model._draw(chain(), torch.tensor([0, 1, 2]), 50)
    assert [sorted(set(row)) for row in drawn.tolist()] == [[0, 1], [0, 1, 2], [1, 2]]


def test_drawing_a_layer_is_right_on_average() -> None:
    torch.manual_seed(0)
    model = FastGCN(3, 4, 2, 0.0, 5000)
    nodes = torch.tensor([0, 2])
    drawn, whole = model(chain(), nodes), model.eval()(chain(), nodes)
    torch.testing.assert_close(drawn, whole, rtol=0.05, atol=0.02)
