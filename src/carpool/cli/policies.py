"""``carpool policies``: what exists, and with which parameters."""

from __future__ import annotations

import json
from dataclasses import MISSING
from inspect import cleandoc

import click

from carpool.cli.flags import json_option
from carpool.policies.registry import POLICIES, parameters, policy_class


@click.command("policies", epilog="Example: carpool policies las")
@click.argument("name", required=False)
@json_option
def command(name: str | None, as_json: bool) -> None:
    """List the policies; with NAME, its rule and its parameters."""
    if name is not None:
        _one(name, as_json)
    elif as_json:
        listed = [{"name": key, "summary": listing.summary} for key, listing in sorted(POLICIES.items())]
        click.echo(json.dumps({"schema": 1, "policies": listed}))
    else:
        width = max(map(len, POLICIES))
        for key, listing in sorted(POLICIES.items()):
            click.echo(f"{key:{width}}  {listing.summary}")


def _one(name: str, as_json: bool) -> None:
    kind = policy_class(name)
    about = cleandoc(kind.__doc__ or "")
    spots = {key: None if spot.default is MISSING else spot.default for key, spot in parameters(kind).items()}
    if as_json:
        click.echo(json.dumps({"schema": 1, "name": name, "about": about, "parameters": spots}, default=str))
        return
    click.echo(f"{name}: {POLICIES[name].summary}\n")
    click.echo(f"{about}\n")
    for key, value in spots.items():
        click.echo(f"  {key}={_as_typed(value)}")


def _as_typed(value: object) -> str:
    """A parameter's value as ``--policy`` takes it."""
    if isinstance(value, tuple):
        return "/".join(f"{part:g}" if isinstance(part, float) else str(part) for part in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
