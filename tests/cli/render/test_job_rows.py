"""Rows and cells of job tables."""

import pytest

from carpool.cli.render.job_rows import short


@pytest.mark.parametrize(
    ("name", "limit", "expected"),
    [
        ("mlp", 8, "mlp"),
        ("resnet-1", 8, "resnet-1"),
        ("resnet-50-warm-12", 8, "resn…-12"),
        ("resnet-50-warm-12", 9, "resn…m-12"),
    ],
)
def test_a_long_name_is_shortened_in_the_middle(name: str, limit: int, expected: str) -> None:
    assert short(name, limit) == expected
    assert len(expected) <= limit
