"""Contrast of colours, and no inline or external code that the content security policy forbids."""

import re
from importlib import resources
from itertools import product

import pytest

from carpool.dashboard.text_format import NUM_COLOURS

FILES = resources.files("carpool.dashboard")
CSS = FILES.joinpath("static", "dashboard.css").read_text(encoding="utf-8")
SCRIPT = FILES.joinpath("static", "dashboard.js").read_text(encoding="utf-8")
TEMPLATES = {
    each.name: each.read_text(encoding="utf-8")
    for folder in (FILES.joinpath("templates"), FILES.joinpath("templates", "panels"))
    for each in folder.iterdir()
    if each.name.endswith(".html")
}
PAIRS = {name: pair for name, *pair in re.findall(r"--([a-z-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", CSS)}


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(
    ("ink", "ground"),
    [
        *product(("ink", "soft", "accent", "running", "waiting", "paused", "failed", "quiet"), ("paper", "panel")),
        ("accent", "accent-wash"),
        ("ink", "accent-wash"),
        ("soft", "accent-wash"),
        ("ink", "sunk"),
        ("soft", "sunk"),
    ],
)
def test_text_has_enough_contrast_in_both_themes(ink: str, ground: str) -> None:
    for theme in (0, 1):
        assert contrast(PAIRS[ink][theme], PAIRS[ground][theme]) >= 4.5


def test_every_job_colour_is_in_the_style_sheet() -> None:
    for place in range(NUM_COLOURS):
        assert re.search(rf"\.c{place} {{ --hue: \d+; }}", CSS)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_templates_have_no_inline_style_script_or_external_url(name: str) -> None:
    text = TEMPLATES[name]
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:|<script(?! src=\"/dashboard/)|https?://", text)
    assert "|safe" not in text
    assert "autoescape false" not in text


def test_style_and_script_load_nothing_external() -> None:
    assert not re.search(r"https?://|@import|url\(", CSS)
    assert not re.search(r"https?://|\beval\(|new Function", SCRIPT)
