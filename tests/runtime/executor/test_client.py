"""The executor client."""

import asyncio
import gc
from pathlib import Path

from carpool.jobs.devices import parse_devices
from carpool.runtime.executor.client import ExecutorClient


def test_a_client_stopped_before_receiving_leaves_no_connection_open(tmp_path: Path) -> None:
    async def run() -> None:
        client = await ExecutorClient.start(parse_devices("cpu:1"), tmp_path)
        await client.stop(checkpoint=False)

    asyncio.run(run())
    gc.collect()  # an open transport would warn now and fail this test
