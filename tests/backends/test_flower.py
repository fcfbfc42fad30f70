"""A federation over real Flower processes: SuperLink, SuperNodes, relays and resident devices."""

from pathlib import Path
from typing import Any

import pytest

from carpool.backends.flower.processes import Security
from carpool.core.errors import InputError
from carpool.federated.federation import TaskName
from carpool.federated.federation_file import FederationFile, parse_federation
from tests.backends.test_federation_run import ENTRIES
from tests.support.federation_runs import Runs

pytest.importorskip("flwr")

# As in Flower's own examples; nothing here knows of carpool.
CLIENT_APP = """
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

def net():
    return torch.nn.Linear(4, 2)

def load_data(part, num_parts):
    inputs = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    return inputs[part::num_parts], (inputs[:, 0] > 0).long()[part::num_parts]

def accuracy(model):
    inputs, labels = load_data(0, 1)
    return {"accuracy": float((model(inputs).argmax(1) == labels).float().mean())}

def model_and_test():
    return net(), accuracy

@app.train()
def train(message: Message, context: Context) -> Message:
    model = net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, labels = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
    optimizer = torch.optim.SGD(model.parameters(), lr=context.run_config["lr"])
    for _ in range(20):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(inputs)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
"""


def federation(folder: Path, **more: Any) -> FederationFile:
    (folder / "entries.py").write_text(ENTRIES)
    (folder / "client_app.py").write_text(CLIENT_APP)
    tasks = [
        {"name": "own", "entry": "entries.py:make"},
        {
            "name": "app",
            "entry": "client_app.py:model_and_test",
            "client_app": "client_app.py:app",
            "client_config": {"lr": 0.5},
        },
    ]
    data = {"rounds": 2, "plan": "equal-epochs", "task": tasks, **more}
    return parse_federation(data, folder, "test")


def test_a_client_app_runs_unchanged_beside_another_task(run: Runs, tmp_path: Path) -> None:
    file = federation(tmp_path, rounds=4, device=[{"name": "device", "count": 3}])
    summaries, _ = run(file, tmp_path / "run")
    assert {name: (each.rounds, each.failed) for name, each in summaries.items()} == {
        "own": (4, False),
        "app": (4, False),
    }
    curve = [metrics["accuracy"] for _, metrics in summaries[TaskName("app")].metrics]
    assert curve[-1] > 0.9


def test_an_insecure_connection_stays_on_this_machine() -> None:
    for address in ("127.0.0.1:8000", "localhost:8000", "[::1]:8000"):
        Security(insecure=True).check(address)
    for address in ("10.0.0.5:8000", "example.org:8000"):
        with pytest.raises(InputError):
            Security(insecure=True).check(address)
        Security(root_certificates="ca.crt").check(address)
