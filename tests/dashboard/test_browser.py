"""The dashboard in a real browser: live updates, keyboard navigation, and a console without errors."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from carpool.core.model import JobId, JobSpec
from carpool.core.topology import Cluster
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.service.auth import Principal, Role
from carpool.sim.traces.trace import Arrival
from tests.dashboard.test_federation import played

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

ROOT = Principal("root", Role.ADMIN)


def job(name: str, at: float = 0.0, work: float = 1000.0, **fields: Any) -> Arrival:
    return Arrival(at, JobSpec(JobId(name), work=work, **{"user": "ada", **fields}))


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """The system's Chromium; skips if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("CARPOOL_BROWSER") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium found; install it or set CARPOOL_BROWSER to its path")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: "Browser", open_site: Any) -> Iterator["Page"]:
    """A page whose console must have no errors; closed before the site."""
    errors: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    context.set_default_timeout(20_000)
    opened = context.new_page()
    opened.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: errors.append(str(error)))
    yield opened
    opened.goto("about:blank")
    context.close()
    assert errors == []


def test_submit_follow_and_cancel_a_job(open_site: Any, page: "Page") -> None:
    site = open_site(steps_per_s=50.0)
    page.goto(f"{site.address}/jobs")
    page.get_by_text("No jobs yet").wait_for()
    page.locator("#live[data-state=live]").wait_for()
    listed = ListedJob(JobSpec(JobId("mine"), work=2000.0), Program(entry="train.py:main"))
    site.do(site.service.submit(ROOT, [listed]))
    page.get_by_role("link", name="mine").click()  # appears without a reload
    page.get_by_role("heading", name="mine").wait_for()
    steps = page.locator("[data-panel=head] .figures").get_by_text("of 2,000 steps")
    before = steps.inner_text()
    page.wait_for_function(
        "before => !document.querySelector('[data-panel=head]').innerText.includes(before)", arg=before
    )
    page.locator(".curve[data-name=loss]").wait_for()
    page.locator("pre.log").get_by_text("steps/s").first.wait_for()
    page.locator("summary", has_text="Cancel").click()
    page.get_by_role("button", name="Cancel mine").click()
    page.locator(".phase.is-cancelled").wait_for()
    page.locator(".story").get_by_text("cancelled").wait_for()
    assert page.locator(".actions summary").count() == 0


def test_change_limits_weight_and_policy(open_site: Any, page: "Page") -> None:
    site = open_site([job("long", work=1e6)])
    page.goto(f"{site.address}/jobs/long")
    page.locator("summary", has_text="Devices").click()
    page.get_by_label("At most").fill("2")
    page.get_by_role("button", name="Set devices").click()
    page.locator("[data-panel=head]", has_text="requests 1–2").wait_for()
    page.locator("summary", has_text="Weight").click()
    page.get_by_role("spinbutton", name="Weight").fill("2.5")
    page.get_by_role("button", name="Set weight").click()
    page.locator("[data-panel=head] .figures", has_text="2.5").wait_for()
    page.keyboard.press("4")
    page.wait_for_url("**/decisions")
    page.locator("[data-panel=policy] code", has_text="show").wait_for()
    page.locator("summary", has_text="Change").click()
    page.get_by_label("Policy,").fill("las")
    page.get_by_role("button", name="Change policy").click()
    page.locator("[data-panel=policy] code", has_text="las").wait_for()
    assert site.service.policy == "las"


def test_changes_from_another_client_are_shown(open_site: Any, page: "Page") -> None:
    site = open_site([job("long", work=1e6)])
    page.goto(f"{site.address}/jobs/long")
    page.locator("#live[data-state=live]").wait_for()
    site.do(site.service.pause(ROOT, "long"))
    page.locator("[data-panel=head] .phase.is-paused").wait_for()
    page.locator("summary", has_text="Resume").wait_for()
    site.do(site.service.resume(ROOT, "long"))
    page.locator("[data-panel=head] .phase.is-running").wait_for()


