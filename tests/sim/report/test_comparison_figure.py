"""The still picture is valid, safe and has every policy."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from carpool.sim.report import comparison_svg
from tests.sim.report.samples import empty_run, run

SVG = "{http://www.w3.org/2000/svg}"


def words(svg: str) -> list[str]:
    """Every text of the picture."""
    return [node.text or "" for node in ET.fromstring(svg).iter(f"{SVG}text")]


def test_one_curve_and_one_row_for_each_policy() -> None:
    svg = comparison_svg([run("fifo"), run("sjf", avg_jct_s=50.0)])
    assert len(list(ET.fromstring(svg).iter(f"{SVG}path"))) == 2
    assert {"fifo", "sjf", "avg JCT, s"} <= set(words(svg))


def test_the_best_value_is_bold() -> None:
    svg = comparison_svg([run("fifo"), run("sjf", avg_jct_s=50.0)])
    bold = [node.text for node in ET.fromstring(svg).iter(f"{SVG}text") if node.get("font-weight")]
    assert bold == ["fifo", "sjf", "50.0"]


def test_names_are_escaped_and_shortened() -> None:
    svg = comparison_svg([run("<b>&" + "x" * 60)])
    assert any(text.startswith("<b>&xx") and text.endswith("…") for text in words(svg))


def test_without_finished_jobs_it_says_so() -> None:
    assert "no finished job to draw" in words(comparison_svg([empty_run()]))
    assert "no finished job to draw" in words(comparison_svg([]))
