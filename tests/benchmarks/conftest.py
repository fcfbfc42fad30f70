"""What benchmarks are made of, loaded as they load it: from its file."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

TRIALS = Path(__file__).resolve().parents[2] / "benchmarks" / "trials"


@pytest.fixture(scope="session")
def trial() -> Callable[[str], ModuleType]:
    """A module of benchmarks/trials by its name."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, TRIALS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
