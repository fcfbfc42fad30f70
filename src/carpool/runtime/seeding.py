"""Same seed, same bits: how randomness is set and which freedoms torch is denied."""

from __future__ import annotations

import os
import random
import re
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import TextIO

import numpy as np
import torch

from carpool.runtime.chance import derive

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_AT_ONCE = 64  # steps whose keys are derived in a row
_NOTHING = nullcontext()
# The global generators that users draw from. Looked up here once: in a step caches are cold, and every look costs.
_seed_python, _seed_torch = random.seed, torch.default_generator.manual_seed
_seed_numpy = np.random.seed
# How torch words it when an operation has no deterministic form.
_UNSURE = re.compile(
    r"does not have a deterministic implementation|defaults to a non-deterministic|Deterministic behavior was enabled"
)


def seed_entry(seed: int) -> None:
    """Seed Python, NumPy and torch, as is done before an entry is called."""
    reseed(derive("entry", seed))


def seed_pass(seed: int, step: int, piece: int, number: int = 0) -> None:
    """Reseed before the pass over one piece of a step: a shard in exact mode, a part in default mode.

    Both modes share the rule, so that one part and one shard are the same training. Where memory allows no pass over
    the whole piece, ``number`` counts those over its stretches.
    """
    if piece or number:
        reseed(derive("pass", seed, step, piece, *([number] if number else [])))
    else:
        reseed(_first_keys(seed, step // _AT_ONCE)[step % _AT_ONCE])


@lru_cache(maxsize=4)  # a process has one seed; tests have some
def _first_keys(seed: int, stretch: int) -> tuple[int, ...]:
    """The keys of the first pieces of some steps in a row.

    In a step caches are cold, and deriving one takes as long as several in a row: most steps have but one piece.
    """
    steps = range(stretch * _AT_ONCE, (stretch + 1) * _AT_ONCE)
    return tuple(derive("pass", seed, step, 0) for step in steps)


def seed_update(seed: int, step: int) -> None:
    """Reseed before an update from several shards: which of them was passed last in this process must not show."""
    reseed(derive("update", seed, step))


def seed_sample(seed: int, epoch: int, sample: int) -> None:
    """Reseed before a sample is read from a dataset that draws random numbers while being read."""
    reseed(derive("sample", seed, epoch, sample))


def seed_batch(seed: int, epoch: int, first: int) -> None:
    """Reseed before samples are made a batch, for whatever draws then: the same for a shard wherever it is computed."""
    reseed(derive("batch", seed, epoch, first))


def seed_augment(seed: int, epoch: int, first: int) -> None:
    """Reseed before a batch is augmented: the batch may have been made in another process."""
    reseed(derive("augmenting", seed, epoch, first))


def seed_evaluation(seed: int, step: int) -> None:
    """Reseed before an evaluation."""
    reseed(derive("evaluation", seed, step))


def reseed(key: int) -> None:
    """Set the global generators of Python, NumPy and torch.

    ``torch.manual_seed`` does the same, but takes 0.2 ms where CUDA is not started (it files a stack trace).
    """
    _seed_python(key)
    _seed_numpy(key & 0xFFFFFFFF)
    _seed_torch(key)
    if _cuda_started():
        torch.cuda.manual_seed_all(key)


def _cuda_started() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def settle(*, deterministic: bool = True) -> list[str]:
    """Deny torch the freedoms that change bits from run to run; what could not be denied any more, in words.

    Operations without a deterministic form still run and are collected by `Caveats`. Not `deterministic` leaves torch
    the freedoms it takes by itself. Trying out the kernels of every convolution is none of them: beside neighbours that
    takes 10 to 28 s in every new process (`benchmarks/gpu_sharing.py`), for a few percent. An entry may ask for it.
    """
    if not deterministic:
        torch.use_deterministic_algorithms(False)
        return ["deterministic = false: equal bits are not promised"]
    notes = []
    if _WORKSPACE not in os.environ and _cuda_started():
        notes.append(f"{_WORKSPACE} was not set before CUDA started: matrix products may differ from run to run")
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Otherwise torch fills every new tensor with NaN, which costs time and only matters to programs that read garbage.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    return notes


def intra_op_threads(count: int | None) -> AbstractContextManager[None]:
    """Compute with this many threads inside each operation (the number changes the bits); ``None`` leaves it."""
    return _NOTHING if count is None else _on_threads(count)


@contextmanager
def _on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Caveats:
    """The operations that ran without a deterministic form: each withdraws the promise of equal bits.

    Torch tells by warnings, one per call. While `watching`, they are collected here and not shown; other warnings are
    shown once each, as they would be without us. Whoever makes many steps watches around all of them: within, watching
    again costs next to nothing, unless somebody put a filter before ours meanwhile.
    """

    def __init__(self) -> None:
        self.operations: list[str] = []
        self._shown: set[tuple[str, str, int]] = set()
        self._filter: object = None  # the one that is in force while watching
        self._before = warnings.showwarning

    def watching(self) -> AbstractContextManager[None]:
        """Collect what torch says about determinism meanwhile."""
        if self._filter is not None and warnings.filters and warnings.filters[0] is self._filter:
            return _NOTHING
        return self._watch()

    @contextmanager
    def _watch(self) -> Iterator[None]:
        outer = self._filter
        with warnings.catch_warnings():
            if outer is None:
                self._before = warnings.showwarning
            warnings.filterwarnings("always", message=f"(?s).*({_UNSURE.pattern})")
            warnings.showwarning = self._show
            self._filter = warnings.filters[0]
            try:
                yield
            finally:
                self._filter = outer

    def _show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        # catch_warnings makes Python forget what it has shown, so that is remembered here.
        if (seen := (str(message), filename, lineno)) not in self._shown:
            self._shown.add(seen)
            if not self._note(str(message)):
                self._before(message, category, filename, lineno, file, line)

    def _note(self, message: str) -> bool:
        if not _UNSURE.search(message):
            return False
        operation = message.partition(" does not have")[0].partition(" defaults to")[0].partition(". ")[0].strip()
        if operation not in self.operations:
            self.operations.append(operation)
        return True
