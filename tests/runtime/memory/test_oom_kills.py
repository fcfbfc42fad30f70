"""Kills for memory are told from other kills by the counters of the kernel, in both versions of control groups."""

from pathlib import Path

import pytest

from carpool.runtime.memory.oom_kills import OomKills

JOB = "machine.slice/carpool.service"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="ascii")


class Kernel:
    """The files of a kernel, under a folder."""

    def __init__(self, folder: Path, version: int) -> None:
        self.proc, self.groups, self.version = folder / "proc", folder / "cgroup", version
        write(self.proc / "self" / "cgroup", f"0::/{JOB}\n" if version == 2 else f"7:cpu:/x\n4:memory:/{JOB}\n")
        self.set(JOB)
        self.set("machine.slice", limit=None)
        self.set_machine(0)

    def set(self, group: str, kills: int = 0, reached: int = 0, limit: int | None = 2 << 30) -> None:
        if self.version == 2:
            write(self.groups / group / "memory.events", f"low 0\nmax 9\noom {reached}\noom_kill {kills}\n")
            write(self.groups / group / "memory.max", "max\n" if limit is None else f"{limit}\n")
            return
        folder = self.groups / "memory" / group
        write(folder / "memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        write(folder / "memory.failcnt", f"{reached}\n")
        write(folder / "memory.limit_in_bytes", f"{9223372036854771712 if limit is None else limit}\n")

    def set_machine(self, kills: int) -> None:
        write(self.proc / "vmstat", f"nr_free_pages 7\noom_kill {kills}\n")

    def watch(self) -> OomKills:
        return OomKills(self.proc, self.groups)


@pytest.fixture(params=[1, 2])
def kernel(request: pytest.FixtureRequest, tmp_path: Path) -> Kernel:
    return Kernel(tmp_path, request.param)


def test_an_ordinary_kill_is_not_explained(kernel: Kernel) -> None:
    assert kernel.watch().claim() == ""


def test_the_limit_of_the_group_is_named_once(kernel: Kernel) -> None:
    watch = kernel.watch()
    kernel.set(JOB, kills=1, reached=1)
    assert "control group" in (words := watch.claim())
    assert "2 GiB" in words
    assert watch.claim() == "", "the next kill is another one"


def test_each_of_several_kills_is_claimed(kernel: Kernel) -> None:
    watch = kernel.watch()
    kernel.set(JOB, kills=2, reached=1)
    assert [bool(watch.claim()) for _ in range(3)] == [True, True, False]


def test_the_limit_of_an_outer_group_is_named(kernel: Kernel) -> None:
    kernel.set("machine.slice", limit=8 << 30)
    watch = kernel.watch()
    kernel.set(JOB, kills=1)
    kernel.set("machine.slice", kills=1, reached=1, limit=8 << 30)
    assert "8 GiB" in watch.claim()


def test_a_kill_without_a_reached_limit_is_the_machines(kernel: Kernel) -> None:
    watch = kernel.watch()
    kernel.set(JOB, kills=1)
    assert "the machine has no RAM left" in watch.claim()


def test_kills_elsewhere_on_the_machine_do_not_count(kernel: Kernel) -> None:
    watch = kernel.watch()
    kernel.set_machine(5)
    assert watch.claim() == ""


def test_without_control_groups_the_machines_counter_counts(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, 2)
    write(kernel.proc / "self" / "cgroup", "")
    watch = kernel.watch()
    kernel.set_machine(1)
    assert "the machine has no RAM left" in watch.claim()


def test_unreadable_counters_explain_nothing(tmp_path: Path) -> None:
    assert OomKills(tmp_path / "none", tmp_path / "none").claim() == ""
