"""``carpool completion``: print the shell completion script."""

from __future__ import annotations

import click

_EPILOG = """\b
Examples:
  carpool completion bash >> ~/.bashrc
  carpool completion zsh >> ~/.zshrc
  carpool completion fish > ~/.config/fish/completions/carpool.fish
"""


@click.command("completion", epilog=_EPILOG)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that makes a shell complete carpool's commands, options and job names."""
    from click.shell_completion import get_completion_class

    from carpool.cli.main import carpool

    kind = get_completion_class(shell)
    assert kind is not None, "click supports these shells"
    click.echo(kind(carpool, {}, "carpool", "_CARPOOL_COMPLETE").source())
