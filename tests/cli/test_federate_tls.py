"""A federation over Flower with TLS and node authentication: own CA, registered keys, and a key that is refused."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from carpool.backends.flower.processes import free_port
from tests.cli.test_federate import ENTRY

pytest.importorskip("flwr")

FILE = """
rounds = 1
plan = "equal-epochs"
[[task]]
name = "line"
entry = "entry.py:make"
[[device]]
name = "a"
[[device]]
name = "b"
"""
CA = """
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -keyout ca.key -out ca.crt -subj /CN=CA
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout server.key -out server.csr -subj /CN=server
echo subjectAltName=IP:127.0.0.1 > names
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile names -out server.crt
for name in a b wrong; do ssh-keygen -q -t ecdsa -b 384 -N "" -f $name.key; done
"""
SERVER = "--ssl-certfile server.crt --ssl-keyfile server.key --ssl-ca-certfile ca.crt --enable-supernode-auth"
COMMANDS = Path(sys.executable).parent


class Commands:
    """Starts commands in a folder, and ends them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._env = {**os.environ, "FLWR_HOME": str(folder), "PATH": f"{COMMANDS}{os.pathsep}{os.environ['PATH']}"}
        self.children: list[subprocess.Popen[str]] = []

    def start(self, *words: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [str(COMMANDS / words[0]), *words[1:]],
            cwd=self.folder,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.children.append(child)
        return child

    def run(self, *words: str) -> tuple[int, str]:
        child = self.start(*words)
        out, _ = child.communicate(timeout=120)
        return child.returncode, out

    def device(self, name: str, key: str, superlink: str) -> list[str]:
        words = ["carpool", "federate", "federation.toml", "--device", name, "--superlink", superlink]
        return [*words, "--root-certificates", "ca.crt", "--node-key", key, "--out", f"device-{key}"]


def register(commands: Commands, key: str) -> None:
    """Register a public key; the SuperLink may not listen yet."""
    ends = time.monotonic() + 60.0
    while commands.run("flwr", "supernode", "register", key, "ours")[0]:
        assert time.monotonic() < ends, f"{key} was not registered"


@pytest.mark.slow
def test_devices_with_registered_keys_take_part_over_tls_and_another_is_refused(tmp_path: Path) -> None:
    (tmp_path / "entry.py").write_text(ENTRY)
    (tmp_path / "federation.toml").write_text(FILE)
    subprocess.run(["sh", "-ec", CA], cwd=tmp_path, check=True, capture_output=True)
    superlink, commands = f"127.0.0.1:{free_port()}", Commands(tmp_path)
    lines = ["[superlink.ours]", f'address = "{superlink}"', f'root-certificates = "{tmp_path}/ca.crt"']
    (tmp_path / "config.toml").write_text("\n".join(lines))
    try:
        port = superlink.rpartition(":")[2]
        dont_install = "--disable-runtime-dependency-installation"
        commands.start("flower-superlink", *SERVER.split(), dont_install, "--host", "127.0.0.1", "--port", port)
        for key in ("a.key.pub", "b.key.pub"):
            register(commands, key)
        for name in ("a", "b"):
            commands.start(*commands.device(name, f"{name}.key", superlink))
        code, said = commands.run(*commands.device("a", "wrong.key", superlink))
        assert code == 2, said
        assert "--node-key is registered" in said
        server = ["carpool", "federate", "federation.toml", "--superlink", superlink, "--out", "out", "--json"]
        code, said = commands.run(*server, "--root-certificates", "ca.crt")
        assert code == 0, said
        document = json.loads(said[said.index("{") :])
        assert document["results"][0]["outcomes"] == {"accepted": 2}
    finally:
        for child in commands.children:
            child.terminate()
        for child in commands.children:
            child.wait(30)
            assert child.stdout is not None
            child.stdout.close()
