"""TLS on the port, certificate checks, and the refusal of plain HTTP beyond loopback."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytest.importorskip("httpx", reason="the extra 'serve' is not installed")

from carpool.core.errors import InputError
from carpool.service.client import Client, Unreachable
from carpool.service.config import Settings, read_settings
from carpool.service.transport import check_encrypted, server_context
from tests.support.http_rig import Served, serve_http


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for this machine, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here to make a certificate with")
    folder = tmp_path_factory.mktemp("pair")
    cert, key = folder / "box.pem", folder / "box.key"
    asked = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    about = ["-days", "2", "-subj", "/CN=box", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*asked, "-keyout", key, "-out", cert, *about], check=True, capture_output=True, timeout=60)
    key.chmod(0o600)
    return cert, key


def settings(folder: Path, **said: object) -> Settings:
    return read_settings({"HOME": str(folder)}, said)


@pytest.fixture(scope="module")
def served(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    tls = server_context(settings(folder, tls_cert=str(pair[0]), tls_key=str(pair[1])))
    with serve_http(folder, tls=tls) as served:
        yield served


def test_a_client_that_trusts_the_certificate_connects(served: Served, pair: tuple[Path, Path]) -> None:
    assert served.url.startswith("https://")
    with Client(served.url, served.tokens["ada"], ca=str(pair[0])) as client:
        assert client.me()["name"] == "ada"
        assert client.jobs()["total"] == 0


def test_a_client_that_does_not_trust_it_is_pointed_to_the_setting(served: Served) -> None:
    with Client(served.url, served.tokens["ada"]) as client, pytest.raises(Unreachable, match="CARPOOL_CA"):
        client.me()


def test_plain_http_works_on_the_socket_only(served: Served) -> None:
    with Client(served.url.replace("https", "http")) as client, pytest.raises(Unreachable):
        client.me()
    with Client(f"unix:{served.socket}") as owner:
        assert owner.me()["role"] == "admin"


@pytest.mark.parametrize("only", ["tls_cert", "tls_key"])
def test_a_certificate_needs_its_key(tmp_path: Path, only: str) -> None:
    assert server_context(settings(tmp_path)) is None
    with pytest.raises(InputError, match=r"tls_cert|tls_key"):
        server_context(settings(tmp_path, **{only: "x.pem"}))


def test_unusable_certificates_and_keys_are_refused(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    cert, key = pair
    for wrong in ({"tls_cert": str(key), "tls_key": str(key)}, {"tls_cert": str(cert), "tls_key": "/no/such"}):
        with pytest.raises(InputError, match=r"tls_cert .*tls_key"):
            server_context(settings(tmp_path, **wrong))
    open_key = tmp_path / "open.key"
    shutil.copy(key, open_key)
    open_key.chmod(0o644)
    with pytest.raises(InputError, match="chmod"):
        server_context(settings(tmp_path, tls_cert=str(cert), tls_key=str(open_key)))


def test_plain_http_beyond_loopback_needs_insecure_http(tmp_path: Path) -> None:
    check_encrypted(settings(tmp_path))
    check_encrypted(settings(tmp_path, host="0.0.0.0", insecure_http=True))
    check_encrypted(settings(tmp_path, host="0.0.0.0", tls_cert="box.pem"))
    with pytest.raises(InputError, match="--insecure-http"):
        check_encrypted(settings(tmp_path, host="0.0.0.0"))
