"""Measures what a step consists of: kernels, multiprocessor fill, arithmetic, bytes moved."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from colocation.tasks import Task, build


class Clerks:
    """Processes outside the shared service that take the traits of tasks, while others load."""

    def __init__(self, tasks: Sequence[Task], device: str, count: int) -> None:
        context = get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        for place in range(count):
            own, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_take, args=(theirs, tasks[place::count], device), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(own)
            self._processes.append(process)

    def collect(self, limit_s: float) -> dict[str, dict[str, Any]]:
        """Traits by task, as far as they came."""
        found: dict[str, dict[str, Any]] = {}
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            try:
                while pipe.poll(limit_s):
                    name, traits = pipe.recv()
                    found[name] = traits
            except EOFError:
                pass
            if process.is_alive():
                process.kill()
            process.join(5.0)
        return found


def _take(pipe: Connection, tasks: Sequence[Task], device: str) -> None:
    import torch

    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for task in tasks:
        try:
            pipe.send((task.name, traits(task, device)))
        except Exception as error:  # noqa: BLE001  # one task that cannot be looked at does not end the others
            pipe.send((task.name, {"error": f"{type(error).__name__}: {str(error)[:200]}"}))
        if device == "cuda":
            torch.cuda.empty_cache()


def traits(task: Task, device: str) -> dict[str, float]:
    """Per step: operations, floating-point operations, bytes of the tensors read and written; and its kernels."""
    from torch.utils.flop_counter import FlopCounterMode

    built = build(task, device)
    for _ in range(3):
        built.step()
    peak = _peak(built.step) if device == "cuda" else 0
    with FlopCounterMode(display=False) as arithmetic:
        built.step()
    traffic = _traffic()
    with traffic:
        built.step()
    found = {"flops": float(arithmetic.get_total_flops()), "bytes": float(traffic.moved), "operations": traffic.count}
    found["peak_bytes"] = peak
    found["parameters"] = sum(parameter.numel() for parameter in built.parameters)
    return found | (_kernels(built.step) if device == "cuda" else {})


def _traffic() -> Any:
    """Adds up the bytes of all tensors that operations read and write, as if nothing were cached."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Traffic(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.moved = self.count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if not func.is_view:
                touched = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
                self.moved += sum(tensor.numel() * tensor.element_size() for tensor in touched)
                self.count += 1
            return result

    return Traffic()


def _peak(step: Any) -> int:
    """Bytes that tensors take at most during a step."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())


def _kernels(step: Any) -> dict[str, float]:
    """Of one step on the device: how many kernels, their time, and how far they fill it, weighted by time."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        step()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        seen.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text(encoding="utf-8"))["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if not kernels:
        return {}
    busy = sum(kernel["dur"] for kernel in kernels)

    def mean(value: Any) -> float:
        return float(sum(value(kernel["args"]) * kernel["dur"] for kernel in kernels) / busy)

    return {
        "kernels": len(kernels),
        "busy_s": busy * 1e-6,
        "fill": mean(lambda args: min(1.0, float(args.get("blocks per SM", 1.0)))),
        "occupancy": mean(_occupancy),
        "short": sum(kernel["dur"] for kernel in kernels if kernel["dur"] < 10.0) / busy,  # time in brief kernels
    }


def _occupancy(args: Mapping[str, Any]) -> float:
    return float(args.get("est. achieved occupancy %", 0.0)) / 100.0
