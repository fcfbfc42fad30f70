"""Determinism: derives seeds, sets and restores global generators, enables deterministic torch kernels."""

from __future__ import annotations

import hashlib
import os
import random
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, TextIO

import numpy as np
import torch
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: the step of SplitMix64
_TO_UNIT = np.float32(2.0**-24)


def derive(purpose: str, *numbers: int) -> int:
    """A 63-bit number that follows from a purpose and numbers: unlike ``hash()`` it is the same everywhere."""
    text = ":".join((purpose, *map(str, numbers)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def permutation(size: int, key: int) -> NDArray[np.int64]:
    """All numbers below ``size`` in an order that follows from the key.

    NumPy keeps the raw stream of a bit generator stable for ever, but not what it makes of it (NEP 19); so the order is
    that of raw numbers sorted.
    """
    raw = np.random.Philox(key=key).random_raw(size)
    return np.argsort(raw, kind="stable").astype(np.int64, copy=False)


def uniforms(key: int, samples: NDArray[np.int64], columns: range) -> NDArray[np.float32]:
    """Numbers in [0, 1), one row per sample: row and column alone decide each, whatever else is asked for.

    SplitMix64 (Steele, Lea, Flood 2014) used as a counter: two rounds, first over the sample, then over the column.
    """
    rows = _mix(np.uint64(key) + (samples.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    steps = np.arange(columns.start + 1, columns.stop + 1, dtype=np.uint64) * _GOLDEN
    bits = _mix(rows[:, None] + steps[None, :])
    return (bits >> np.uint64(40)).astype(np.float32) * _TO_UNIT


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


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


def enable_determinism(*, deterministic: bool = True) -> list[str]:
    """Deny torch the freedoms that change bits from run to run; what could not be denied any more, in words.

    Operations without a deterministic form still run and are collected by `NondeterministicOps`. Not `deterministic` leaves torch
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


class NondeterministicOps:
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


def generator_states() -> dict[str, Any]:
    """Where all of them stand."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 - what users draw from
    return {
        "python": random.getstate(),
        "numpy": (kind, [int(key) for key in keys], position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
    }


def restore_generator_states(state: Mapping[str, Any]) -> None:
    """Let all of them go on from there; on a machine with other GPUs, those that are there."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002 - what users draw from
    torch.set_rng_state(state["torch"])
    for device, known in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(known, device)
