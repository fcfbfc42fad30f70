"""``carpool drain`` and ``undrain``: take a node of the daemon out, and put it back."""

from __future__ import annotations

import click

from carpool.cli.render.job_rows import NODE_HEADINGS, as_columns, node_row
from carpool.cli.support.daemon_client import connect, server_option
from carpool.cli.support.options import json_option, print_json


def _node_command(verb: str, summary: str) -> click.Command:
    @click.command(verb, help=summary, epilog=f"Example: carpool {verb} box1")
    @click.argument("node")
    @server_option
    @json_option
    def command(node: str, server: str, as_json: bool) -> None:
        with connect(server) as client:
            nodes = client.drain(node) if verb == "drain" else client.undrain(node)
        if as_json:
            print_json({"nodes": nodes})
            return
        for line in as_columns(NODE_HEADINGS, [node_row(each) for each in nodes]):
            click.echo(line)

    return command


drain = _node_command(
    "drain",
    "Release all jobs of NODE, which continue elsewhere, and schedule none on it until carpool undrain NODE.",
)
undrain = _node_command("undrain", "Schedule jobs on NODE again after carpool drain NODE.")
