"""Settings of daemon and client from defaults, config file, environment and flags, each with its origin.

What is said later wins: defaults, then the file, then ``CARPOOL_…`` variables, then flags.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from carpool.core.errors import InputError, UnknownName, cause

FILE = "carpool/config.toml"  # under $XDG_CONFIG_HOME
SOCKET = "api.sock"  # in the daemon's folder
PORT = 7637


class SettingType(Enum):
    """What a setting's value is."""

    TEXT = "a text"
    WHOLE = "a whole number of at least 0"
    NUMBER = "a number above 0"
    TEXTS = "a list of texts"
    SWITCH = "true or false"


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that can be set."""

    name: str
    kind: SettingType
    default: Any
    about: str
    is_secret: bool = False


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("state", SettingType.TEXT, "", "the daemon's folder; empty: ~/.local/state/carpool"),
        Setting(
            "devices", SettingType.TEXT, "", "what jobs run on, as for carpool run; empty: all GPUs, else all cores"
        ),
        Setting("policy", SettingType.TEXT, "", "who runs where; empty: as before, or the default"),
        Setting("lanes", SettingType.TEXT, "auto", "auto or slice, as for carpool run"),
        Setting("warm", SettingType.WHOLE, 1, "processes kept ready on each GPU"),
        Setting("memory_cap", SettingType.TEXT, "", "what jobs on a device may take together; empty: all of it"),
        Setting(
            "checkpoint_days",
            SettingType.WHOLE,
            90,
            "days after its end that a job's checkpoints are kept; 0: for ever",
        ),
        Setting("log_level", SettingType.TEXT, "warning", "what is logged to stderr: debug, info, warning or error"),
        Setting("log_format", SettingType.TEXT, "text", "text, or json for one object per line"),
        Setting("socket", SettingType.TEXT, "", f"the daemon's Unix socket; empty: {SOCKET} in its folder"),
        Setting(
            "host", SettingType.TEXT, "127.0.0.1", "where it listens besides; beyond loopback there must be tokens"
        ),
        Setting("port", SettingType.WHOLE, PORT, "the port there; 0: none"),
        Setting("tls_cert", SettingType.TEXT, "", "a certificate (PEM): the port speaks https then"),
        Setting("tls_key", SettingType.TEXT, "", "its key (PEM), which not everybody may read"),
        Setting(
            "insecure_http", SettingType.SWITCH, False, "listen beyond loopback without a certificate all the same"
        ),
        Setting("hosts", SettingType.TEXTS, (), "further names that people may ask for it by"),
        Setting("public", SettingType.TEXTS, (), "its addresses behind a proxy, such as https://carpool.lab"),
        Setting(
            "proxies", SettingType.TEXTS, (), "addresses of proxies that say in X-Forwarded-For where requests are from"
        ),
        Setting("roots", SettingType.TEXTS, ("~",), "folders from which those with tokens may run jobs"),
        Setting("body_bytes", SettingType.WHOLE, 1 << 20, "the largest request"),
        Setting("jobs_at_once", SettingType.WHOLE, 1000, "the most jobs in one submission"),
        Setting("requests_per_s", SettingType.NUMBER, 50.0, "requests of one person in the long run"),
        Setting("burst", SettingType.NUMBER, 200.0, "and at once"),
        Setting("streams", SettingType.WHOLE, 20, "event streams and followed logs of one person"),
        Setting("connections", SettingType.WHOLE, 512, "connections at once"),
        Setting(
            "server", SettingType.TEXT, "", "the daemon to ask: a URL, or unix:PATH; empty: the socket in its folder"
        ),
        Setting("ca", SettingType.TEXT, "", "whose certificates to believe (PEM); empty: those the system does"),
        Setting("token", SettingType.TEXT, "", "the token to ask with", is_secret=True),
    )
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting with a value, and where each value is from."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]
    home: Path
    users: Mapping[str, Any] = field(default_factory=dict)  # tables by name, as the file has them

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def state(self) -> Path:
        """The daemon's folder."""
        return self._expanded(self["state"])

    @property
    def socket(self) -> Path:
        """The daemon's Unix socket."""
        return self.path("socket") or self.state / SOCKET

    @property
    def roots(self) -> tuple[Path, ...]:
        """Folders from which those with tokens may run jobs."""
        return tuple(self._expanded(text) for text in self["roots"])

    def path(self, name: str) -> Path | None:
        """A setting that names a file; None where it is empty."""
        return self._expanded(self[name]) if self[name] else None

    def _expanded(self, text: str) -> Path:
        return self.home / text[2:] if text.startswith("~/") else self.home if text == "~" else Path(text).absolute()


