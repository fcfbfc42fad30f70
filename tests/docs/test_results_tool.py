"""`make results`: figures are written into pages as measured, and every script and result file is known."""

from __future__ import annotations

import pytest
from tools.results import KINDS, like, main, with_figures

from tests.docs.figures import RESULTS, ROOT


@pytest.mark.parametrize(
    ("shown", "value", "expected"),
    [
        ("12.3", 4.56, "4.6"),
        ("12,164", 9124.4, "9,124"),
        ("+2.1", 0.04, "+0.0"),
        ("−4.0", -13.15, "−13.2"),
        ("7", 7.6, "8"),
    ],
)
def test_a_figure_keeps_digits_separators_and_sign(shown: str, value: float, expected: str) -> None:
    assert like(shown, value) == expected


def test_only_numbers_that_differ_change_and_only_in_their_section() -> None:
    text = "# A\n\nruns in 3 s and\n2.0 times\n\n# B\n\nruns in 3 s and 2.0 times\n"
    assert with_figures(text, ("p.md#B", "in {} s and {} times", [4.0, 2.04])) == text.replace(
        "3 s and 2.0", "4 s and 2.0"
    )
    assert with_figures(text, ("p.md", "in {} s and {} times", [3.2, None])) == text
    assert with_figures(text, ("p.md", "in {} s and {} times", [3.2, 2.5])) == text.replace("\n2.0", "\n2.5")


def test_the_pages_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["update", "--check"]) == 0, capsys.readouterr().out


def test_listed_scripts_exist() -> None:
    scripts = [each.command.split()[0] for group in KINDS.values() for each in group]
    assert [script for script in scripts if not (ROOT / "benchmarks" / script).is_file()] == []
    assert all((RESULTS / f"{name}.json").is_file() for name in ("policies", "runtime_exact"))
