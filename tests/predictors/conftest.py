"""The measured co-location table that the project ships."""

import pytest

from carpool.predictors.colocation import Colocation


@pytest.fixture(scope="session")
def colocation(request: pytest.FixtureRequest) -> Colocation:
    """What ``benchmarks/gpu_colocation.py`` measured."""
    return Colocation.load(request.config.rootpath / "benchmarks" / "results" / "gpu_colocation.json")
