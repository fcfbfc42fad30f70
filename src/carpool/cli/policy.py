"""``carpool policy``: which policy decides in the daemon, and another one from now on."""

from __future__ import annotations

import click

from carpool.cli.asking import connect, print_json, server_option
from carpool.cli.flags import json_option

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
def command(policy: str | None, server: str, as_json: bool) -> None:
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
