"""Options that many verbs have in common."""

from __future__ import annotations

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print as JSON and nothing else.")
