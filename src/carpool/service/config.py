"""Settings of daemon and client, each with its origin.

Later sources override earlier ones: defaults, configuration file, ``CARPOOL_…`` variables, command-line options.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any

from carpool.core.errors import InputError, UnknownName, cause

FILE = "carpool/config.toml"  # under $XDG_CONFIG_HOME
SOCKET = "api.sock"  # in the state folder
PORT = 7637
_SERVER_NAMES = frozenset({"url", "address", "endpoint", "daemon", "api"})  # that others give to such a setting


class SettingType(Enum):
    """Type of a setting's value."""

    TEXT = "a string"
    WHOLE = "a whole number of at least 0"
    NUMBER = "a number above 0"
    TEXTS = "a list of strings"
    SWITCH = "true or false"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting; the type of its default is the type of its value."""

    name: str
    default: str | bool | int | float | tuple[str, ...]
    about: str
    is_secret: bool = False

    @property
    def kind(self) -> SettingType:
        return _TYPES[type(self.default)]


_TYPES = {
    str: SettingType.TEXT,
    int: SettingType.WHOLE,
    float: SettingType.NUMBER,
    tuple: SettingType.TEXTS,
    bool: SettingType.SWITCH,
}

SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("state", "", "state folder of the daemon; empty: ~/.local/state/carpool"),
        Setting("devices", "", "devices for jobs, as for carpool run; empty: all free GPUs, else all cores"),
        Setting("policy", "", "scheduling policy; empty: the last one used, else the default"),
        Setting("lanes", "auto", "how jobs share a GPU: auto or slice, as for carpool run"),
        Setting("warm", 1, "warm worker processes per GPU"),
        Setting("memory_cap", "", "memory that all jobs on a device may use together; empty: all of it"),
        Setting("checkpoint_days", 90, "days to keep checkpoints after a job has ended; 0: forever"),
        Setting("log_bytes", 64 << 20, "bytes of each job's log to keep, trimmed at twice as many; 0: no limit"),
        Setting("pass_env", (), "variables of the daemon that its jobs get as well, such as HF_* and WANDB_*"),
        Setting("log_level", "warning", "least severe level to log: debug, info, warning or error"),
        Setting("log_format", "text", "format of the log: text, or json for one object per line"),
        Setting("socket", "", f"Unix socket of the daemon; empty: {SOCKET} in its state folder"),
        Setting("host", "127.0.0.1", "address to listen on; other than loopback requires access tokens"),
        Setting("port", PORT, "TCP port to listen on; 0: none"),
        Setting("tls_cert", "", "certificate (PEM); enables https on the port"),
        Setting("tls_key", "", "private key of the certificate (PEM), not world-readable"),
        Setting("insecure_http", False, "allow listening beyond loopback without a certificate"),
        Setting("hosts", (), "additional host names accepted in requests"),
        Setting("public", (), "public URLs behind a proxy, such as https://carpool.lab"),
        Setting("proxies", (), "addresses of proxies whose X-Forwarded-For is trusted"),
        Setting("roots", ("~",), "folders from which token holders may run jobs"),
        Setting("body_bytes", 1 << 20, "maximum size of a request"),
        Setting("jobs_at_once", 1000, "maximum number of jobs in one submission"),
        Setting("requests_per_s", 50.0, "sustained request rate per user"),
        Setting("burst", 200.0, "requests a user may send at once"),
        Setting("streams", 20, "concurrent event streams and followed logs per user"),
        Setting("connections", 512, "maximum number of concurrent connections"),
        Setting("server", "", "daemon that commands connect to: URL or unix:PATH; empty: this machine's daemon"),
        Setting("ca", "", "trusted certificates for https (PEM); empty: the system's"),
        Setting("token", "", "access token that commands send", is_secret=True),
    )
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Value and origin of every setting."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]
    home: Path
    users: Mapping[str, Any] = field(default_factory=dict)  # the file's [users.NAME] tables

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def state(self) -> Path:
        return self._expanded(self["state"])

    @property
    def socket(self) -> Path:
        return self.path("socket") or self.state / SOCKET

    @property
    def roots(self) -> tuple[Path, ...]:
        return tuple(self._expanded(text) for text in self["roots"])

    def path(self, name: str) -> Path | None:
        """Path in a setting; None if it is empty."""
        return self._expanded(self[name]) if self[name] else None

    def _expanded(self, text: str) -> Path:
        return self.home / text[2:] if text.startswith("~/") else self.home if text == "~" else Path(text).absolute()


def read_settings(environment: Mapping[str, str], flags: Mapping[str, Any] | None = None) -> Settings:
    """Read all settings; options that were not given are None or missing. InputError for an invalid value."""
    home = Path(environment.get("HOME", "/"))
    values = {setting.name: setting.default for setting in SETTINGS.values()}
    state_home = environment.get("XDG_STATE_HOME") or str(home / ".local" / "state")
    values["state"] = str(Path(state_home) / "carpool")
    origins = dict.fromkeys(values, "default")
    path = config_file(environment)
    table, users = _read_file(path, is_named="CARPOOL_CONFIG" in environment)
    given = [(name, value, f"file {path}") for name, value in table.items()]
    given += [(name, value, f"environment {variable(name)}") for name, value in _from_environment(environment).items()]
    given += [(name, value, f"flag --{name.replace('_', '-')}") for name, value in (flags or {}).items()]
    for name, value, origin in given:
        if value is not None:
            values[name], origins[name] = checked(SETTINGS[name], value, origin), origin
    return Settings(values, origins, home, users)


def misspelled_variables(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Variables that name no setting, each with the one probably meant, such as CARPOOL_SERVER for CARPOOL_URL."""
    found = []
    for name in sorted(environment):
        setting = name.removeprefix(variable("")).lower()
        if name.startswith(variable("")) and setting not in SETTINGS:
            near = ["server"] if setting in _SERVER_NAMES else get_close_matches(setting, SETTINGS, n=1, cutoff=0.7)
            found += [(name, variable(each)) for each in near]
    return found


def config_file(environment: Mapping[str, str]) -> Path:
    """Path of the configuration file, which need not exist."""
    if named := environment.get("CARPOOL_CONFIG"):
        return Path(named)
    base = environment.get("XDG_CONFIG_HOME") or str(Path(environment.get("HOME", "/")) / ".config")
    return Path(base) / FILE


def variable(name: str) -> str:
    """Environment variable of a setting."""
    return f"CARPOOL_{name.upper()}"


def checked(setting: Setting, value: object, where: str) -> Any:
    """Value converted to the setting's type; InputError if it has another."""
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
            raise InputError("not found", where=str(path), way_out="Set CARPOOL_CONFIG to an existing file.") from None
        return {}, {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(
            f"cannot be read: {cause(error)}", where=str(path), way_out="Fix it, or set CARPOOL_CONFIG to another file."
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
        if text:  # an empty variable counts as unset
            found[setting.name] = _from_text(setting, text)
    return found


def _from_text(setting: Setting, text: str) -> Any:
    """Convert a string to the setting's type; an invalid one is returned unchanged for `checked` to reject."""
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
