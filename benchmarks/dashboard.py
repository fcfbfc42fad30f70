"""Measures how long the dashboard's pages take, and how long they block the daemon, at up to 10,000 jobs.

Every page is requested `--times` times in process on the daemon's loop. `p50` and `p99` are the whole answer; `stall`
is the longest time in which nothing else ran on the loop; `panel` rows are what an open page requests again, with
their size.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import httpx
from fastapi import FastAPI
from measured import save

from carpool.core.model import JobId, JobSpec
from carpool.core.topology import Cluster
from carpool.dashboard.pages import PAGES
from carpool.dashboard.routes import mount
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.service.auth import Principal, Role
from carpool.service.service import SchedulerService
from carpool.sim.traces.trace import Arrival
from tests.support.simulated_daemon import open_simulated_daemon

NOW = 3600.0
SIZES = ((40, 1, 8), (1_000, 63, 8), (10_000, 63, 8))  # jobs, nodes, devices of each
EXTRA = (("/jobs?sort=ends", "jobs, sorted by a column"), ("/cluster?node=n1", "cluster, one node"))


class Watch:
    """Wakes as often as it can and keeps the longest time in which it could not."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def run(self) -> None:
        """Until it is cancelled."""
        before = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            self.longest_s = max(self.longest_s, now - before)
            before = now


def arrivals(jobs: int, devices: int) -> list[Arrival]:
    """So much work that about a quarter is over after an hour, and the devices are full."""
    draw = Random(1)
    mean_s = 4 * NOW * devices / jobs / 2.6
    return sorted(
        (
            Arrival(
                draw.uniform(0.0, 0.95 * NOW),
                JobSpec(
                    JobId(f"job-{number}"),
                    draw.choice([1, 1, 2, 4, 5]),
                    draw.expovariate(1 / mean_s) + 1.0,
                    user=f"user-{number % 20}",
                ),
            )
            for number in range(jobs)
        ),
        key=lambda each: each.submit_s,
    )


async def measure(client: httpx.AsyncClient, path: str, times: int) -> dict[str, Any]:
    """One page, several times."""
    await client.get(path)  # templates are compiled at their first use
    took, size = [], 0
    watch = Watch()
    watching = asyncio.create_task(watch.run())
    for _ in range(times):
        await asyncio.sleep(0)
        started = time.perf_counter()
        answer = await client.get(path)
        took.append(time.perf_counter() - started)
        answer.raise_for_status()
        size = len(answer.content)
    watching.cancel()
    took.sort()
    return {
        "path": path,
        "bytes": size,
        "p50_ms": round(1000 * took[len(took) // 2], 1),
        "p99_ms": round(1000 * took[-1 - len(took) // 100], 1),
        "stall_ms": round(1000 * watch.longest_s, 1),
    }


async def walk(clerk: SchedulerService, times: int, row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Every page, every panel of it, and two that are harder than usual."""
    app = FastAPI(openapi_url=None)
    mount(app, clerk, lambda request: Principal("root", Role.ADMIN))
    newest = clerk.jobs(Principal("root", Role.ADMIN), limit=1).jobs[0].id
    paths = []
    for page in PAGES:
        path = page.path.replace("{job}", newest)
        paths += [
            (path, page.name),
            *((f"{path}?panel={panel}", f"{page.name}: panel {panel}") for panel in page.panels),
        ]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://carpool") as client:
        for path, name in [*paths, *EXTRA]:
            found = {**row, "page": name, **await measure(client, path, times)}
            rows.append(found)
            print(
                f"{found['jobs']:>6} jobs {found['devices']:>4} devices  {name:<28}{found['bytes'] / 1000:>8.1f} kB"
                f"{found['p50_ms']:>9.1f}{found['p99_ms']:>9.1f}{found['stall_ms']:>9.1f} ms",
                flush=True,
            )
            save("dashboard", rows)


async def main() -> None:
    """Every size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--most", type=int, default=10_000, metavar="JOBS", help="leave out what has more jobs")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{'':<53}{'size':>11}{'p50':>9}{'p99':>9}{'stall':>9}")
    for jobs, nodes, size in SIZES:
        if jobs > options.most:
            continue
        with tempfile.TemporaryDirectory() as folder:
            cluster = Cluster.build([(nodes, size, "V100")])
            came = arrivals(jobs, nodes * size)
            async with open_simulated_daemon(
                Path(folder), cluster, Fifo(), came, live_from=NOW, report_every_s=NOW / 4
            ) as clerk:
                await walk(clerk, options.times, {"jobs": jobs, "devices": nodes * size}, rows)


if __name__ == "__main__":
    asyncio.run(main())
