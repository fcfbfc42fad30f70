"""Every example is what its job file says it is, and learns on made-up data."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from carpool.jobs.job_file import read_jobs
from carpool.runtime.data.batches import AugmentRandom
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.state.digest import digest
from carpool.runtime.worker.entry_loader import find_entry, load_training

EXAMPLES = Path(__file__).parents[3] / "examples"
TINY: dict[str, dict[str, Any]] = {
    "digits.py:mlp": {"hidden": 16},
    "digits.py:cnn": {"channels": 4},
    "cifar10_cnn.py:cnn": {"channels": 2, "samples": 64, "batch_size": 16},
    "lstm_language_model.py:lstm": {"hidden": 8, "length": 16, "batch_size": 8},
    "ncf.py:ncf": {"users": 40, "items": 60, "batch_size": 32},
    "bert_qa.py:bert": {"dim": 8, "layers": 1, "samples": 40, "batch_size": 8},
    "graph_network.py:gcn": {"hidden": 4},
    "detector.py:yolo": {"channels": 2, "image": 32, "samples": 48, "batch_size": 8},
}


@pytest.fixture(autouse=True)
def path_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Entries put their folder on the path; and nobody's CIFAR-10 is meant."""
    monkeypatch.delenv("CARPOOL_CIFAR10", raising=False)
    before = list(sys.path)
    yield
    sys.path[:] = before


def load(entry: str, **args: Any) -> Any:
    return load_training(entry, {**TINY[entry], **args}, folder=EXAMPLES)


@pytest.mark.parametrize("entry", TINY)
def test_examples_train_and_evaluate(entry: str) -> None:
    training = load(entry)
    assert training.evaluate is not None
    assert training.best
    trainer = Trainer(training)
    losses = [trainer.step().loss for _ in range(2)]
    assert all(math.isfinite(loss) for loss in losses)
    metrics = trainer.evaluate()
    assert metrics
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("entry", TINY)
def test_every_worker_begins_with_the_same_weights(entry: str) -> None:
    assert digest(load(entry).model) == digest(load(entry).model)


@pytest.mark.parametrize("entry", TINY)
def test_examples_can_be_exact(entry: str) -> None:
    trainer = Trainer(load(entry), exact=True, shards=2)
    assert math.isfinite(trainer.step().loss)


def test_the_job_file_has_every_example() -> None:
    jobs = read_jobs(EXAMPLES / "jobs.toml").jobs
    entries = {job.program.entry for job in jobs if job.program.entry}
    scripts = {job.program.command[1] for job in jobs if job.program.command}
    assert entries == set(TINY)
    files = {entry.partition(":")[0] for entry in entries} | scripts
    assert files == {path.name for path in EXAMPLES.glob("*.py")}
    assert len(jobs) == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    "job", [job for job in read_jobs(EXAMPLES / "jobs.toml").jobs if job.program.entry], ids=lambda job: job.spec.id
)
def test_jobs_learn(job: Any) -> None:
    program = job.program
    trainer = Trainer(
        load_training(program.entry, program.args, seed=program.seed, folder=Path(program.folder)),
        exact=program.exact,
        shards=program.shards,
    )
    losses = [done.loss for done in trainer.steps()]
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])


def test_questions_from_a_file(tmp_path: Path) -> None:
    text = "Long ago, in Ghent, Anna built a bridge. It still stands."
    asked = {"question": "Who built it?", "answers": [{"text": "Anna", "answer_start": text.index("Anna")}]}
    data = {"data": [{"paragraphs": [{"context": text, "qas": [asked, {"question": "?", "answers": []}]}]}]}
    (tmp_path / "q.json").write_text(json.dumps(data))
    (question,) = find_entry("bert_qa.py:read_squad", EXAMPLES)(str(tmp_path / "q.json"))
    assert question.asked == ["who", "built", "it", "?"]
    assert question.text[question.begin : question.end + 1] == ["anna"]


@pytest.mark.parametrize("length", [8, 12, 40])
def test_an_answer_stays_in_the_window(length: int) -> None:
    encode, ask = (find_entry(f"bert_qa.py:{name}", EXAMPLES) for name in ("encode", "Question"))
    text = [f"w{place}" for place in range(30)]
    number = {word: place for place, word in enumerate(text, start=10)}
    questions = [ask(["why", "?"], text, place, place + 1) for place in range(29)]
    words, kinds, begin, end = encode(questions, number, length).tensors
    rows = torch.arange(29)
    assert torch.equal(words[rows, begin], rows + 10)
    assert torch.equal(words[rows, end], rows + 11)
    assert bool((kinds[rows, begin] == 1).all())


def test_text_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 20)
    training = load("lstm_language_model.py:lstm", path=str(tmp_path / "text.txt"))
    now, later = training.dataset.batch(torch.arange(2))
    assert torch.equal(now[0, 1:], later[0, :-1])


def test_papers_from_a_file(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "tiny.npz",
        x_data=np.ones(3, np.float32),
        x_indices=np.array([0, 1, 1], np.int16),
        x_indptr=np.array([0, 2, 2, 3], np.int32),
        x_shape=np.array([3, 2]),
        y=np.array([0, 1, 1], np.int8),
        edge_index=np.array([[0], [1]], np.int32),
        train_idx=np.array([0, 1], np.int16),
        test_idx=np.array([2], np.int16),
    )
    papers = find_entry("graph_network.py:read_papers", EXAMPLES)(str(tmp_path / "tiny.npz"))
    assert papers.graph.words.tolist() == [[0.5, 0.5], [0.0, 0.0], [0.0, 1.0]]
    expected = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    torch.testing.assert_close(papers.graph.hears, expected)


def test_shifted_pictures_do_not_depend_on_the_cut() -> None:
    shift = find_entry("cifar10_cnn.py:flip_and_shift", EXAMPLES)
    images, labels = torch.rand(6, 3, 8, 8), torch.arange(6)
    numbers = np.arange(6, dtype=np.int64)
    whole, _ = shift((images, labels), AugmentRandom(0, 0, numbers))
    parts = [shift((images[r], labels[r]), AugmentRandom(0, 0, numbers[r]))[0] for r in (slice(0, 2), slice(2, 6))]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, images)
