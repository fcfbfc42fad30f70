"""What code of others prints while a verb runs: it must not get between what programs read."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, redirect_stdout
from typing import TextIO


def keeping_stdout() -> AbstractContextManager[TextIO]:
    """Keep stdout for the result: what a policy of a file prints meanwhile goes to stderr."""
    return redirect_stdout(sys.stderr)
