"""The ``--json`` option, and a guard that redirects other code's prints to stderr."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, redirect_stdout
from typing import TextIO

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print as JSON and nothing else.")


def guard_stdout() -> AbstractContextManager[TextIO]:
    """Keep stdout for the result: what a policy of a file prints meanwhile goes to stderr."""
    return redirect_stdout(sys.stderr)
