"""Contention model of one shared device: shares as caps, two contended resources, time slicing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from carpool.sim.worlds.traits import number


class Contender(NamedTuple):
    """One job on a device: what it would use of it alone, and what it holds of it."""

    sm: float  # share of the streaming multiprocessors it keeps busy when it has the device to itself, in (0, 1]
    memory_bw: float  # share of the memory bandwidth, likewise
    fraction: float = 1.0  # its cap
    turn: int = 0

    @property
    def cap(self) -> float:
        """Speed its own cap leaves it: u·x ≤ f."""
        return 1.0 if self.fraction >= self.sm else self.fraction / self.sm


@dataclass(frozen=True, slots=True)
class Contention:
    """The rule by which contenders of one device slow each other down; speeds are relative to having it alone.

    With SM use u, bandwidth use w and fraction f, job i beside the jobs j of its own turn goes at

        cap_i = min(1, f_i / u_i)
        x_i = cap_i / max(1 + κ·Σ_j f_j·w_j,  Σ_all min(u, f),  Σ_all w·cap)

    - A fraction is a cap, as an MPS active-thread percentage is one: a job that needs less is not slowed by it, and
      fractions may sum past 1.
    - Neighbours press on caches and memory in proportion to what their cap lets them reach (κ, in the manner of the
      linear interference models of gpulet, ATC'22, and iGniter, TPDS'23).
    - Nobody gets more than there is: the second term makes Σ x·u ≤ 1, the third Σ x·w ≤ 1. So the sum of speeds is at
      most 1 / max(min u, min w).

    That gives the four regimes of competitive sharing: caps that sum to 1 waste what light jobs leave, moderate
    over-subscription is best, and without caps the heaviest job's pressure brings everybody near time slicing. With
    κ = 2 it comes within a tenth of the rates measured on an H200 (`docs/worlds/h200.toml`).

    A job of a higher turn runs in what lower turns leave idle, and never slows them (AntMan, OSDI'20): it gets
    filler · max(0, 1 − busy) of the speed it would have among its own turn, busy = Σ x·u of the lower turns.
    """

    pressure: float = number(2.0, low=0.0)  # κ
    filler: float = number(0.9, low=0.0, high=1.0)  # of an idle cycle, what a higher turn can use
    parked: float = number(0.5, low=0.0, high=1.0, above=True)  # speed left when the contenders' memory does not fit

    def speed(self, own: Contender, others: Sequence[Contender]) -> float:
        """Speed of a job beside others, relative to having the device alone and whole."""
        left, part = 1.0, 1.0
        for turn in sorted({other.turn for other in others if other.turn < own.turn}):
            peers = [other for other in others if other.turn == turn]
            busy = sum([self._among(peer, peers) * peer.sm for peer in peers])
            left = max(0.0, left - part * busy)
            part = left * self.filler
        return part * self._among(own, [own, *[other for other in others if other.turn == own.turn]])

    def squeezed(self, needed: int, there: int) -> float:
        """Speed left when contenders need more memory than there is: they park each other, or cut their steps."""
        return 1.0 if not there or needed <= there else self.parked * there / needed

    def _among(self, own: Contender, peers: Sequence[Contender]) -> float:
        """Speed among peers of one turn, itself included."""
        reach = demand = traffic = 0.0
        for peer in peers:
            reach += peer.fraction * peer.memory_bw
            demand += min(peer.sm, peer.fraction)
            traffic += peer.memory_bw * peer.cap
        reach -= own.fraction * own.memory_bw
        return own.cap / max(1.0 + self.pressure * max(0.0, reach), demand, traffic)
