"""Two network namespaces, joined by a link, that stand for two machines; they need root and iproute2."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

ADDRESSES = ("10.78.0.1", "10.78.0.2")


@dataclass(frozen=True, slots=True)
class NetworkPair:
    """The names of two namespaces; their addresses are `ADDRESSES`."""

    names: tuple[str, str]

    def inside(self, place: int, words: Sequence[object]) -> list[str]:
        """A command in one of the namespaces."""
        return ["ip", "netns", "exec", self.names[place], *map(str, words)]

    def set_link(self, *, is_up: bool) -> None:
        """Cut or heal the link."""
        run("ip", "-n", self.names[0], "link", "set", "link0", "up" if is_up else "down")


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=30)


def why_no_namespaces() -> str:
    """The reason why none can be made here; empty if they can."""
    name = f"carpool-try-{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
        run("ip", "netns", "del", name)
    except FileNotFoundError:
        return "iproute2 is not installed"
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"
    return ""


@contextmanager
def network_pair() -> Iterator[NetworkPair]:
    """Make the namespaces and their link, and delete them."""
    names = (f"carpool-{os.getpid()}-a", f"carpool-{os.getpid()}-b")
    try:
        for name in names:
            run("ip", "netns", "add", name)
        ends = ("netns", names[0], "type", "veth", "peer", "name", "link1", "netns", names[1])
        run("ip", "link", "add", "link0", *ends)
        for place, (name, address) in enumerate(zip(names, ADDRESSES, strict=True)):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", f"link{place}")
            run("ip", "-n", name, "link", "set", f"link{place}", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield NetworkPair(names)
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                run("ip", "netns", "del", name)
