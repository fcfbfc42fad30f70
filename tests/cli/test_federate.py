import json
from pathlib import Path
from typing import Any

import pytest

from carpool.backends.flower.processes import free_port
from carpool.cli.main import run

ENTRY = """
import torch
from torch import nn
import carpool

def make(lr=0.1):
    inputs = torch.arange(40.0).view(-1, 1) / 40
    model = nn.Linear(1, 1)
    return carpool.Training(
        model, torch.optim.SGD(model.parameters(), lr=lr), torch.utils.data.TensorDataset(inputs, 2 * inputs),
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(), 4, carpool.Stop(epochs=1),
        evaluate=lambda model: {"error": float((model(inputs) - 2 * inputs).square().mean())})
"""
FILE = """
rounds = 3
[[task]]
name = "line"
entry = "entry.py:make"
partition = { sizes = [3, 1] }
[[device]]
name = "device"
slowdown = 1
count = 2
"""


def written(folder: Path, text: str = FILE) -> Path:
    (folder / "entry.py").write_text(ENTRY)
    (folder / "federation.toml").write_text(text)
    return folder / "federation.toml"


def test_a_federation_is_run_compared_and_not_run_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = written(tmp_path), str(tmp_path / "out")
    assert run(["federate", str(file), "--out", out, "--compare", "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    assert [result["plan"] for result in document["results"]] == ["balanced", "equal-steps"]
    for result in document["results"]:
        (task,) = result["tasks"]
        assert (task["rounds"], task["failed"], len(task["history"])) == (3, False, 3)
        assert result["outcomes"] == {"accepted": 6}
    assert run(["federate", str(file), "--out", out]) == 2
    assert run(["federate", str(file), "--out", out, "--resume", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["results"][0]["tasks"][0]["digest"] == document["results"][0]["tasks"][0]["digest"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"line"', '"a/b"'),
        ("rounds = 3", "rounds = 0"),
        ("rounds = 3", "round = 3"),
        ("rounds = 3", 'plan = "best"'),
        ("slowdown = 1", "speed = 1"),
        ("entry.py:make", "entry.py:made"),
        ("sizes = [3, 1]", 'scheme = "random"'),
        ("partition", 'target = "error < 1"\npartition'),
        ("partition", "max_update = -1\npartition"),
        ("[[device]]", "[[device]]\nname = 'device-0'\n[[device]]"),
        ("[[device]]", "[[device]]\ndevice = 'tpu'\n[[device]]"),
        ("sizes = [3, 1]", "sizes = [3, 1, 1]"),
        ("partition", "min_updates = 3\npartition"),
        ("partition", "betas = [0.9, 1]\npartition"),
        ("rounds = 3", "min_devices = 3"),
        ("rounds = 3", "epochs_range = [4, 1]"),
        ("rounds = 3", "levels = []"),
        ("partition", "batch_range = [8]\npartition"),
        ("partition", "batch_range = [8, 4]\npartition"),
        ("partition", "batch_size = 2\nbatch_range = [4, 8]\npartition"),
        (
            "[[device]]",
            "".join(f"[[task]]\nname = 't{n}'\nentry = 'entry.py:make'\n" for n in range(64)) + "[[device]]",
        ),
    ],
)
def test_bad_files_are_bad_input(tmp_path: Path, old: str, new: str) -> None:
    file = written(tmp_path, FILE.replace(old, new))
    assert run(["federate", str(file), "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_nothing_to_resume_is_bad_input(tmp_path: Path) -> None:
    assert run(["federate", str(written(tmp_path)), "--out", str(tmp_path / "out"), "--resume"]) == 2
    assert run(["federate", str(tmp_path / "none.toml")]) == 2


@pytest.mark.slow
def test_over_flower_the_weights_are_those_of_the_embedded_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("flwr")
    text = FILE.replace("rounds = 3", 'rounds = 1\nplan = "equal-epochs"').replace("sizes = [3, 1]", "sizes = [1]")
    file = written(tmp_path, text.replace("count = 2", "count = 1"))
    digests = []
    for transport in ("embedded", "flower"):
        words = ["federate", str(file), "--out", str(tmp_path / transport), "--transport", transport, "--json"]
        assert run(words) == 0
        (result,) = json.loads(capsys.readouterr().out)["results"]
        assert result["outcomes"] == {"accepted": 1}
        digests.append(result["tasks"][0]["digest"])
    assert digests[0] == digests[1]


def test_a_superlink_that_does_not_answer_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("flwr")
    words = ["--superlink", f"127.0.0.1:{free_port()}", "--insecure"]
    assert run(["federate", str(written(tmp_path)), "--out", str(tmp_path / "out"), *words]) == 2
    assert "--root-certificates" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--transport", "carrier"],
        ["--transport", "flower", "--compare"],
        ["--device", "device-0"],
        ["--device", "other", "--superlink", "127.0.0.1:1", "--insecure"],
        ["--superlink", "10.0.0.5:8000", "--insecure"],
    ],
)
def test_bad_words_for_flower_are_bad_input(tmp_path: Path, words: list[str]) -> None:
    pytest.importorskip("flwr")
    assert run(["federate", str(written(tmp_path)), "--out", str(tmp_path / "out"), *words]) == 2
