"""What all tests share: hypothesis profiles, the folder of real data, and who is skipped where."""

import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("tests.support")

ROOT = Path(__file__).resolve().parent.parent

# No deadlines: how long an example takes says more about the machine than about the code.
settings.register_profile(
    "ci", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.register_profile("thorough", deadline=None, print_blob=True, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "explore"))

ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS") if name not in os.environ}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import everything with one thread for numerics, and without the cycle collector.

    Threads of one operation wait for each other in a busy loop, which takes a hundred times as long on a machine whose
    cores are all in use. The libraries read the variables when they are imported; processes that tests start do not
    get them. Modules and tests stay, so the collector would walk all of them again and again.
    """
    os.environ.update(ONE_THREAD)
    gc.disable()
    try:
        return (yield)
    finally:
        for name in ONE_THREAD:
            del os.environ[name]
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start tests that mostly wait first, and skip ``gpu`` where the NVIDIA driver is not loaded."""
    items.sort(key=lambda item: item.get_closest_marker("waits") is None)
    if Path("/dev/nvidiactl").exists():
        return
    no_gpu = pytest.mark.skip(reason="no NVIDIA GPU here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real traces and profiles, or a skip that says how to name it."""
    named = os.environ.get("CARPOOL_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no data in {folder}; set CARPOOL_DATA to the folder that holds it")
    return folder
