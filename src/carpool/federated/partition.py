"""Partitioners: how the samples of a dataset are spread over devices; pure functions of a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from carpool.core.errors import InputError, UnknownName
from carpool.core.typed_fields import Range

Indices = NDArray[np.int64]
SCHEMES = ("iid", "labels", "sizes")


@dataclass(frozen=True, slots=True)
class Partition:
    """How a dataset is spread.

    ``iid``: equal random parts, or parts in the proportions ``sizes``. ``labels``: for each label the proportions of
    devices are drawn from Dirichlet(``alpha``), so that a small alpha gives each device few labels. ``sizes``: the
    sizes of the parts are drawn from Dirichlet(``alpha``), the labels are not skewed.
    """

    scheme: str = "iid"
    alpha: Annotated[float, Range(1e-3, 1e6)] = 0.5
    sizes: tuple[Annotated[float, Range(0, 1e9)], ...] = ()  # relative size of each device's part; empty: equal
    seed: int = 0

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise UnknownName("partition", self.scheme, SCHEMES)
        if self.sizes and (self.scheme != "iid" or sum(self.sizes) <= 0):
            raise InputError(f"sizes are {list(self.sizes)}", way_out="Give sizes with scheme 'iid', not all 0.")

    def split(self, num_samples: int, num_parts: int, labels: Sequence[int] | Indices | None = None) -> list[Indices]:
        """Indices of each device's samples, ascending; every sample is in exactly one part."""
        random = np.random.default_rng((self.seed, num_parts, num_samples))
        if self.scheme == "labels":
            if labels is None:
                raise InputError(
                    "the dataset has no labels to skew", way_out="Use scheme 'sizes', or a dataset with labels."
                )
            return self._by_labels(random, np.asarray(labels), num_samples, num_parts)
        parts = np.asarray(self.sizes or np.ones(num_parts), dtype=np.float64)
        if len(parts) != num_parts:
            raise InputError(f"sizes has {len(parts)} values for {num_parts} devices", way_out="Give one per device.")
        if self.scheme == "sizes":
            parts = random.dirichlet(np.full(num_parts, self.alpha))
        return _cut(random.permutation(num_samples), parts)

    def _by_labels(self, random: np.random.Generator, labels: Indices, size: int, num_parts: int) -> list[Indices]:
        if labels.shape != (size,):
            raise InputError(f"{labels.shape} labels for {size} samples", way_out="Give one label per sample.")
        parts: list[list[Indices]] = [[np.empty(0, np.int64)] for _ in range(num_parts)]
        for label in np.unique(labels):
            members = random.permutation(np.flatnonzero(labels == label))
            cut = _cut(members, random.dirichlet(np.full(num_parts, self.alpha)))
            for part, found in zip(parts, cut, strict=True):
                part.append(found)
        return [np.sort(np.concatenate(part)) for part in parts]


def _cut(order: Indices, parts: NDArray[np.float64]) -> list[Indices]:
    """Consecutive pieces of an order in these proportions."""
    edges = np.rint(np.cumsum(parts / parts.sum()) * len(order)).astype(np.int64)
    edges[-1] = len(order)
    return [np.sort(piece) for piece in np.split(order, edges[:-1])]