def test_a_thousand_jobs_on_five_hundred_devices(open_site: Any, page: "Page") -> None:
    draw = Random(7)
    arrivals = sorted(
        (
            job(f"run-{n}", draw.uniform(0, 90), draw.uniform(5, 400), devices=draw.choice([1, 1, 2, 4, 8]))
            for n in range(1000)
        ),
        key=lambda each: each.submit_s,
    )
    site = open_site(arrivals, cluster=Cluster.build([(63, 8, "V100")]), report_every_s=30.0)
    page.goto(f"{site.address}/cluster?last=120")
    assert page.locator(".lanes tbody tr[data-id]").count() == 63
    assert page.locator(".lane path").count() > 200
    page.locator(".lanes tbody th a", has_text="n7").first.click()
    page.locator(".lanes tbody th", has_text="n7:0").wait_for()
    assert page.locator(".lanes tbody td.lane").count() == 8
    page.goto(f"{site.address}/jobs")
    assert page.locator("tbody tr").count() == 50
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**page=2")
    page.keyboard.press("/")
    page.keyboard.type("run-99")
    page.locator(".list caption", has_text="of 11").wait_for(state="attached")
    assert "q=run-99" in page.url
    page.locator("th a", has_text="Job").click()
    page.wait_for_url("**sort=name**")
    assert page.locator("tbody tr").first.get_attribute("data-id") == "run-99"


def test_keyboard_navigation(open_site: Any, page: "Page") -> None:
    site = open_site([job("first", 1.0), job("second", 2.0), job("third", 3.0)])
    page.goto(f"{site.address}/cluster")
    page.keyboard.press("2")
    page.wait_for_url("**/jobs")
    for key in "jjk":
        page.keyboard.press(key)
    focused = "document.activeElement.dataset.id"
    assert page.evaluate(focused) == page.locator("tbody tr").first.get_attribute("data-id")
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()
    page.keyboard.press("j")
    name = page.evaluate(focused)
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/jobs/{name}")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("1")
    page.wait_for_url("**/cluster")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("-")
    page.wait_for_url("**last=7200")


def test_dragging_zooms_the_timeline(open_site: Any, page: "Page") -> None:
    site = open_site([job("long", work=1e6)])
    page.goto(f"{site.address}/cluster?last=600")
    box = page.locator(".lane").last.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 5)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 5, steps=4)
    page.mouse.up()
    page.wait_for_url("**from=**")
    table = page.locator(".lanes")
    since, until = (float(table.get_attribute(f"data-{edge}") or 0) for edge in ("since", "until"))
    assert 140 <= until - since <= 160


def test_upload_a_report_file(open_site: Any, page: "Page", tmp_path: Path) -> None:
    result = {"jobs": 3, "finished": 3, "avg_jct_s": 7.0}
    path = tmp_path / "week.json"
    path.write_text(
        json.dumps({"results": [{**result, "policy": "fifo"}, {**result, "policy": "las", "avg_jct_s": 5.0}]})
    )
    site = open_site()
    page.goto(f"{site.address}/compare")
    page.set_input_files("input[type=file]", path)
    page.get_by_role("rowheader", name="las").wait_for()
    assert page.locator("tr", has_text="las").locator(".best").first.inner_text() == "5.00"


def test_a_federation_is_followed_and_its_idle_time_is_red(open_site: Any, page: "Page", tmp_path: Path) -> None:
    lines = played(3)[1].splitlines(keepends=True)
    closings = [number for number, line in enumerate(lines) if '"CloseCycle"' in line]
    journal = tmp_path / "federations" / "mine" / "journal.jsonl"
    journal.parent.mkdir(parents=True)
    journal.write_text("".join(lines[: closings[0] + 1]))
    site = open_site(federations=journal.parent.parent)
    page.goto(f"{site.address}/cluster")
    page.keyboard.press("6")
    page.wait_for_url("**/federations")
    assert page.locator("#cycles tbody tr").count() == 4  # three devices and the axis
    assert page.locator("rect.idle").count() == 2  # of two devices that answered
    red = page.locator("rect.idle").first.evaluate("each => getComputedStyle(each).fill")
    assert red == page.locator("td.bad").first.evaluate("each => getComputedStyle(each).color")
    journal.write_text("".join(lines))
    page.locator("rect.idle").nth(5).wait_for(state="attached")
    page.locator("#tasks td", has_text="3 of 3").first.wait_for()


def test_a_lost_connection_is_shown(open_site: Any, browser: "Browser") -> None:
    context = browser.new_context()
    page = context.new_page()
    site = open_site([job("a")])
    page.goto(f"{site.address}/jobs")
    page.locator("#live[data-state=live]").wait_for()
    site.close()
    page.locator("#live[data-state=lost]").wait_for()
    assert page.locator("tbody tr").count() == 1  # the last state stays
    context.close()
