"""Flower app folder that `flwr run` packs: a module that names the relays of the installed carpool."""

from __future__ import annotations

from pathlib import Path

from carpool import __version__

_PROJECT = """[project]
name = "carpool-relay"
version = "1.0.0"
description = "Relays of carpool {version}"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "carpool"

[tool.flwr.app.components]
serverapp = "carpool_relay:server_app"
clientapp = "carpool_relay:client_app"

[tool.flwr.app.config]
carpool-socket = ""
"""
# Flower looks for assignments before it imports the module.
_MODULE = """from carpool.backends.flower import relay

client_app = relay.client_app
server_app = relay.server_app
"""


def write_app(folder: Path) -> None:
    """Write the app folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(_PROJECT.format(version=__version__), encoding="utf-8")
    (folder / "carpool_relay.py").write_text(_MODULE, encoding="utf-8")
