"""Elastic jobs on unlike devices: how many of which kind, by weighted completion time; all else as asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from carpool.policies.carpool import Carpool
from carpool.policies.registry import register


@register("elastic")
@dataclass(frozen=True, slots=True)
class Elastic(Carpool):
    """The default's prices, for what AFS moves: how many devices of which kind each job has.

    AFS compares two jobs, the one that ends first inheriting nothing and the other everything; here everybody inherits
    from everybody, on all kinds, with weights, the links that the estimator knows of, and the price of a resize. Hwang
    et al., "Elastic Resource Sharing for Distributed Deep Learning", NSDI 2021.
    """

    shares_devices: ClassVar[bool] = False
    tunes: ClassVar[bool] = False

    together: int = 1
