"""The measured co-location table that the project ships."""

import pytest

from carpool.predictors.sharing.colocation import ColocationTable


@pytest.fixture(scope="session")
def colocation(request: pytest.FixtureRequest) -> ColocationTable:
    """What ``benchmarks/gpu_colocation.py`` measured."""
    return ColocationTable.load(request.config.rootpath / "benchmarks" / "results" / "gpu_colocation.json")