def read_settings(environment: Mapping[str, str], flags: Mapping[str, Any] | None = None) -> Settings:
    """All settings; flags that were not given are None or missing. InputError tells which one is wrong, and where."""
    home = Path(environment.get("HOME", "/"))
    values = {setting.name: setting.default for setting in SETTINGS.values()}
    state_home = environment.get("XDG_STATE_HOME") or str(home / ".local" / "state")
    values["state"] = str(Path(state_home) / "carpool")
    origins = dict.fromkeys(values, "default")
    path = config_file(environment)
    table, users = _read_file(path, is_named="CARPOOL_CONFIG" in environment)
    for source, given in (
        (f"file {path}", table),
        ("environment", _from_environment(environment)),
        ("flag", {name: value for name, value in (flags or {}).items() if value is not None}),
    ):
        for name, value in given.items():
            where = f"environment {variable(name)}" if source == "environment" else source
            where = f"flag --{name.replace('_', '-')}" if source == "flag" else where
            values[name], origins[name] = checked(SETTINGS[name], value, where), where
    return Settings(values, origins, home, users)


def config_file(environment: Mapping[str, str]) -> Path:
    """Where the file is, or would be."""
    if named := environment.get("CARPOOL_CONFIG"):
        return Path(named)
    base = environment.get("XDG_CONFIG_HOME") or str(Path(environment.get("HOME", "/")) / ".config")
    return Path(base) / FILE


def variable(name: str) -> str:
    """The environment's name for a setting."""
    return f"CARPOOL_{name.upper()}"


def checked(setting: Setting, value: object, where: str) -> Any:
    """A value of the right kind; InputError where it is of another."""
    match setting.kind:
        case SettingType.TEXT if isinstance(value, str):
            return value
        case SettingType.WHOLE if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        case SettingType.NUMBER if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e18:
            return float(value)
        case SettingType.SWITCH if isinstance(value, bool):
            return value
        case SettingType.TEXTS if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
            return tuple(value)
    shown = "…" if setting.is_secret else repr(value)
    raise InputError(f"{setting.name} is {shown}", where=where, way_out=f"Give {setting.kind.value}.")


def _read_file(path: Path, *, is_named: bool) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if is_named:
            raise InputError("is not there", where=str(path), way_out="CARPOOL_CONFIG must name a file.") from None
        return {}, {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(
            f"cannot be read: {cause(error)}", where=str(path), way_out="Mend it, or name another with CARPOOL_CONFIG."
        ) from None
    users = data.pop("users", {})
    for name in data:
        if name not in SETTINGS:
            raise UnknownName("setting", name, [*SETTINGS, "users"], where=str(path))
    return data, users


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found = {}
    for setting in SETTINGS.values():
        text = environment.get(variable(setting.name))
        if text is not None:
            found[setting.name] = _from_text(setting, text)
    return found


def _from_text(setting: Setting, text: str) -> Any:
    """A text as the setting's kind; what cannot be one is left for the check to tell."""
    if setting.kind is SettingType.TEXTS:
        return [part for part in text.split(",") if part]
    if setting.kind is SettingType.SWITCH:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    if setting.kind is SettingType.WHOLE:
        return int(text) if text.isdecimal() else text
    if setting.kind is SettingType.NUMBER:
        try:
            return float(text)
        except ValueError:
            return text
    return text
