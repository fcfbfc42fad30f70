"""A job that uses more memory than it declared is named once, with both figures."""

import os
from pathlib import Path

from carpool.core.model import JobId
from carpool.jobs.program import Program
from carpool.runtime.memory.declared_memory import DeclaredMemory, resident_bytes

JOB = JobId("a")
GIB = 1 << 30


def test_use_within_the_declaration_is_not_mentioned() -> None:
    declared = DeclaredMemory()
    assert declared.warning(JOB, Program(ram_bytes=GIB), GIB, 1, on_gpu=False) == ""
    assert declared.warning(JOB, Program(), 9 * GIB, 1, on_gpu=False) == ""
    assert not declared.is_of_interest(JOB, Program())


def test_use_beyond_the_declaration_is_reported_once_with_key_and_figures() -> None:
    declared, program = DeclaredMemory(), Program(memory_bytes=GIB)
    words = declared.warning(JOB, program, 3 * GIB, 1, on_gpu=False)
    assert "uses 3 GiB" in words
    assert "memory = 1 GiB" in words
    assert not declared.is_of_interest(JOB, program)
    assert declared.warning(JOB, program, 4 * GIB, 1, on_gpu=False) == ""


def test_a_declaration_counts_for_each_device() -> None:
    declared, program = DeclaredMemory(), Program(ram_bytes=GIB, command=("x",))
    assert declared.warning(JOB, program, 2 * GIB, 2, on_gpu=True) == ""
    assert "ram = 2 GiB (1 GiB per device)" in declared.warning(JOB, program, 3 * GIB, 2, on_gpu=True)


def test_device_memory_of_a_gpu_is_limited_by_its_allocator_instead() -> None:
    assert DeclaredMemory().warning(JOB, Program(memory_bytes=GIB), 3 * GIB, 1, on_gpu=True) == ""


def test_the_ram_of_processes_is_summed_and_exited_ones_have_none(tmp_path: Path) -> None:
    for pid in (1, 2):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "status").write_text("VmRSS: 99 kB\nRssAnon:\t 10 kB\nRssShmem:\t 2 kB\n")
    assert resident_bytes([1, 2, 3], tmp_path) == 24 << 10
    assert resident_bytes([os.getpid()]) > 1 << 20
