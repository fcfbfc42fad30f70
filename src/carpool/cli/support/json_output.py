"""The ``--json`` option, and a guard that redirects other code's prints to stderr."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, redirect_stdout
from typing import TextIO

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON only.")


def guard_stdout() -> AbstractContextManager[TextIO]:
    """Redirect stdout to stderr, so that a user's policy that prints does not corrupt the result."""
    return redirect_stdout(sys.stderr)
