"""Hosts files: what is read, and errors that name file, host and key."""

from pathlib import Path

import pytest

from carpool.core.errors import InputError
from carpool.jobs.hosts_file import PORT, Host, read_hosts

TOKEN = "0123456789abcdef"
GOOD = '[[host]]\nname = "box1"\naddress = "10.0.0.5"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    token = tmp_path / "box1.token"
    token.touch(mode=0o600)
    token.write_text(f"{TOKEN}\n")
    return tmp_path


def read(folder: Path, text: str) -> object:
    (folder / "hosts.toml").write_text(text)
    return read_hosts(folder / "hosts.toml")


def test_what_is_not_given_has_a_default(folder: Path) -> None:
    (folder / "hosts.toml").write_text(f"lease = 5\nmax_code = '1MiB'\n{GOOD}")
    found = read_hosts(folder / "hosts.toml")
    assert found.hosts == (Host("box1", "10.0.0.5", PORT, TOKEN),)
    assert (found.lease_s, found.max_code_bytes) == (5.0, 1 << 20)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "host"),
        ("[[host]]\naddress = 'a'", "name"),
        ("[[host]]\nname = 'local'\naddress = 'a'", "local"),
        ("[[host]]\nname = 'box1'", "address"),
        (f"{GOOD}port = 70000", "70000"),
        (f"{GOOD}prot = 1", "port"),
        (f"{GOOD}token_file = 'none'", "none"),
        (f"{GOOD}{GOOD}", "box1"),
        (f"lease = 0\n{GOOD}", "lease"),
        ("x", "TOML"),
    ],
)
def test_errors_name_the_key(folder: Path, text: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        read(folder, text)


def test_a_token_is_private_and_long(folder: Path) -> None:
    token = folder / "box1.token"
    token.chmod(0o644)
    with pytest.raises(InputError, match="chmod"):
        read(folder, GOOD)
    token.chmod(0o600)
    token.write_text("short")
    with pytest.raises(InputError, match="5 characters"):
        read(folder, GOOD)
