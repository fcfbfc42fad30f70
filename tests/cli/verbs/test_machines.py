"""``carpool agent``: addresses, certificates and what is refused before it listens."""

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from carpool.cli.verbs.machines import _publish, agent, parse_address
from carpool.core.errors import InputError
from carpool.jobs.hosts_file import Host
from carpool.runtime.remote.remote_agent import certificate_of
from carpool.runtime.remote.remote_start import own_certificate, start_script


@pytest.mark.parametrize(
    ("text", "address"), [("10.0.0.5:7638", ("10.0.0.5", 7638)), ("[::1]:0", ("::1", 0)), ("box:1", ("box", 1))]
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "7638", ":7638", "box:", "box:x", "box:70000"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="ADDRESS:PORT"):
        parse_address(text)


def test_a_key_without_a_certificate_and_an_open_token_are_refused(tmp_path: Path) -> None:
    token = tmp_path / "t.token"
    token.write_text("0123456789abcdef")
    token.chmod(0o644)
    base = [
        "--listen",
        "127.0.0.1:0",
        "--token-file",
        str(token),
        "--state",
        str(tmp_path / "state"),
        "--devices",
        "cpu:1",
    ]
    assert "chmod" in str(CliRunner().invoke(agent, base).exception)
    token.chmod(0o600)
    error = CliRunner().invoke(agent, [*base, "--tls-key", "x"]).exception
    assert isinstance(error, InputError)
    assert "--tls-cert" in str(error)


def test_a_certificate_is_made_once_and_its_key_is_private(tmp_path: Path) -> None:
    cert, key = own_certificate(tmp_path, "box1")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    first = certificate_of(cert)
    assert certificate_of(own_certificate(tmp_path, "box1")[0]) == first
    with pytest.raises(InputError):
        certificate_of(key)


def test_the_ssh_script_quotes_what_the_hosts_file_says() -> None:
    host = Host("box", "10.0.0.5", 7638, "secret", ssh="me@box", python="/opt/my env/python", devices="cuda; rm -rf x")
    script = start_script(host)
    assert "secret" not in script, "the token goes over standard input"
    assert "'cuda; rm -rf x'" in script
    assert "'/opt/my env/python'" in script
    assert "0.0.0.0:7638" in script
    assert "127.0.0.1:7638" in start_script(replace(host, tls=False))


def test_an_agent_publishes_where_it_listens(tmp_path: Path) -> None:
    _publish(tmp_path / "agent.json", "127.0.0.1", 4711)
    assert json.loads((tmp_path / "agent.json").read_text()) == {"schema": 1, "address": "127.0.0.1", "port": 4711}
    assert [path.name for path in tmp_path.iterdir()] == ["agent.json"]
