"""Checks whether passes on several threads give the same bits every time, with several MKL settings.

    python benchmarks/runtime_bits.py [--threads 8] [--births 3] [--seconds 1.0]

Default mode promises repeatable runs on unchanged devices, which requires the libraries below torch to round alike. A
pass (loss and gradients of one batch from the same weights) is repeated at different memory addresses in several
forked processes, and different results are counted: with MKL's default, MKL_CBWR=AUTO and AUTO,STRICT. The median time
of a pass shows their cost. Exits with 1 unless every pass has one result where MKL was asked for it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from measured import save
from torch import nn
from torch.nn.functional import cross_entropy

WAYS = ("", "AUTO", "AUTO,STRICT")
Pass = Callable[[], list[torch.Tensor]]


class Last(nn.Module):
    """The last output of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Of a sequence."""
        output: torch.Tensor = self.layer(inputs)[0][:, -1]
        return output


def models() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Models with the shape of a batch."""
    wide = [module for _ in range(2) for module in (nn.Linear(2048, 2048), nn.ReLU())]
    convs = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten()]
    return {
        "perceptron, 16 samples": (nn.Sequential(*wide, nn.Linear(2048, 10)), (16, 2048)),
        "perceptron, 8 samples": (nn.Sequential(*wide, nn.Linear(2048, 10)), (8, 2048)),
        "perceptron, 512 samples": (nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)), (512, 512)),
        "cnn": (nn.Sequential(*convs, nn.Linear(64 * 256, 10)), (32, 3, 16, 16)),
        "lstm": (nn.Sequential(Last(nn.LSTM(128, 256, batch_first=True)), nn.Linear(256, 10)), (32, 16, 128)),
    }


def passes() -> dict[str, Pass]:
    """One pass of each model, from the same weights and the same batch."""
    torch.manual_seed(0)
    return {name: made(model, shape) for name, (model, shape) in models().items()}


def made(model: nn.Module, shape: Sequence[int]) -> Pass:
    """The loss and the gradients of a model."""
    inputs, labels = torch.randn(*shape), torch.randint(0, 10, (shape[0],))

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        loss = cross_entropy(model(inputs.clone()), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        return [loss.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]

    return run


def repeated(seconds: float) -> dict[str, dict[str, Any]]:
    """The different results of each pass, and how long it took, in this process."""
    found = {}
    for name, run in passes().items():
        seen: dict[str, int] = {}
        took = []
        ends = time.monotonic() + seconds
        while not took or time.monotonic() < ends:
            rubble = [torch.empty(random.randrange(1, 1 << 16)) for _ in range(8)]  # so that memory lies elsewhere
            began = time.perf_counter()
            results = run()
            took.append(time.perf_counter() - began)
            word = hashlib.sha256(b"".join(result.numpy().tobytes() for result in results)).hexdigest()[:12]
            seen[word] = seen.get(word, 0) + 1
            del rubble
        found[name] = {"results": seen, "ms": round(1e3 * statistics.median(took), 3)}
    return found


def born(way: str, threads: int, cores: Sequence[int], seconds: float) -> dict[str, dict[str, Any]]:
    """What a new process finds."""
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        os.environ.pop("MKL_CBWR", None)
        if way:
            os.environ["MKL_CBWR"] = way  # read at the first product
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
        with os.fdopen(writes, "w") as out:
            out.write(json.dumps(repeated(seconds)))
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as told:
        text = told.read()
    _, status = os.waitpid(pid, 0)
    if not text:
        raise RuntimeError(f"a process with MKL_CBWR={way!r} ended with {os.waitstatus_to_exitcode(status)}")
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found


def judged(births: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Over all processes: how many different results, how many passes, and the median time of one."""
    merged: dict[str, dict[str, Any]] = {}
    for name in births[0]:
        words = [birth[name]["results"] for birth in births]
        merged[name] = {
            "different": len({word for seen in words for word in seen}),
            "different_in_each": [len(seen) for seen in words],
            "passes": sum(sum(seen.values()) for seen in words),
            "ms": statistics.median(birth[name]["ms"] for birth in births),
        }
    return merged


def main() -> int:
    """Measure, print the table, and keep it."""
    cores = sorted(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=max(1, len(cores) // 2))
    parser.add_argument("--births", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each pass in each process")
    options = parser.parse_args()
    results: dict[str, Any] = {"threads": options.threads, "ways": {}}
    is_same = True
    for way in WAYS:
        named = f"MKL_CBWR={way}" if way else "as it comes"
        try:
            hand = cores[: options.threads]
            births = [born(way, options.threads, hand, options.seconds) for _ in range(options.births)]
        except (RuntimeError, ValueError) as error:
            print(f"{named}: {error}", flush=True)
            continue
        found = results["ways"][named] = judged(births)
        save("runtime_bits", results)
        for name, row in found.items():
            print(
                f"{named:>22}  {name:24} {row['different']} different of {row['passes']:5} passes "
                f"(in each process {row['different_in_each']}), {row['ms']:.2f} ms",
                flush=True,
            )
        is_same = is_same and (not way or all(row["different"] == 1 for row in found.values()))
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
