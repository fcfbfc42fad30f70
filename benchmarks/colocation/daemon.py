"""Starts a private MPS daemon and stops it in any case."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

_CONTROL = "nvidia-cuda-mps-control"


@contextmanager
def mps() -> Iterator[dict[str, str]]:
    """What clients must have in their environment, while the service runs; nothing where there is none."""
    if shutil.which(_CONTROL) is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="mps", dir="/tmp") as folder:
        paths = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/p", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/l"}
        for path in paths.values():
            Path(path).mkdir(0o700)
        env = {**os.environ, **paths}
        subprocess.run([_CONTROL, "-d"], env=env, check=True, timeout=20)
        signal.signal(signal.SIGTERM, _leave)  # a time limit must not leave the service behind
        try:
            yield paths
        finally:
            with suppress(subprocess.TimeoutExpired):  # what was measured is not lost for it
                subprocess.run([_CONTROL], input="quit\n", text=True, env=env, check=False, timeout=30)


def _leave(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)
