"""Cells of tables about jobs."""

import pytest

from carpool.cli.render.job_rows import short


@pytest.mark.parametrize(
    ("name", "most", "shown"),
    [
        ("mlp", 8, "mlp"),
        ("resnet-1", 8, "resnet-1"),
        ("resnet-50-warm-12", 8, "resn…-12"),
        ("resnet-50-warm-12", 9, "resn…m-12"),
    ],
)
def test_a_long_name_keeps_its_beginning_and_its_end(name: str, most: int, shown: str) -> None:
    assert short(name, most) == shown
    assert len(shown) <= most
