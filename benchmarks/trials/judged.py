"""Computes reference results in a separate process: plain loops, one-device gradients, loss curves.

Reads a list of questions as JSON from stdin and prints the answers as JSON, in order; `ask` is the caller's side.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.worker.entry_loader import load_training
from carpool.testing.reference import plain_loop

ROOT = Path(__file__).resolve().parents[2]
ENTRY = f"{Path(__file__).resolve().with_name('paced.py')}:paced"


def ask(questions: Sequence[dict[str, Any]], timeout_s: float = 600.0) -> list[Any]:
    """Have questions answered by a child that cannot outlive its time."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    answered = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        env=env,
        timeout=timeout_s,
        check=False,
    )
    if answered.returncode:
        raise SystemExit(f"the reference failed: {answered.stderr[-2000:]}")
    answers: list[Any] = json.loads(answered.stdout)
    return answers


def plain(args: dict[str, Any], seed: int, shards: int | None, threads: int) -> str:
    """The digest of an ordinary loop."""
    torch.set_num_threads(threads)
    return plain_loop(load_training(ENTRY, args, seed=seed), shards=shards, seed=seed).digest


def gradients(args: dict[str, Any], seed: int, record: str) -> list[float]:
    """|recorded gradient - one-device gradient| / |one-device gradient| of each step, from the recorded weights."""
    torch.set_num_threads(1)
    training = load_training(ENTRY, args, seed=seed)
    trainer = Trainer(training, seed=seed)
    held = [p for group in training.optimizer.param_groups for p in group["params"]]
    errors = []
    while not trainer.stop_reason:
        step = trainer.next_step()
        loss = trainer.single_pass(step)
        if training.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for p in held if p.grad is not None], training.clip_norm)
        here = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in held])
        trainer.advance(step, trainer.apply_single_pass(step, loss))
        if trainer.evaluation_due:
            trainer.record_metrics(trainer.evaluate())
        there = torch.load(Path(record) / f"{trainer.cursor.step}.pt")
        errors.append(float((there["gradient"] - here).norm() / here.norm()))
        training.model.load_state_dict(there["model"])  # the next step begins from equal weights
    return errors


def curve(args: dict[str, Any], seed: int, record: str, every: int) -> list[float]:
    """The loss over all data in eval mode, of the recorded weights after every so many steps."""
    torch.set_num_threads(1)
    training = load_training(ENTRY, args, seed=seed)
    data: Any = training.dataset
    batch = data.batch(torch.arange(len(data)))
    training.model.eval()
    losses = []
    for step in range(every, args["steps"] + 1, every):
        training.model.load_state_dict(torch.load(Path(record) / f"{step}.pt")["model"])
        with torch.no_grad():
            losses.append(float(training.loss(training.model, batch)))
    return losses


ANSWERS: dict[str, Callable[..., Any]] = {"plain": plain, "gradients": gradients, "curve": curve}


def main() -> None:
    """Answer what stdin asks."""
    questions = json.load(sys.stdin)
    print(json.dumps([ANSWERS[question.pop("what")](**question) for question in questions]))


if __name__ == "__main__":
    main()
