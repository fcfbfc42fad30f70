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
    """Hash a purpose and numbers to 63 bits; unlike ``hash()`` the same in every process."""
    text = ":".join((purpose, *map(str, numbers)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def permutation(size: int, key: int) -> NDArray[np.int64]:
    """Permute ``range(size)`` by a key.

    NumPy guarantees a stable raw stream of a bit generator, but not of its derived methods (NEP 19), so raw numbers are
    argsorted.
    """
    raw = np.random.Philox(key=key).random_raw(size)
    return np.argsort(raw, kind="stable").astype(np.int64, copy=False)


def uniforms(key: int, samples: NDArray[np.int64], columns: range) -> NDArray[np.float32]:
    """Random numbers in [0, 1), one row per sample; each depends only on key, sample and column.

    SplitMix64 (Steele, Lea, Flood 2014) in counter mode: one round over the sample, one over the column.
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
_KEY_BLOCK = 64  # steps whose keys are derived together
_NULL_CONTEXT = nullcontext()
# The global generators that users draw from. Bound once: attribute lookups are slow with the cold caches of a step.
_seed_python, _seed_torch = random.seed, torch.default_generator.manual_seed
_seed_numpy = np.random.seed
# Torch's warnings about operations without a deterministic implementation.
_NONDETERMINISTIC = re.compile(
    r"does not have a deterministic implementation|defaults to a non-deterministic|Deterministic behavior was enabled"
)


def seed_entry(seed: int) -> None:
    """Seed Python, NumPy and torch before an entry is called."""
    reseed(derive("entry", seed))


def seed_pass(seed: int, step: int, piece: int, number: int = 0) -> None:
    """Reseed before the pass over one piece of a step: a shard in exact mode, a part in default mode.

    ``number`` is the micro-batch within the piece. Both modes share the rule, so that one part and one shard give the
    same training.
    """
    if piece or number:
        reseed(derive("pass", seed, step, piece, *([number] if number else [])))
    else:
        reseed(_first_keys(seed, step // _KEY_BLOCK)[step % _KEY_BLOCK])


@lru_cache(maxsize=4)  # a process has one seed; tests have several
def _first_keys(seed: int, block: int) -> tuple[int, ...]:
    """The keys of the first pieces of a block of steps: with cold caches, one takes as long as several."""
    steps = range(block * _KEY_BLOCK, (block + 1) * _KEY_BLOCK)
    return tuple(derive("pass", seed, step, 0) for step in steps)


def seed_update(seed: int, step: int) -> None:
    """Reseed before an update from several shards, whose last one differs from rank to rank."""
    reseed(derive("update", seed, step))


def seed_sample(seed: int, epoch: int, sample: int) -> None:
    """Reseed before a sample is read: the dataset may draw random numbers."""
    reseed(derive("sample", seed, epoch, sample))


def seed_batch(seed: int, epoch: int, first: int) -> None:
    """Reseed before samples are collated: the same for a shard on any device."""
    reseed(derive("batch", seed, epoch, first))


def seed_augment(seed: int, epoch: int, first: int) -> None:
    """Reseed before a batch is augmented: a reader process may have made the batch."""
    reseed(derive("augmenting", seed, epoch, first))


def seed_evaluation(seed: int, step: int) -> None:
    """Reseed before an evaluation."""
    reseed(derive("evaluation", seed, step))


def reseed(key: int) -> None:
    """Seed the global generators of Python, NumPy and torch.

    ``torch.manual_seed`` takes 0.2 ms before CUDA is initialized, because it stores a stack trace.
    """
    _seed_python(key)
    _seed_numpy(key & 0xFFFFFFFF)
    _seed_torch(key)
    if _cuda_started():
        torch.cuda.manual_seed_all(key)


def _cuda_started() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def enable_determinism(*, deterministic: bool = True) -> list[str]:
    """Select deterministic algorithms in torch; return notes on what could not be made deterministic.

    Operations without a deterministic implementation still run; `NondeterministicOps` collects them. cuDNN autotuning
    stays off even without ``deterministic``: on a shared GPU it takes 10 to 28 s in every new process
    (`benchmarks/gpu_sharing.py`) and gains a few percent. An entry may enable it.
    """
    if not deterministic:
        torch.use_deterministic_algorithms(False)
        return ["deterministic = false: results may differ in bits from run to run"]
    notes = []
    if _WORKSPACE not in os.environ and _cuda_started():
        notes.append(f"{_WORKSPACE} was not set before CUDA started: matmuls may differ from run to run")
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Otherwise torch fills every new tensor with NaN, which only matters to programs that read uninitialized memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    return notes


def intra_op_threads(count: int | None) -> AbstractContextManager[None]:
    """Set torch's intra-op threads within the context, which may change bits; ``None`` leaves them."""
    return _NULL_CONTEXT if count is None or count == torch.get_num_threads() else _set_threads(count)


@contextmanager
def _set_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class NondeterministicOps:
    """Collects the operations that ran without a deterministic implementation, from torch's warnings.

    Within `collect` these warnings are not shown; others are shown once each, as usual. Entering `collect` costs almost
    nothing inside another `collect`, unless a new warning filter was put in front of ours.
    """

    def __init__(self) -> None:
        self.operations: list[str] = []
        self._shown: set[tuple[str, str, int]] = set()
        self._filter: object = None  # installed within `collect`
        self._show_others = warnings.showwarning

    def collect(self) -> AbstractContextManager[None]:
        if self._filter is not None and warnings.filters and warnings.filters[0] is self._filter:
            return _NULL_CONTEXT
        return self._collect()

    @contextmanager
    def _collect(self) -> Iterator[None]:
        outer = self._filter
        with warnings.catch_warnings():
            if outer is None:
                self._show_others = warnings.showwarning
            warnings.filterwarnings("always", message=f"(?s).*({_NONDETERMINISTIC.pattern})")
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
        # catch_warnings resets Python's record of warnings already shown.
        if (seen := (str(message), filename, lineno)) not in self._shown:
            self._shown.add(seen)
            if not self._note(str(message)):
                self._show_others(message, category, filename, lineno, file, line)

    def _note(self, message: str) -> bool:
        if not _NONDETERMINISTIC.search(message):
            return False
        operation = message.partition(" does not have")[0].partition(" defaults to")[0].partition(". ")[0].strip()
        if operation not in self.operations:
            self.operations.append(operation)
        return True


def generator_states() -> dict[str, Any]:
    """The states of the global generators of Python, NumPy, torch and all GPUs."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 - what users draw from
    return {
        "python": random.getstate(),
        "numpy": (kind, [int(key) for key in keys], position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
    }


def restore_generator_states(state: Mapping[str, Any]) -> None:
    """Restore the global generators; states of GPUs that this machine does not have are ignored."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002 - what users draw from
    torch.set_rng_state(state["torch"])
    for device, rng_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(rng_state, device)
