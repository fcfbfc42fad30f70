"""Limit BLAS to one thread for small, reproducible linear algebra."""

from __future__ import annotations

from functools import cache
from typing import Any

from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]


def one_thread() -> Any:
    """What is this small is no work for several threads: on a busy machine these cost ten times what they save.

    Besides, sums do not depend on how many cores there are then, so that the same history leads to the same plans.
    """
    return _threads().limit(limits=1, user_api="blas")


@cache
def _threads() -> ThreadpoolController:
    return ThreadpoolController()
