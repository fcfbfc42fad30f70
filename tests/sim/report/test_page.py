"""The page is whole, safe, self-contained and honest about what it lacks."""

from __future__ import annotations

import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from carpool.core.errors import InputError
from carpool.sim.report import RunRecord, render, write_page
from carpool.sim.report.comparison_table import MEASURES, headline, winners
from carpool.sim.report.recording import Recording
from tests.sim.report.samples import empty_run, head, run, summary

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


class Outline(HTMLParser):
    """Tags with their attributes, and the text of each script."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._raw = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the tag."""
        self.tags.append((tag, dict(attrs)))
        self._raw = tag if tag in ("script", "style") else ""
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        """Leave a script or style."""
        self._raw = ""

    def handle_data(self, data: str) -> None:
        """Collect scripts and visible text apart."""
        if self._raw == "script":
            self.scripts[-1] += data
        elif not self._raw:
            self.text += data


def outline(html: str) -> Outline:
    """The page as a parser sees it."""
    found = Outline()
    found.feed(html)
    return found


def data_of(html: str) -> Any:
    """The JSON inside the page."""
    return json.loads(outline(html).scripts[0])


def test_the_same_runs_give_the_same_bytes() -> None:
    assert render("t", head(), [run()]) == render("t", head(), [run()])


def test_the_header_tells_what_all_runs_have_in_common() -> None:
    text = outline(render("A title", head(), [run()])).text
    for words in ("A title", "sample.csv", "2x4xV100", "1 × no GPU", "0.1.0", "seed"):
        assert words in text


def test_the_page_loads_nothing() -> None:
    html = render("t", head(), [run()])
    found = outline(html)
    assert set(re.findall(r"https?://[^\s\"'<)]+", html)) <= {"http://www.w3.org/2000/svg"}
    assert not [attrs for tag, attrs in found.tags if tag in ("link", "img", "iframe") or "src" in attrs]
    assert not re.search(r"@import|url\(", html)
    policy = next(attrs["content"] for _, attrs in found.tags if "http-equiv" in attrs)
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_no_name_can_become_markup() -> None:
    made = Recording(8)
    job = made.submitted(EVIL, 0.0, 1)
    made.held(job, 0, 1, 0.0, 5.0)
    made.ended(job, 5.0, 5.0)
    made.mark(1.0, EVIL)
    record = RunRecord(EVIL, summary(EVIL), made)
    html = render(EVIL, head(trace=EVIL), [record])
    found = outline(html)
    assert len(found.scripts) == 2
    assert not [tag for tag, _ in found.tags if tag == "img"]
    assert not [name for _, attrs in found.tags for name in attrs if name.startswith("on")]
    assert data_of(html)["runs"][0]["policy"] == EVIL
    assert EVIL in found.text


def test_placeholders_in_names_stay_as_they_are() -> None:
    assert data_of(render("$data", head(trace="$script ${style}"), [run("$title")]))["trace"] == "$script ${style}"


def test_the_table_marks_the_best_and_nothing_when_all_are_alike() -> None:
    runs = [run("fifo", avg_jct_s=200.0), run("srtf", avg_jct_s=100.0, utilisation=0.7)]
    won = {measure.key: winners(runs, measure) for measure in MEASURES}
    assert won["avg_jct_s"] == [False, True]
    assert won["utilisation"] == [False, True]
    assert won["makespan_s"] == [False, False]


def test_a_run_that_finished_fewer_jobs_cannot_win() -> None:
    runs = [run("fifo", avg_jct_s=200.0), run("quitter", avg_jct_s=1.0, finished=1), run("sjf", avg_jct_s=150.0)]
    measure = next(one for one in MEASURES if one.key == "avg_jct_s")
    assert winners(runs, measure) == [False, False, True]
    assert "sjf" in headline(runs)
    assert "finished the most jobs" in headline(runs)


def test_the_headline_is_a_plain_sentence() -> None:
    runs = [run("fifo", avg_jct_s=7200.0), run("carpool", avg_jct_s=3600.0)]
    assert headline(runs) == "Lowest average completion time: 60.0 min with carpool, 50 % below fifo (2.00 h)."


def test_an_empty_run_is_said_not_shown_as_nan() -> None:
    html = render("t", head(), [empty_run("fifo"), empty_run("sjf")])
    found = outline(html)
    assert "No job finished in any run" in found.text
    assert "nan" not in found.text.lower()
    assert "NaN" not in outline(html).scripts[0]
    assert data_of(html)["runs"][0]["summary"]["avg_jct_s"] is None


def test_no_runs_at_all_still_make_a_page() -> None:
    assert data_of(render("t", head(), []))["runs"] == []


def test_the_page_says_what_was_thinned() -> None:
    assert "every allocation is drawn" in render("t", head(), [run()])
    record = run("fifo", 3_000)
    record.recording.holdings.coarsen(100)
    assert "the 2,900 shortest of 3,000 device holdings" in render("t", head(), [record])


def large_run(policy: str, num_jobs: int) -> RunRecord:
    """Jobs of random times, sizes and places; a third of them preempted once."""
    chance, made, at = random.Random(policy), Recording(512), 0.0
    for place in range(num_jobs):
        at += chance.expovariate(1 / 90)
        width = chance.choice((1, 1, 2, 4, 8, 16))
        job = made.submitted(f"application_{place:07d}", at, width)
        start = at
        for _ in range(1 + place % 3 // 2):
            start += chance.expovariate(1 / 2000)
            first, took = chance.randrange(512 - width), chance.expovariate(1 / 5000)
            made.held(job, first, first + width, start, start + took)
            start += took
        made.ended(job, start, 100.0)
        made.sample(at, chance.randrange(300), chance.randrange(512))
    return RunRecord(policy, summary(policy), made)


def test_twenty_thousand_jobs_under_three_policies_stay_small() -> None:
    runs = [large_run(policy, 20_000) for policy in ("fifo", "sjf", "srtf")]
    assert len(render("t", head(64, 8), runs).encode()) < 6_000_000


def test_the_page_is_written_whole(tmp_path: Path) -> None:
    target = tmp_path / "out.html"
    target.write_text("old")
    write_page(target, "new é")
    assert target.read_text(encoding="utf-8") == "new é"
    assert list(tmp_path.iterdir()) == [target]


def test_a_failed_write_leaves_the_old_page(tmp_path: Path) -> None:
    target = tmp_path / "out.html"
    target.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_page(target, "half a page \ud800")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"does not exist\. Create it"):
        write_page(tmp_path / "no" / "out.html", "x")
    with pytest.raises(InputError, match="is a folder"):
        write_page(tmp_path, "x")
