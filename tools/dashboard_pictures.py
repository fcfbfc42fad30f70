"""Take the pictures of the dashboard that the documents show, or serve what is on them.

The jobs only pretend to train (`tests.support.simulated_daemon`), so no device is needed::

    python tools/dashboard_pictures.py                # writes docs/images/dashboard-*.png with Chromium and playwright
    python tools/dashboard_pictures.py --serve 8800   # on http://127.0.0.1:8800 until Ctrl-C; --many for 1,000 jobs
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import uvicorn
from fastapi import FastAPI

from carpool.core.model import JobId, JobSpec, Kind, NodeId, Phase
from carpool.core.topology import Bank, Cluster, Node
from carpool.dashboard.routes import mount
from carpool.policies.registry import parse_policy
from carpool.service.auth import Principal, Role
from carpool.service.service import SchedulerService
from carpool.sim.traces.trace import Arrival

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tests.support.simulated_daemon import DemoWorld, open_simulated_daemon

if TYPE_CHECKING:
    from playwright.async_api import Browser

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
ADA = Principal("ada", Role.ADMIN)
STEPS_PER_S = {"resnet50": 6.2, "vit-b16": 4.1, "gpt2-small": 2.4, "bert-base": 3.3, "unet": 1.7, "mlp-mixer": 5.0}
POLICIES = ("fifo", "las", "srtf", "carpool")


class Scene(NamedTuple):
    """What is going on."""

    jobs: int
    nodes: tuple[tuple[int, int, str], ...]  # how many, devices of each, kind
    widths: tuple[int, ...]
    span_s: float
    policy: str
    report_every_s: float


FEW = Scene(46, ((2, 4, "H100"),), (1, 1, 1, 2), 7200.0, "competitive", 20.0)
MANY = Scene(1000, ((40, 8, "H100"), (23, 8, "A100")), (1, 1, 1, 2, 2, 4, 8), 7200.0, "fifo", 240.0)
NONE = Scene(0, ((2, 4, "H100"),), (1,), 60.0, "carpool", 20.0)


def cluster_of(scene: Scene) -> Cluster:
    """Nodes whose devices have 80 GiB each."""
    nodes: list[Node] = []
    first = 0
    for count, size, kind in scene.nodes:
        for _ in range(count):
            bank = Bank(Kind(kind), range(first, first + size), 80 << 30)
            nodes.append(Node(NodeId(len(nodes)), f"n{len(nodes)}", (bank,)))
            first += size
    return Cluster(tuple(nodes))


def arrivals_of(scene: Scene) -> list[Arrival]:
    """Jobs of a few kinds by a few people, all through the scene's time."""
    draw = Random(4)
    found = []
    for number in range(scene.jobs):
        model = draw.choice(sorted(STEPS_PER_S))
        width = draw.choice(scene.widths)
        spec = JobSpec(
            JobId(f"{model}-{number}"),
            width,
            draw.lognormvariate(7.0, 0.9) * STEPS_PER_S[model],
            model=model,
            user=draw.choice(["ada", "ben", "chen", "dora"]),
            weight=draw.choice([1.0, 1.0, 1.0, 2.0]),
            min_devices=1,
            max_devices=2 * width,
            memory_bytes=draw.choice([8, 16, 24]) << 30,
        )
        found.append(Arrival(draw.uniform(0.0, scene.span_s), spec))
    return sorted(found, key=lambda each: each.submit_s)


