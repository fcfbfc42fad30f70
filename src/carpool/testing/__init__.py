"""Shipped contracts, fakes and generators: what a policy, backend, estimator or predictor must pass.

``class TestMine(PolicyContract): policy = Mine()`` in a test file is all that it takes. The contracts need pytest and
hypothesis, which the extra ``dev`` brings; the fakes need neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carpool.testing.backend_contract import BackendContract, Bench, MachinesBench
    from carpool.testing.driver import Driven, UserAction, UserActions, drive
    from carpool.testing.estimator_contract import EstimatorContract
    from carpool.testing.policy_contract import PolicyContract
    from carpool.testing.predictor_contract import PredictorContract
    from carpool.testing.reference import PlainRun, plain_loop
    from carpool.testing.rig import FakeBackend, FakeClock, Rig, check_state


_FROM = {
    "BackendContract": "backend_contract",
    "Bench": "backend_contract",
    "Driven": "driver",
    "EstimatorContract": "estimator_contract",
    "FakeBackend": "rig",
    "FakeClock": "rig",
    "MachinesBench": "backend_contract",
    "PlainRun": "reference",
    "PolicyContract": "policy_contract",
    "PredictorContract": "predictor_contract",
    "Rig": "rig",
    "UserAction": "driver",
    "UserActions": "driver",
    "check_state": "rig",
    "drive": "driver",
    "plain_loop": "reference",
}
_WITH_PYTEST = ("backend_contract", "estimator_contract", "policy_contract", "predictor_contract", "strategies")

__all__ = [
    "BackendContract",
    "Bench",
    "Driven",
    "EstimatorContract",
    "FakeBackend",
    "FakeClock",
    "MachinesBench",
    "PlainRun",
    "PolicyContract",
    "PredictorContract",
    "Rig",
    "UserAction",
    "UserActions",
    "check_state",
    "drive",
    "plain_loop",
]


def __getattr__(name: str) -> object:
    """Import a name on first use, with advice if pytest or hypothesis is missing."""
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _FROM[name]
    try:
        if module in _WITH_PYTEST:
            import pytest

            # So that a failed assertion of a contract shows its values, as one in a test file would.
            pytest.register_assert_rewrite(*[f"{__name__}.{each}" for each in _WITH_PYTEST if each != "strategies"])
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("pytest", "hypothesis"):
            raise
        raise ImportError(
            f"carpool.testing.{name} needs {error.name}. Install it with: pip install 'carpool[dev]'"
        ) from error
