"""What all tests share: hypothesis profiles, the folder of real data, and who is skipped where."""

import os
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu`` where the NVIDIA driver is not loaded."""
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
