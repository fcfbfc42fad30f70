"""Performance models (worlds) that simulated jobs follow, selected by name with ``--world``."""

from __future__ import annotations

from pathlib import Path

from carpool.core.errors import InputError, UnknownName
from carpool.sim.worlds.base import PlainWorld, World

WORLDS = {
    "plain": "the trace's own durations; starts and moves are free",
    "colocation": "colocation:FILE, trainings measured alone and in groups on one device, at several shares",
    "gavel": "gavel:FILE, steps per second by job type and device type, alone and in pairs",
    "pollux": "pollux:DIR, goodput from measured profiles",
    "profile": "profile:FILE, rates and memory measured by carpool profile (a folder: all profiles in it)",
    "parts": "parts[:switch=fast|pipelined|cold], steps of a fixed number of parts on four device types, by seed",
    "wired": "buses and a network of different speeds, by seed; elastic jobs that exchange gradients over them",
    "FILE.toml": "models, device types and costs from a file",
}


def seed_in_file(text: str) -> int:
    """The seed of a world file; 0 if it has none, or the world has no file."""
    if not text.endswith(".toml"):
        return 0
    from carpool.sim.worlds.world_file import read_world

    return read_world(Path(text)).setting.seed


def parse_world(text: str, seed: int | None = None) -> World:
    """The world named by a text; the default seed is that of its file, else 0."""
    name, _, rest = text.partition(":")
    if text.endswith(".toml"):
        from carpool.sim.worlds.parametric import ParametricWorld

        return ParametricWorld.load(Path(text), seed=seed)
    seed = seed or 0
    if name == "plain" and not rest:
        return PlainWorld()
    if name == "wired" and not rest:
        from carpool.sim.worlds.wired import WiredWorld

        return WiredWorld(seed)
    if name == "parts":
        from carpool.sim.worlds.parts import PartsWorld

        key, _, switch = (rest or "switch=fast").partition("=")
        if key != "switch":
            raise UnknownName("setting of parts", key, ("switch",))
        return PartsWorld.generate(seed, switch)
    if name in ("colocation", "gavel", "pollux", "profile"):
        if not rest:
            raise InputError(f"world {text!r} needs a path", way_out=f"Write {WORLDS[name].split(',')[0]}.")
        return _from_data(name, Path(rest), seed)
    raise UnknownName("world", text, WORLDS)


def _from_data(name: str, path: Path, seed: int) -> World:
    if name == "colocation":
        from carpool.sim.worlds.colocation import ColocationWorld

        return ColocationWorld.load(path, seed)
    if name == "gavel":
        from carpool.sim.worlds.gavel import GavelWorld

        return GavelWorld.load(path)
    if name == "profile":
        from carpool.sim.worlds.profiled import ProfileWorld

        return ProfileWorld.load(path)
    from carpool.sim.worlds.pollux import PolluxWorld

    return PolluxWorld.load(path)