@asynccontextmanager
async def serving(scene: Scene, port: int, reports: Path | None = None) -> AsyncIterator[tuple[str, SchedulerService]]:
    """The dashboard over a scene; its address."""
    with tempfile.TemporaryDirectory() as folder:
        room = open_simulated_daemon(
            Path(folder),
            cluster_of(scene),
            parse_policy(scene.policy),
            arrivals_of(scene),
            world=DemoWorld(steps_per_s=STEPS_PER_S),
            live_from=scene.span_s,
            report_every_s=scene.report_every_s,
            name=scene.policy,
        )
        async with room as clerk:
            app = FastAPI(openapi_url=None)
            mount(app, clerk, lambda request: ADA, reports=reports)
            config = uvicorn.Config(
                app, port=port, log_level="warning", timeout_graceful_shutdown=1, lifespan="off", ws="none"
            )
            server = uvicorn.Server(config)
            running = asyncio.create_task(server.serve())
            try:
                yield f"http://127.0.0.1:{port}", clerk
            finally:
                server.should_exit = True
                with suppress(asyncio.CancelledError):
                    await running


def simulate(folder: Path) -> None:
    """A report to compare policies by."""
    trace = folder / "trace.csv"
    run = [sys.executable, "-m", "carpool"]
    made = ["--jobs", "400", "--seed", "5", "--devices", "16", "--load", "0.95", "--lengths", "lognormal"]
    subprocess.run([*run, "trace", "generate", *made, "--sizes", "1:0.6,2:0.25,4:0.15", str(trace)], check=True)
    chosen = [word for policy in POLICIES for word in ("--policy", policy)]
    report = folder / "reports" / "autumn.html"
    report.parent.mkdir()
    subprocess.run(
        [*run, "simulate", "--trace", trace.name, "--cluster", "4x4xV100", *chosen, "--report", str(report)],
        check=True,
        cwd=folder,
    )


async def take(
    browser: Browser, address: str, name: str, *, scheme: str = "dark", size: tuple[int, int] = (1440, 900)
) -> None:
    """One picture."""
    context = await browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if scheme == "dark" else "light"
    )
    page = await context.new_page()
    await page.goto(address)
    await page.wait_for_timeout(1200)
    path = IMAGES / f"dashboard-{name}.png"
    await page.screenshot(path=path)
    await context.close()
    print(f"{path.relative_to(IMAGES.parent.parent)}  {path.stat().st_size / 1000:.0f} kB")


async def take_all(port: int) -> None:
    """Every picture."""
    from playwright.async_api import async_playwright

    found = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder:
        await asyncio.to_thread(simulate, Path(folder))
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
            async with serving(FEW, port, Path(folder) / "reports") as (site, clerk):
                running = clerk.jobs(ADA, phases=[Phase.RUNNING], limit=100).jobs
                longest = max(running, key=lambda job: job.steps if (job.progress or 0.0) < 0.95 else 0.0)
                await take(browser, f"{site}/cluster?last=7200", "cluster")
                await take(browser, f"{site}/cluster?last=7200", "cluster-light", scheme="light")
                await take(browser, f"{site}/jobs/{longest.id}", "job")
                await take(browser, f"{site}/decisions", "decisions", scheme="light")
                await take(browser, f"{site}/compare", "compare")
                await take(browser, f"{site}/cluster?last=7200", "phone", size=(390, 844))
            async with serving(MANY, port + 1) as (site, _):
                await take(browser, f"{site}/cluster?last=7200", "many")
                await take(browser, f"{site}/jobs?sort=ends", "many-jobs", scheme="light")
            await browser.close()


async def serve_for_ever(scene: Scene, port: int) -> None:
    """Until somebody stops it."""
    async with serving(scene, port) as (site, _):
        print(f"{site}  (Ctrl-C ends it)")
        await asyncio.Event().wait()


def main() -> None:
    """Take pictures, or serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", type=int, metavar="PORT", help="serve instead of taking pictures")
    parser.add_argument("--many", action="store_true", help="serve 1,000 jobs on 504 devices")
    parser.add_argument("--none", action="store_true", help="serve no job at all")
    options = parser.parse_args()
    if options.serve:
        with suppress(KeyboardInterrupt):
            asyncio.run(serve_for_ever(MANY if options.many else NONE if options.none else FEW, options.serve))
    else:
        asyncio.run(take_all(8890))


if __name__ == "__main__":
    main()
