"""Generated clusters: nodes with NVLink, PCIe or both, joined by Ethernet, with hidden speeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from random import Random

from carpool.predictors.links.fabric import Fabric, FabricLink, Hop
from wiring.flows import Route, Transfers
from wiring.steps import Made, Session

_WARM_UP, _STEPS = 2, 8
_GIGA = 1e9
# bytes per second from and to, and seconds of latency, of each kind of link; drawn anew for every cluster
SPEEDS = {
    "nvlink": (20 * _GIGA, 120 * _GIGA, 3e-6),
    "pcie": (6 * _GIGA, 14 * _GIGA, 8e-6),
    "ethernet": (1.2 * _GIGA, 12 * _GIGA, 40e-6),
    "trunk": (1.2 * _GIGA, 12 * _GIGA, 20e-6),
}
_UNLIKE = 0.05  # how far links of one kind are from each other, relative


@dataclass(frozen=True, slots=True)
class Placed:
    """A training on certain devices with so many samples on each."""

    made: Made
    devices: tuple[int, ...]
    samples: float


class Machines:
    """One made-up cluster."""

    def __init__(self, seed: int) -> None:
        random = Random(seed)
        self.nodes: list[list[int]] = []  # devices
        self.kinds: list[str] = []  # by device
        wires: list[FabricLink] = []
        forms = ["nvswitch", "pcie", random.choice(("pairs", "nvswitch", "pcie")), random.choice(("pairs", "pcie"))]
        racks = random.choice((1, 2))
        for number, form in enumerate(forms):
            wires += self._node(number, form, random.choice((4, 4, 8)), "pcie-card" if form == "pcie" else "module")
            wires.append(FabricLink((f"n{number}", f"rack{number % racks}"), "ethernet"))
        wires += [FabricLink((f"rack{rack}", "spine"), "trunk") for rack in range(racks)] if racks > 1 else []
        self.fabric = Fabric(wires)
        self.slowness = {"module": 1.0, "pcie-card": random.uniform(1.3, 3.0)}
        self.speeds = {
            kind: random.uniform(log(low), log(high)) for kind, (low, high, _) in SPEEDS.items()
        }  # in logarithms
        self._each = [
            2.718281828 ** (self.speeds[wire.kind] + random.gauss(0.0, _UNLIKE)) for wire in wires for _ in (0, 1)
        ]
        self._latencies = [SPEEDS[wire.kind][2] for wire in wires for _ in (0, 1)]

    def _node(self, number: int, form: str, size: int, kind: str) -> list[FabricLink]:
        """Devices in pairs behind PCIe switches, and NVLink to a switch or between the two of a pair."""
        first = len(self.kinds)
        devices = list(range(first, first + size))
        self.nodes.append(devices)
        self.kinds += [kind] * size
        wires = []
        for device in devices:
            switch = f"n{number}.{(device - first) // 2}"
            wires.append(FabricLink((str(device), switch), "pcie"))
            if device % 2 == first % 2:
                wires.append(FabricLink((switch, f"n{number}"), "pcie"))
            if form == "nvswitch":
                wires.append(FabricLink((str(device), f"n{number}.nv"), "nvlink"))
            elif form == "pairs" and (device - first) % 2:
                wires.append(FabricLink((str(device - 1), str(device)), "nvlink"))
        return wires

    def route(self, start: int, end: int) -> Route:
        """Directed links, two numbers for each wire; from host to device where there is no start."""
        first = self.host(end) if start < 0 else str(start)
        return tuple([_directed(hop) for hop in self.fabric.route(first, str(end))])

    def host(self, device: int) -> str:
        """The node of a device, whose memory holds the input."""
        return next(f"n{number}" for number, devices in enumerate(self.nodes) if device in devices)

    def measure(self, placed: Sequence[Placed], seed: int) -> list[float]:
        """Mean seconds of a step of each training while all of them run."""
        transfers = Transfers(self._each, self._latencies)
        sessions = [
            Session(
                transfers,
                each.made,
                each.devices,
                [self.slowness[self.kinds[device]] for device in each.devices],
                each.samples,
                self.route,
                Random(f"{seed} {place}"),
            )
            for place, each in enumerate(placed)
        ]
        transfers.run(lambda: all(len(session.ends) > _WARM_UP + _STEPS for session in sessions))
        return [
            (session.ends[-1] - session.ends[_WARM_UP]) / (len(session.ends) - 1 - _WARM_UP) for session in sessions
        ]


def trainings(seed: int, number: int = 5) -> list[Made]:
    """Made-up trainings, unlike in size, exchange and overlap."""
    random = Random(f"trainings {seed}")
    return [
        Made(
            f"m{place}",
            2.718281828 ** random.uniform(log(0.015), log(0.06)),
            2.718281828 ** random.uniform(log(2e-4), log(4e-3)),
            2.718281828 ** random.uniform(log(2e7), log(8e8)),
            random.choice((0.0, 1.5e5, 6e5)),
            ("ring", "ring", "tree", "server", "ring")[place % 5],
            random.choice((1, 2, 4)),
            random.uniform(0.25, 0.45),
        )
        for place in range(number)
    ]


def draw(machines: Machines, made: Sequence[Made], random: Random) -> list[Placed]:
    """One to four trainings on devices of their own, consolidated or anyhow."""
    left = [list(devices) for devices in machines.nodes]
    placed = []
    for each in random.sample(list(made), random.randint(1, 4)):
        width = random.choice((1, 2, 2, 3, 4, 4, 6, 8))
        free = [device for devices in left for device in devices]
        if random.random() < 0.5:  # as few nodes as possible
            order = sorted(range(len(left)), key=lambda node: (-len(left[node]), random.random()))
            free = [device for node in order for device in left[node]]
        else:
            random.shuffle(free)
        chosen = tuple(sorted(free[:width]))
        if chosen:
            left = [[device for device in devices if device not in chosen] for devices in left]
            placed.append(Placed(each, chosen, random.choice((8.0, 16.0, 32.0, 64.0))))
    return placed


def _directed(hop: Hop) -> int:
    return 2 * hop.wire + (0 if hop.is_forward else 1)
