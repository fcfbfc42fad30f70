"""``carpool policies`` and ``carpool policy``: list the policies; show or change the daemon's policy."""

from __future__ import annotations

import json
from dataclasses import MISSING
from inspect import cleandoc

import click

from carpool.cli.support.daemon_client import connect, server_option
from carpool.cli.support.options import json_option, print_json

_POLICIES_EPILOG = """\b
Examples:
  carpool policies
  carpool policies las
"""


@click.command("policies", epilog=_POLICIES_EPILOG)
@click.argument("name", required=False)
@json_option
def policies(name: str | None, as_json: bool) -> None:
    """List the scheduling policies; with NAME, describe that policy and its parameters.

    Use a policy with --policy NAME:parameter=value.
    """
    from carpool.policies.registry import POLICIES

    if name is not None:
        _print_policy(name, as_json)
    elif as_json:
        listed = [{"name": key, "summary": listing.summary} for key, listing in sorted(POLICIES.items())]
        print_json({"policies": listed})
    else:
        width = max(map(len, POLICIES))
        for key, listing in sorted(POLICIES.items()):
            click.echo(f"{key:{width}}  {listing.summary}")


def _print_policy(name: str, as_json: bool) -> None:
    from carpool.policies.registry import POLICIES, parameters, policy_class

    cls = policy_class(name)
    about = cleandoc(cls.__doc__ or "")
    defaults = {key: None if field.default is MISSING else field.default for key, field in parameters(cls).items()}
    if as_json:
        click.echo(json.dumps({"schema": 1, "name": name, "about": about, "parameters": defaults}, default=str))
        return
    click.echo(f"{name}: {POLICIES[name].summary}\n")
    click.echo(f"{about}\n")
    for key, value in defaults.items():
        click.echo(f"  {key}={_format_value(value)}")


def _format_value(value: object) -> str:
    """Format a parameter's value as ``--policy`` reads it."""
    if isinstance(value, tuple):
        return "/".join(f"{part:g}" if isinstance(part, float) else str(part) for part in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


_POLICY_EPILOG = """\b
Examples:
  carpool policy
  carpool policy srtf
  carpool policy carpool:objective=makespan
  carpool policy ./mine.py:MyPolicy
"""


@click.command("policy", epilog=_POLICY_EPILOG)
@click.argument("policy", required=False, metavar="[NAME[:key=value]…]")
@server_option
@json_option
def policy(policy: str | None, server: str, as_json: bool) -> None:
    """Show the daemon's scheduling policy; with NAME, change it (admins only).

    `carpool policies` lists the policies. Jobs keep their progress. The change is journaled and survives a restart
    unless `carpool serve --policy` overrides it. A policy from your own file is rejected if its first plan fails; if
    it fails later, the daemon falls back to its default policy, and this command shows the error.
    """
    with connect(server) as client:
        if policy is not None:
            client.change_policy(policy)
        state = client.policy_state()
    if as_json:
        print_json(state)
        return
    click.echo(f"policy {state['policy']}" if policy is None else f"policy changed to {state['policy']}")
    if state["fault"]:
        click.echo(f"fallback after an error: {state['fault']}")
