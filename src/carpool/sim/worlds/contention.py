"""Contention model of one shared device: shares as caps, two contended resources, time slicing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from carpool.sim.worlds.traits import number


class Contender(NamedTuple):
    """One job on a device: its use when alone, and its cap."""

    sm: float  # share of the streaming multiprocessors it keeps busy when it has the device to itself, in (0, 1]
    memory_bw: float  # share of the memory bandwidth, likewise
    fraction: float = 1.0  # its cap
    turn: int = 0

    @property
    def cap(self) -> float:
        """Speed under its own cap: u·x ≤ f."""
        return 1.0 if self.fraction >= self.sm else self.fraction / self.sm


@dataclass(frozen=True, slots=True)
class Contention:
    """How jobs on one device slow each other down; speeds are relative to alone.

    With SM use u, bandwidth use w and fraction f, job i beside the jobs j of its own turn runs at

        cap_i = min(1, f_i / u_i)
        x_i = cap_i / max(1 + κ·Σ_j f_j·w_j,  Σ_all min(u, f),  Σ_all w·cap)

    - A fraction is a cap, like an MPS active-thread percentage: a job that needs less is not slowed by it, and
      fractions may sum past 1.
    - Neighbours contend for caches and memory in proportion to their caps (κ, like the linear interference models of
      gpulet, ATC'22, and iGniter, TPDS'23).
    - Resources are not exceeded: the second term makes Σ x·u ≤ 1, the third Σ x·w ≤ 1.

    If caps sum to 1, what light jobs leave unused is lost; sums moderately above 1 are fastest; without caps, the
    heaviest job slows all jobs to about the speed of time slicing. With κ = 2, predicted rates are within a tenth of
    those measured on an H200 (`docs/worlds/h200.toml`).

    A job of a higher turn runs while lower turns are idle, and never slows them (AntMan, OSDI'20): it gets
    filler · max(0, 1 − busy) of its speed among its own turn, busy = Σ x·u of the lower turns.
    """

    pressure: float = number(2.0, low=0.0)  # κ
    filler: float = number(0.9, low=0.0, high=1.0)  # of an idle cycle, what a higher turn can use
    parked: float = number(0.5, low=0.0, high=1.0, above=True)  # speed left when the contenders' memory does not fit

    def speed(self, own: Contender, others: Sequence[Contender]) -> float:
        """Speed of a job beside others, relative to alone on the whole device."""
        left, part = 1.0, 1.0
        for turn in sorted({other.turn for other in others if other.turn < own.turn}):
            peers = [other for other in others if other.turn == turn]
            busy = sum([self._among(peer, peers) * peer.sm for peer in peers])
            left = max(0.0, left - part * busy)
            part = left * self.filler
        return part * self._among(own, [own, *[other for other in others if other.turn == own.turn]])

    def squeezed(self, needed: int, there: int) -> float:
        """Speed factor when the jobs need more memory than there is."""
        return 1.0 if not there or needed <= there else self.parked * there / needed

    def _among(self, own: Contender, peers: Sequence[Contender]) -> float:
        reach = demand = traffic = 0.0
        for peer in peers:
            reach += peer.fraction * peer.memory_bw
            demand += min(peer.sm, peer.fraction)
            traffic += peer.memory_bw * peer.cap
        reach -= own.fraction * own.memory_bw
        return own.cap / max(1.0 + self.pressure * max(0.0, reach), demand, traffic)
