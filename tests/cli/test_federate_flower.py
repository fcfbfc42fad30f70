"""``carpool federate --transport flower`` with a real SuperLink and two SuperNodes, one of which is killed."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from carpool.backends.federation_store import FederationStore
from carpool.cli.main import run
from carpool.federated.coordinator import Coordinator
from carpool.federated.messages import CloseCycle, DeviceLost, Record, StartWork
from tests.cli.test_federate import ENTRY

pytest.importorskip("flwr")

FILE = """
rounds = 2
plan = "equal-epochs"
deadline_s = 5
grace_s = 20
[[task]]
name = "line"
entry = "entry.py:make"
[[task]]
name = "other"
entry = "entry.py:make"
args = { lr = 0.2 }
[[device]]
name = "device"
count = 2
"""


def records_of(folder: Path) -> list[Record]:
    store = FederationStore(folder)
    return store.read()[1] if store.exists and store.num_bytes else []


def kill_supernode(folder: Path, name: str, killed: list[int]) -> None:
    """Once work is ordered, kill the SuperNode of a device and what it has started."""
    while not any(isinstance(order, StartWork) for record in records_of(folder) for order in record.orders):
        time.sleep(0.05)
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_text().split("\0")
            log = str((path / "fd" / "1").readlink())
        except OSError:
            continue
        if log == str(folder / f"supernode-{name}.log") and any(word.endswith("flower-supernode") for word in words):
            os.killpg(int(path.name), signal.SIGKILL)
            killed.append(int(path.name))


@pytest.mark.waits
def test_a_round_without_a_killed_supernode_closes_at_our_deadline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flower lists the node for longer than that. On a slow machine others may be late too, and repeat their round."""
    (tmp_path / "entry.py").write_text(ENTRY)
    (tmp_path / "federation.toml").write_text(FILE)
    folder, killed = tmp_path / "out", list[int]()
    watcher = threading.Thread(target=kill_supernode, args=(folder, "device-1", killed), daemon=True)
    watcher.start()
    words = ["federate", str(tmp_path / "federation.toml"), "--out", str(folder), "--transport", "flower", "--json"]
    assert run(words) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [task["rounds"] for task in document["results"][0]["tasks"]] == [2, 2]
    assert len(killed) == 1
    records = records_of(folder)
    number, closing = next((n, o) for n, record in enumerate(records) for o in record.orders if type(o) is CloseCycle)
    assert "device-1" in closing.missing
    assert records[number].at >= 25.0
    assert not [fact for record in records[: number + 1] for fact in record.facts if isinstance(fact, DeviceLost)]
    lost = [fact for record in records for fact in record.facts if isinstance(fact, DeviceLost)]
    assert ("device-1", "no answer by the deadline") in [(fact.device, fact.reason) for fact in lost]
    later = [order for record in records[number + 1 :] for order in record.orders if isinstance(order, StartWork)]
    assert "device-1" not in {order.device for order in later}
    coordinator = Coordinator(FederationStore(folder).read()[0])  # without Flower, its facts give the same orders
    for record in records:
        assert tuple(coordinator.handle(record.at, record.facts)) == record.orders
    assert "works" in (folder / "federation.html").read_text()
