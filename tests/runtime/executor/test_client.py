"""The near end of an executor: nothing of it is left open."""

import asyncio
import gc
from pathlib import Path

from carpool.jobs.devices import parse_devices
from carpool.runtime.executor.client import ExecutorClient


def test_one_that_is_stopped_before_anybody_listens_leaves_no_line_open(tmp_path: Path) -> None:
    async def play() -> None:
        link = await ExecutorClient.start(parse_devices("cpu:1"), tmp_path)
        await link.stop(checkpoint=False)

    asyncio.run(play())
    gc.collect()  # whatever was left open would be told now, and fail this test
