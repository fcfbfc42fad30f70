"""Lanes and foreign processes as NVIDIA's driver reports them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from carpool.jobs.devices import LocalDevice
from carpool.runtime.process.worker_setup import VisibleGpu, lane_problem
from carpool.runtime.sharing.foreign_processes import INTERVAL_S, ForeignProcessMonitor, process_lister
from carpool.runtime.sharing.mps_daemon import MpsDaemon

pytestmark = pytest.mark.gpu

LOOK = """
import json, sys, torch
from carpool.runtime.process.worker_setup import inspect_gpu
torch.zeros(1, device="cuda:0")
print(json.dumps(inspect_gpu(torch.device("cuda:0"))), flush=True)
sys.stdin.read()
"""


def seen_in(environment: Mapping[str, str]) -> VisibleGpu:
    """What a process with this environment sees."""
    told = subprocess.run(
        [sys.executable, "-c", LOOK], input="", capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    return VisibleGpu(*json.loads(told.stdout))


def test_a_lane_is_seen_and_a_missing_daemon_is_noticed(tmp_path: Path) -> None:
    async def with_daemon() -> VisibleGpu:
        mps = MpsDaemon()
        await mps.start()
        try:
            return await asyncio.to_thread(seen_in, mps.environment(40))
        finally:
            await mps.quit()

    given = asyncio.run(with_daemon())
    assert given.total is not None
    assert given.is_mps_client is True
    assert lane_problem(40, given) == ""
    nobody = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path), "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "40"}
    alone = seen_in(nobody)
    assert alone.is_mps_client is False
    assert lane_problem(40, alone)
    assert lane_problem(40, alone._replace(total=None))


def test_a_foreign_process_on_a_gpu_is_found() -> None:
    """A process that is none of ours: it is pretended that nobody is."""
    now = 0.0
    lookout = ForeignProcessMonitor({0: LocalDevice(0, "cuda:0", "H200", (), 0)}, lambda: now, None, lambda pid: False)
    other = subprocess.Popen([sys.executable, "-c", LOOK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        assert other.pid in [row.pid for row in process_lister()(0) or ()]
        now += INTERVAL_S
        ((_, words),) = lookout.tick([])
        assert f"process {other.pid}" in words
        now += INTERVAL_S
        assert lookout.tick([]) == []
        assert lookout.has_foreign_processes(0)
    finally:
        other.communicate("")
