"""Long-lived process with a fixed share of the device that loads tasks and runs them on command."""

from __future__ import annotations

import gc
import os
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from colocation.tasks import Built, Task, build

from carpool.runtime.compat.process_lifetime import exit_with_parent

_WARM_UP = 4  # eager steps before the capture
_LOOK_S = 0.5  # between looks whether a seat lives
_LEAVE_S, _KILL_S = 15.0, 3.0  # for all seats to leave, and to end when they are killed


class Gone(Exception):
    """A seat did not answer in time, or died."""


@dataclass(slots=True)
class Window:
    """When to run and when to count, in seconds of the machine's monotonic clock."""

    start: float
    count_from: float
    count_until: float


class Seat:
    """The parent's end."""

    def __init__(self, share: int, environment: Mapping[str, str], device: str) -> None:
        self.share = share
        self.task: Task | None = None
        context = get_context("fork")  # torch is imported once, in the parent, which never touches the device
        self._pipe, theirs = context.Pipe()
        own = {**environment, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share)} if environment else {}
        self.process = context.Process(target=_serve, args=(theirs, own, device, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, *words: Any) -> None:
        """Send a command."""
        self._pipe.send(words)

    def answer(self, limit_s: float) -> Any:
        """What came back; a seat that died is not waited for, though others hold copies of its pipe."""
        deadline = time.monotonic() + limit_s
        while not self._pipe.poll(_LOOK_S):
            if not self.process.is_alive() and not self._pipe.poll():
                raise Gone(f"share {self.share}: exit code {self.process.exitcode}")
            if time.monotonic() > deadline:
                self.process.kill()
                raise Gone(f"share {self.share}: no answer in {limit_s:.0f} s")
        try:
            return self._pipe.recv()
        except EOFError:
            raise Gone(f"share {self.share}: exit code {self.process.exitcode}") from None

    def close(self) -> None:
        """Tell it to end, and see to it."""
        close_all([self])

    def dismiss(self) -> None:
        """Tell it to end."""
        with suppress(OSError):
            self._pipe.send(("quit",))


def close_all(seats: Sequence[Seat]) -> None:
    """Tell seats to end, and see to it: clients of MPS that are killed may hold their memory for minutes."""
    for seat in seats:
        seat.dismiss()
    _await(seats, _LEAVE_S)
    late = [seat for seat in seats if seat.process.is_alive()]
    for seat in late:
        seat.process.kill()
    _await(late, _KILL_S)


def _await(seats: Sequence[Seat], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    for seat in seats:
        seat.process.join(max(0.0, deadline - time.monotonic()))


def _serve(pipe: Connection, environment: dict[str, str], device: str, parent: int) -> None:
    exit_with_parent(parent)  # other seats hold copies of the pipe, so that its end would not be heard of
    os.environ.update(environment)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts
    warnings.simplefilter("ignore")  # torch names every operation without a deterministic form
    runner = _Runner(device)
    while True:
        try:
            command, *words = pipe.recv()
        except EOFError:
            return
        if command == "quit":
            with suppress(Exception):  # it goes in any case
                runner.clear()
            return
        try:
            pipe.send(getattr(runner, command)(*words))
        except Exception as error:  # noqa: BLE001  # whatever it is, the parent must hear of it
            pipe.send({"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1500:]})


def _sleep_until(instant: float) -> None:
    while (left := instant - time.monotonic()) > 0.0:
        time.sleep(max(0.0, left - 0.0005))


def _heir(trainer: Any, heir: Any) -> Any:
    """Another trainer of the same training, with the state of one that goes."""
    from carpool.runtime.process.shared_memory import new_memory_file
    from carpool.runtime.state.mirror import read_mirror, write_mirror
    from carpool.runtime.state.tensor_file import StateParts

    file = new_memory_file("mirror")
    try:
        write_mirror(file, trainer.cursor.step, StateParts.of(trainer.state_dict()))
        heir.load_state_dict(read_mirror(file)[1])
    finally:
        os.close(file)
    return heir


class _Runner:
    """The child's side: one task at a time, its step as a graph where that can be."""

    def __init__(self, device: str) -> None:
        import torch

        torch.set_num_threads(1)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        self._device = device
        self._built: Built | None = None
        self._trainer: Any = None
        self._launch: Any = None
        self._graph: Any = None

    def clear(self) -> dict[str, Any]:
        """Give the last task's memory back."""
        import torch

        self._built = self._trainer = self._launch = self._graph = None
        gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()
        return {}

    def load(self, task: Task, deterministic: bool | None = None) -> dict[str, Any]:
        """Put a task where there is none, with carpool's settings for equal bits or with any kernels; how it runs."""
        import torch

        if deterministic is not None:
            torch.use_deterministic_algorithms(deterministic, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False
            torch.backends.cudnn.benchmark = False  # as carpool leaves it, too
        if self._device != "cuda":
            self._built = build(task, self._device)
            self._launch = self._built.step
            return {"graph": False, "sms": 0, "reserved_bytes": 0}
        built = self._built = build(task, "cuda")
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                built.step()
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # a graph has a pool of its own: not to hold both
        torch.cuda.reset_peak_memory_stats()
        note = self._capture(built)
        for _ in range(3):
            self._launch()
        torch.cuda.synchronize()
        return {
            "graph": not note,
            "note": note,
            "sms": torch.cuda.get_device_properties(0).multi_processor_count,
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }

    def train(self, task: Task, deterministic: bool = True, moved: bool = False) -> dict[str, Any]:
        """Put a task in carpool's own hands: its trainer makes the steps, recorded where it can, as a worker would.

        One that was `moved` has taken its state over from another, as a worker does whose share is new.
        """
        import torch

        trainer = self._new_trainer(task, deterministic)
        for _ in range(_WARM_UP + 2):
            trainer.step()
        if moved:
            trainer = _heir(trainer, self._new_trainer(task, deterministic))
            for _ in range(_WARM_UP + 2):
                trainer.step()
        self._trainer, self._launch = trainer, trainer.step
        sms = torch.cuda.get_device_properties(0).multi_processor_count if self._device == "cuda" else 0
        refusal = "" if trainer.graphs is None else trainer.graphs.eager_reason or trainer.graphs.eager_update_reason
        return {"graph": not refusal, "note": refusal, "sms": sms, "reserved_bytes": 0}

    def kernels(self, steps: int) -> dict[str, Any]:
        """What one step has the device do: kernels, copies and fills by name, with how often and how many µs."""
        import torch
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        on_gpu = self._device == "cuda"
        wait = torch.cuda.synchronize if on_gpu else lambda: None
        self._launch()
        wait()
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
            for _ in range(steps):
                self._launch()
            wait()
        work: dict[str, list[float]] = {}
        for event in seen.events() or ():
            if event.device_type == (DeviceType.CUDA if on_gpu else DeviceType.CPU):
                row = work.setdefault(event.name, [0.0, 0.0])
                row[0] += 1.0 / steps
                row[1] += event.time_range.elapsed_us() / steps
        return {"work": work}

    def mirror(self, task: Task, steps: int) -> dict[str, Any]:
        """What a mirror of the task in carpool's hands costs it."""
        from gpu_mirrors import measure

        return measure(self._trainer, self._new_trainer(task, deterministic=True), steps)

    def _new_trainer(self, task: Task, deterministic: bool) -> Any:
        from zoo_trainings import RECIPES, training

        from carpool.runtime.engine.trainer import Trainer

        if task.per_s:
            from sharing.fed import delivered

            made = delivered(task.model, task.batch, steps=1_000_000_000, per_s=task.per_s, **task.sizes)
        else:
            lr = RECIPES[task.model].lr * 1e-3  # not to diverge on made-up data
            made = training(task.model, task.batch, steps=1_000_000_000, seed=0, lr=lr, **task.sizes)
        made = replace(made, precision="tf32", channels_last=True)
        return Trainer(made, device=self._device, deterministic=deterministic)

    def _capture(self, built: Built) -> str:
        """Why the step could not be captured; nothing if it could."""
        import torch

        try:
            for parameter in built.parameters:
                parameter.grad = None
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                built.step()
        except Exception as error:  # noqa: BLE001  # any reason means: run it eagerly, and say so
            self._launch = built.step
            return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        self._graph, self._launch = graph, graph.replay
        return ""

    def work(self, start: float, steps: int, eager: bool = False) -> dict[str, float]:
        """Make so many steps from an instant on; the seconds until the device has made the last one."""
        launch, wait = self._built.step if eager and self._built is not None else self._launch, self._waiter()
        _sleep_until(start)
        for _ in range(steps):
            launch()
            wait()
        if self._device == "cuda":
            import torch

            torch.cuda.synchronize()
        return {"seconds": time.monotonic() - start}

    def run(self, window: Window, eager: bool = False) -> dict[str, float]:
        """Run through the window, by the code even where there is a graph if `eager`; steps per second inside of it."""
        launch, wait = self._built.step if eager and self._built is not None else self._launch, self._waiter()
        now = time.monotonic
        _sleep_until(window.start)
        ends: list[float] = [now()]
        while ends[-1] < window.count_until:
            launch()
            wait()
            ends.append(now())
        steps = np.arange(len(ends), dtype=float)
        first, last = np.interp([window.count_from, window.count_until], ends, steps)
        return {"steps_per_s": float(last - first) / (window.count_until - window.count_from)}

    def _waiter(self) -> Any:
        """Waits for the step before the last one, so that the device never starves."""
        if self._device != "cuda":
            return lambda: None
        import torch

        events = [torch.cuda.Event(), torch.cuda.Event()]
        torch.cuda.synchronize()
        events[1].record()
        turn = 0

        def wait() -> None:
            nonlocal turn
            events[turn].record()
            turn = 1 - turn
            events[turn].synchronize()

        return wait
