"""What tests of federations share: one fork server, so that torch is imported once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.federation_runs import Runs


@pytest.fixture(scope="session")
def run() -> Iterator[Runs]:
    """Runs federations on a fork server that lives as long as the session."""
    from carpool.backends.federation_run import fork_server
    from tests.support.federation_runs import Runs

    with asyncio.Runner() as runner:
        context = fork_server()
        yield Runs(runner, runner.run(context.__aenter__()))
        runner.run(context.__aexit__(None, None, None))
