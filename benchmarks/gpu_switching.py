"""What it costs to hand one GPU from a resident job to another: steps by token, against each job alone.

Usage: PYTHONPATH=src python benchmarks/gpu_switching.py [--pairs resnet18+mobilenet_v3,…] [--seconds 2] [--out FILE]
Two jobs in processes of their own, both on the GPU, take turns of one step, so that every step comes right after a
switch: cycle = step₁ + step₂ + 2 × switch. CUDA events cannot be compared between processes; excess time can.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from measured import RESULTS, conditions
from trials.gpu import open_desk, program, rest, together

BATCH = 128


async def measure(pair: tuple[str, str], quantum_s: float, seconds: float) -> dict[str, Any]:
    """One pair, alone and by turns."""
    with tempfile.TemporaryDirectory() as folder:
        desk = await open_desk(Path(folder), mps=False, quantum_s=quantum_s)
        try:
            for name in pair:
                desk.introduce(name, program(name, graph=True, batch=BATCH))
            rates = await together(desk, dict.fromkeys(pair, 0.5), seconds, BATCH)
            await rest(desk, pair[1])
            solo = await together(desk, {pair[0]: 1.0}, seconds, BATCH)
            await rest(desk, pair[0])
            solo |= await together(desk, {pair[1]: 1.0}, seconds, BATCH)
        finally:
            await desk.close()
    steps_ms = {name: 1e3 * BATCH / rate for name, rate in solo.items()}
    taken = {name: rate / BATCH for name, rate in rates.items()}  # steps per second
    busy = sum(taken[name] * steps_ms[name] / 1e3 for name in pair)
    switches = 2 * min(taken.values()) if not quantum_s else None  # per second
    switch_ms = 1e3 * (1.0 - busy) / switches if switches else None
    row = {
        "pair": list(pair),
        "quantum_s": quantum_s,
        "alone_step_ms": {name: round(step, 3) for name, step in steps_ms.items()},
        "steps_per_s": {name: round(rate, 1) for name, rate in taken.items()},
        "busy": round(busy, 3),
        "switch_ms": None if switch_ms is None else round(switch_ms, 3),
    }
    print(row, flush=True)
    return row


def main() -> None:
    """Every pair with turns of one step, the first also with turns as long as usual."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", default="resnet18+mobilenet_v3,resnet50+vgg16")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--out", default="", help=f"write JSON here instead of {RESULTS.name}/gpu_switching.json")
    options = parser.parse_args()
    pairs = [tuple(pair.split("+")) for pair in options.pairs.split(",")]
    rows = [asyncio.run(measure((a, b), 0.0, options.seconds)) for a, b in pairs]
    a, b = pairs[0]
    rows.append(asyncio.run(measure((a, b), 0.02, options.seconds)))
    path = Path(options.out) if options.out else RESULTS / "gpu_switching.json"
    document = {"schema": 1, "benchmark": "gpu_switching", **conditions(), "batch": BATCH, "results": rows}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
