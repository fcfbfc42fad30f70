"""The recipes: the script, the job file and the declaration run; code for other packages parses."""

from __future__ import annotations

import ast
import re
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "how-to"
BLOCK = re.compile(r"^```\w+ file=(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> dict[str, str]:
    return dict(BLOCK.findall((PAGES / page).read_text(encoding="utf-8")))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    pytest.importorskip("torch").set_num_threads(1)
    for name, text in blocks("existing-script.md").items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, before)


def test_the_script_resumes(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(epochs: int) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", str(epochs)])
        runpy.run_path(str(folder / "train.py"), run_name="__main__")
        return [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]

    monkeypatch.setenv("CARPOOL_FOLDER", str(folder))
    assert run(2) == ["epoch 1", "epoch 2"]
    assert run(3) == ["epoch 3"]


def test_the_loop_with_a_session_runs_without_carpool(folder: Path) -> None:
    import torch

    variables = runpy.run_path(str(folder / "own_loop.py"))
    assert isinstance(variables["loss"], torch.Tensor)
    assert variables["loss"].item() < 0.2


def test_the_job_file_is_valid(folder: Path) -> None:
    from carpool.jobs.job_file import read_jobs

    jobs = read_jobs(folder / "jobs.toml").jobs
    assert [job.spec.id for job in jobs] == ["legacy", "legacy-slow"]
    assert jobs[0].program.command[:2] == ("python", "train.py")
    assert jobs[0].program.time_limit_s == 3600.0


def test_the_declaration_trains(folder: Path) -> None:
    from carpool.runtime.engine.trainer import Trainer
    from carpool.runtime.worker.entry_loader import load_training

    trainer = Trainer(load_training("declared.py:digits", {"epochs": 1}, folder=folder))
    losses = [done.loss for done in trainer.steps()]
    assert losses[-1] < 0.7 * losses[0]
    assert trainer.progress.metrics["accuracy"] > 0.5


def test_the_jobs_of_one_gpu_are_valid_and_train(tmp_path: Path) -> None:
    pytest.importorskip("torch").set_num_threads(1)
    from carpool.jobs.job_file import read_jobs
    from carpool.runtime.engine.trainer import Trainer
    from carpool.runtime.worker.entry_loader import load_training

    for name, text in blocks("one-gpu.md").items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert [job.spec.id for job in read_jobs(tmp_path / "scripts.toml").jobs] == ["small-lr", "large-lr"]
    wide = read_jobs(tmp_path / "jobs.toml").jobs[1].program
    losses = [done.loss for done in Trainer(load_training(wide.entry, dict(wide.args), folder=tmp_path)).steps()]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("page", ["hugging-face.md", "lightning.md"])
def test_code_for_other_packages_parses(page: str) -> None:
    files = blocks(page)
    assert files
    for name, text in files.items():
        ast.parse(text, name)


@pytest.mark.parametrize("page", ["existing-script.md", "hugging-face.md", "lightning.md"])
def test_the_pages_use_arguments_that_training_has(page: str) -> None:
    pytest.importorskip("torch")
    from carpool.runtime.engine.training import Training

    for name, text in blocks(page).items():
        if not name.endswith(".py"):
            continue
        for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
            if ast.unparse(call.func) == "carpool.Training":
                assert {keyword.arg for keyword in call.keywords} <= set(Training.__dataclass_fields__), name
