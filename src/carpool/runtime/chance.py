"""Every random number carpool draws follows from a seed and a name; pure, and the same on every machine and version."""

from __future__ import annotations

import hashlib

import numpy as np
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
