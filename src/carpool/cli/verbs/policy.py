"""``carpool policies`` and ``carpool policy``: list the policies; show or change the daemon's policy."""

from __future__ import annotations

import json
from dataclasses import MISSING
from inspect import cleandoc

import click

from carpool.cli.support.daemon_client import connect, print_json, server_option
from carpool.cli.support.json_output import json_option
from carpool.policies.registry import POLICIES, parameters, policy_class


@click.command("policies", epilog="Example: carpool policies las")
@click.argument("name", required=False)
@json_option
def policies(name: str | None, as_json: bool) -> None:
    """List the policies; with NAME, its rule and its parameters."""
    if name is not None:
        _print_policy(name, as_json)
    elif as_json:
        listed = [{"name": key, "summary": listing.summary} for key, listing in sorted(POLICIES.items())]
        click.echo(json.dumps({"schema": 1, "policies": listed}))
    else:
        width = max(map(len, POLICIES))
        for key, listing in sorted(POLICIES.items()):
            click.echo(f"{key:{width}}  {listing.summary}")


def _print_policy(name: str, as_json: bool) -> None:
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


_EPILOG = """\b
Examples:
  carpool policy
  carpool policy srtf
  carpool policy carpool:objective=makespan
  carpool policy ./mine.py:MyPolicy
"""


@click.command("policy", epilog=_EPILOG)
@click.argument("policy", required=False, metavar="[NAME[:key=value]…]")
@server_option
@json_option
def policy(policy: str | None, server: str, as_json: bool) -> None:
    """Tell which policy decides; with a NAME, let that one decide from now on (admins).

    Jobs keep their progress; the new policy is in the journal, and decides after a restart too unless `carpool serve`
    is given another. `carpool policies` lists what there is. A policy of your own that fails at its first decision is
    refused; where it fails later, the daemon's default policy decides from then on, and this command says why.
    """
    with connect(server) as client:
        if policy is not None:
            client.change_policy(policy)
        now = client.policy_state()
    if as_json:
        print_json(now)
    else:
        click.echo(f"{now['policy']} decides" + ("" if policy is None else " from now on"))
        if now["fault"]:
            click.echo(f"That is since {now['fault']}")
