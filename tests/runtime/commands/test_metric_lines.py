"""Metrics in a program's output: which lines count, in any pieces, within limits."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.runtime.commands.metric_lines import MAX_METRICS, MetricLines, MetricRow


def rows(*lines: str) -> list[MetricRow]:
    return MetricLines().feed("".join(f"{line}\n" for line in lines).encode())


@pytest.mark.parametrize(
    ("line", "row"),
    [
        ('{"step": 10, "val_acc": 0.8}', MetricRow(10, {"val_acc": 0.8})),
        ('  {"epoch": 3, "loss": 1, "name": "x", "ok": true, "time": 9.5}', MetricRow(3, {"loss": 1.0})),
        ('{"global_step": 5.0, "epoch": 1, "loss": 2}', MetricRow(5, {"epoch": 1.0, "loss": 2.0})),
        (
            "{'loss': 0.5, 'learning_rate': 1e-05, 'epoch': 0.5}",
            MetricRow(1, {"loss": 0.5, "learning_rate": 1e-05, "epoch": 0.5}),
        ),
        ('{"step": 10, "loss": "0.5", "name": "1e5x"}', MetricRow(10, {"loss": 0.5})),
        (
            "  6%|6 | 7/125 [00:01<00:15]\r  6%|6 | 8/125 [00:01<00:15,  7.5it/s]{'loss': '0.69', 'epoch': '2'}",
            MetricRow(2, {"loss": 0.69}),
        ),
    ],
)
def test_lines_with_metrics(line: str, row: MetricRow) -> None:
    assert rows(line) == [row]


@pytest.mark.parametrize(
    "line",
    [
        "step 10 loss 0.5",
        '{"pid": 4}',
        '{"step": 10}',
        '{"step": 10, "loss": NaN}',
        '{"step": 10, "loss": 1e999}',
        '{"step": 10, "loss": "nan"}',
        '{"step": 10, "loss": "1_0"}',
        'config {"step": 10, "loss": 0.5}',
        '{"step": 10, "loss": 0.5',
        "[1, 2]",
        "{'a': __import__('os')}",
        '{"step": 1, "x": ' + "[" * 5000 + "}",
        '{"step": 1, "x": 1, "y": "' + "z" * 10_000 + '"}',
    ],
)
def test_lines_without_metrics(line: str) -> None:
    assert rows(line, '{"step": 1, "ok": 1}') == [MetricRow(1, {"ok": 1.0})]


def test_large_numbers_and_many_names_are_bounded() -> None:
    assert rows(json.dumps({"step": 10**400, "a": 10**400, "b": 1})) == []
    (row,) = rows(json.dumps({"step": 1, **{f"m{n}": n for n in range(200)}, "k\x1b" * 200: 1}))
    assert len(row.metrics) == MAX_METRICS


@given(st.binary(max_size=200), st.integers(1, 50))
def test_pieces_give_what_the_whole_gives(noise: bytes, size: int) -> None:
    content = noise + b'\n{"step": 1, "a": 2}\n' + noise + b'\n{"step": 2, "a": 3}\n'
    lines = MetricLines()
    found = [row for at in range(0, len(content), size) for row in lines.feed(content[at : at + size])]
    assert found == MetricLines().feed(content)
    assert MetricRow(2, {"a": 3.0}) in found
