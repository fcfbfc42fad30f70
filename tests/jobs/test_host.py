"""Host resources and core assignment."""

import os
from pathlib import Path

from carpool.jobs.host import CoreAllocator, host_supplies


def test_host_resources_are_found(tmp_path: Path) -> None:
    found = host_supplies(tmp_path / "not" / "yet")
    assert 1 <= found.cpus <= len(os.sched_getaffinity(0))
    assert found.ram_bytes > 1 << 20
    assert found.disk_bytes > 0


def test_lower_limits_of_a_container_apply(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text("1048576\n")
    assert host_supplies(tmp_path, cgroup=tmp_path)[:2] == (1, 1 << 20)


def test_a_container_without_limits(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       2048 kB\nMemFree: 1 kB\n")
    found = host_supplies(tmp_path, cgroup=tmp_path, meminfo=meminfo)
    assert (found.cpus, found.ram_bytes) == (len(os.sched_getaffinity(0)), 2 << 20)


def test_cores_are_shared_only_when_there_are_too_few() -> None:
    cores = CoreAllocator([0, 1, 2, 3])
    assert cores.claim("a", 2) == (0, 1)
    assert cores.claim("b", 2) == (2, 3)
    assert cores.claim("c", 1) == (0,)
    cores.release("a")
    assert cores.claim("d", 2) == (0, 1), "the one that nobody has, and the lowest of the others"
    assert cores.claim("free", 0) == ()


def test_a_second_claim_takes_the_place_of_the_first() -> None:
    cores = CoreAllocator([0, 1])
    cores.claim("a", 1)
    assert cores.claim("a", 1) == (0,)
