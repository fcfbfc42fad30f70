"""The Ray driver against a fake of Ray's API."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ray_exceptions = pytest.importorskip("ray.exceptions", reason="needs the extra ray")

from carpool.backends.engines.ray_driver import Driver, has_started_head  # noqa: E402


@dataclass
class FakeRay:
    """One node with an actor, whose `stop` ends with an error."""

    error: Exception | None
    killed: list[str] = field(default_factory=list)

    def get_actor(self, name: str) -> Any:
        if not name.endswith("-7"):
            raise ValueError(f"no actor {name}")
        return SimpleNamespace(name=name, stop=SimpleNamespace(remote=lambda: "stop"))

    def get(self, reference: str, timeout: float) -> None:
        if self.error is not None:
            raise self.error

    def kill(self, actor: Any) -> None:
        self.killed.append(actor.name)


@pytest.mark.parametrize("error", [None, ray_exceptions.GetTimeoutError("late"), ray_exceptions.RayActorError()])
def test_a_released_actor_is_killed_also_when_it_does_not_stop_in_time(error: Exception | None) -> None:
    fake = FakeRay(error)
    Driver(fake).release("7")
    assert fake.killed == ["agent-7"]


def test_an_actor_that_fails_to_stop_is_killed_and_the_failure_reported() -> None:
    fake = FakeRay(RuntimeError("its folder is busy"))
    with pytest.raises(RuntimeError, match="its folder is busy"):
        Driver(fake).release("7")
    assert fake.killed == ["agent-7"]


def test_the_release_of_a_node_without_an_actor_does_nothing() -> None:
    fake = FakeRay(None)
    Driver(fake).release("8")
    assert fake.killed == []


def test_a_head_that_this_process_has_started_is_its_child(tmp_path: Path) -> None:
    assert not has_started_head()
    server = tmp_path / "gcs_server"
    shutil.copy(shutil.which("cat") or "/bin/cat", server)
    with subprocess.Popen([server], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as head:
        assert head.stdin is not None
        assert head.stdout is not None
        head.stdin.write("here\n")
        assert head.stdout.readline() == "here\n"  # the kernel names a process a moment after it is started
        assert has_started_head()
        head.kill()
    assert not has_started_head()
