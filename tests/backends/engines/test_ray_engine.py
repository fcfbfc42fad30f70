"""The Ray engine without a cluster: names of nodes, environments, and errors before anything starts."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from carpool.backends.engines.ray_agent import NodeAgent, agent_environment, delete_stale_folders
from carpool.backends.engines.ray_engine import (
    DriverFailed,
    DriverOptions,
    RayDriver,
    RayEngine,
    RayNode,
    check_address,
    driver_environments,
    name_nodes,
)
from carpool.core.errors import InputError
from tests.support.fleet_rig import PATIENCE_S


def node(number: int, host: str = "box", member: str = "") -> RayNode:
    return RayNode(f"id-{number}", host, 0.0, 1.0, member)


def ids(named: dict[str, RayNode]) -> dict[str, str]:
    return {name: each.id for name, each in named.items()}


def test_nodes_are_named_after_their_hosts_and_keep_their_names() -> None:
    first = name_nodes({}, [node(1), node(2), node(3, "rack/7")])
    assert ids(first) == {"box": "id-1", "box-2": "id-2", "rack-7": "id-3"}
    assert ids(name_nodes(first, [node(2), node(4)])) == {"box-2": "id-2", "box": "id-4"}


def test_a_node_has_the_name_that_an_earlier_scheduler_gave_it() -> None:
    found = name_nodes({}, [node(1), node(2, member="box"), node(3, member="box-7"), node(4, member="box")])
    assert ids(found) == {"box": "id-2", "box-7": "id-3", "box-2": "id-4", "box-3": "id-1"}


@pytest.mark.parametrize("host", ["local", "", "...", "ä"])
def test_every_host_gives_a_name_that_a_member_may_have(host: str) -> None:
    (name,) = name_nodes({}, [node(1, host)])
    assert name
    assert name != "local"
    assert name[0].isalnum()


def test_an_address_at_which_nothing_listens_is_refused_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(InputError, match=f"127.0.0.1:{port}: nothing listens there"):
        check_address(f"127.0.0.1:{port}")
    for wrong in ("nowhere", "ray://127.0.0.1:10001", "127.0.0.1:"):
        with pytest.raises(InputError, match=f"{wrong}' is no address .* Write HOST:PORT"):
            check_address(wrong)


def test_without_ray_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"carpool\[ray\]"):
        asyncio.run(RayEngine(tmp_path).find())


def test_an_agent_gets_no_variables_of_ray() -> None:
    given = {"PATH": "/bin", "RAY_JOB_ID": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert agent_environment(given) == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0,1"}


def test_folders_of_agents_that_are_gone_are_deleted(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as gone:
        gone.wait()
    for name, pid in (("dead", gone.pid), ("alive", os.getpid())):
        (tmp_path / f"carpool-ray-{name}").mkdir()
        (tmp_path / f"carpool-ray-{name}" / "agent.pid").write_text(str(pid))
    (tmp_path / "carpool-ray-starting").mkdir()
    delete_stale_folders(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["carpool-ray-alive", "carpool-ray-starting"]


def test_an_agent_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    agent = NodeAgent("box", "cpu:0")
    with pytest.raises(RuntimeError, match="cpu:0"):
        agent.start("127.0.0.1")


ACTOR = """
import os, sys
from carpool.backends.engines.ray_agent import NodeAgent
agent = NodeAgent("box", "cpu:1")
host = agent.start("127.0.0.1")
assert agent.start("127.0.0.1") == host
print(agent._process.pid, host["state"], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("whose", ["actor", "supervisor"])
def test_an_agent_ends_with_its_actor_however_that_ends(whose: str, number: signal.Signals, tmp_path: Path) -> None:
    actor = subprocess.Popen(
        [sys.executable, "-c", ACTOR],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with actor:
        assert actor.stdout is not None
        supervisor, state = actor.stdout.readline().split()
        agent = os.pidfd_open(int((Path(state) / "agent.pid").read_text()))
        os.kill(actor.pid if whose == "actor" else int(supervisor), number)
        try:
            ended, _, _ = select.select([agent], [], [], 120.0)
        finally:
            os.close(agent)
            actor.kill()
    assert ended, "the agent ended"


def test_a_token_of_this_user_is_sent_where_none_does_not_suffice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert driver_environments({"A": "b"}) == [{"A": "b"}]
    given = {"RAY_AUTH_TOKEN": "secret"}
    assert driver_environments(given) == [given, {**given, "RAY_AUTH_MODE": "token"}]
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret", encoding="ascii")
    assert [each.get("RAY_AUTH_MODE") for each in driver_environments({})] == [None, "token"]
    assert driver_environments({"RAY_AUTH_MODE": "disabled"}) == [{"RAY_AUTH_MODE": "disabled"}], "the user's choice"


HANGING = """
import json, sys
NODE = {"id": "1", "host": "box", "gpus": 0.0, "cpus": 1.0, "member": ""}
HOST = {"address": "127.0.0.1", "port": 1, "token": "secret", "tls": False}
ANSWERS = {"connect": {"address": "auto", "is_own": False}, "nodes": [NODE], "start": HOST}
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == sys.argv[1]:
        sys.stdin.read()  # hangs
    print(json.dumps({"id": request["id"], "answer": ANSWERS.get(request["do"])}), flush=True)
"""


def engine_that_hangs_at(request: str, folder: Path) -> RayEngine:
    (folder / "driver.py").write_text(HANGING, encoding="utf-8")
    command = (sys.executable, str(folder / "driver.py"), request)
    return RayEngine(
        folder,
        "auto",
        options=DriverOptions(command, init_s=1.0 if request == "connect" else PATIENCE_S, silence_s=2.0),
    )


def run_aside(run: Callable[[], object]) -> None:
    """Run a function that may hang, in a thread that ends with the tests."""
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "it hangs"


@pytest.mark.parametrize(("request_name", "silence"), [("connect", "1 s"), ("nodes", "2 s")])
def test_a_request_that_ray_never_answers_fails(request_name: str, silence: str, tmp_path: Path) -> None:
    engine = engine_that_hangs_at(request_name, tmp_path)
    problems: list[str] = []

    def find() -> None:
        try:
            asyncio.run(engine.find())
        except DriverFailed as error:
            problems.append(str(error))

    run_aside(find)
    engine.close()
    assert len(problems) == 1
    assert f"answered nothing for {silence}" in problems[0]


def test_a_hung_driver_does_not_keep_the_scheduler_from_ending(tmp_path: Path) -> None:
    engine = engine_that_hangs_at("release", tmp_path)

    async def start() -> None:
        (name,) = await engine.find()
        await engine.start(name)

    asyncio.run(start())
    run_aside(engine.close)


LATE = """
import json, sys
requests = [json.loads(sys.stdin.readline()) for _ in range(2)]
for request in requests:
    print(json.dumps({"id": request["id"], "answer": request["do"]}), flush=True)
sys.stdin.read()
"""


def test_the_answer_to_a_cancelled_request_does_not_stop_later_answers(tmp_path: Path) -> None:
    options = DriverOptions((sys.executable, "-c", LATE), PATIENCE_S, PATIENCE_S)
    driver = RayDriver(tmp_path / "log", os.environ, options)

    async def ask() -> str:
        asyncio.wrap_future(driver.request("first")).cancel()
        async with asyncio.timeout(PATIENCE_S):
            return str(await asyncio.wrap_future(driver.request("second")))

    assert asyncio.run(ask()) == "second"
    driver.close()


ONCE = """
import json, sys
request = json.loads(sys.stdin.readline())
with open(sys.argv[1], "a") as asked:
    print(request["address"], file=asked)
print(json.dumps({"id": 1, "answer": {"address": sys.argv[2], "is_own": sys.argv[3] == "own"}}), flush=True)
sys.stdin.readline()
print(json.dumps({"id": 2, "answer": []}), flush=True)
"""


@pytest.mark.parametrize(("whose", "asked"), [("own", "\n\n"), ("found", "\n{address}\n")])
def test_a_driver_is_started_again_for_the_cluster_that_was_found(whose: str, asked: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        command = (sys.executable, "-c", ONCE, str(tmp_path / "asked"), address, whose)
        engine = RayEngine(tmp_path, options=DriverOptions(command, PATIENCE_S, PATIENCE_S))
        asyncio.run(engine.find())
        assert engine._driver is not None
        engine._driver._reading.join(PATIENCE_S)  # until it has reaped the process
        asyncio.run(engine.find())
        engine.close()
    assert (tmp_path / "asked").read_text() == asked.format(address=address)


DYING = """
import json, sys
sys.stdin.readline()
sys.stderr.write(sys.argv[1])
sys.stderr.flush()
print(json.dumps({"id": 1, "kind": "error", "error": "Failed to connect to Ray"}), flush=True)
"""
FORGOTTEN = "Check failed: WrongClusterID: after it has restarted.\n*** StackTrace ***\n/x/_raylet.so(+0x1) ray"


@pytest.mark.parametrize(
    ("log", "way_out"),
    [
        (FORGOTTEN, "Start its other nodes again"),
        ("InvalidAuthToken: missing or incorrect", "set RAY_AUTH_TOKEN"),
        ("refused", "Run carpool on a machine of the Ray cluster"),
    ],
)
def test_what_ray_logs_decides_what_to_do(log: str, way_out: str, tmp_path: Path) -> None:
    (tmp_path / "ray-driver.log").write_text(f"{FORGOTTEN}\nInvalidAuthToken\n")  # of an earlier driver
    command = (sys.executable, "-c", DYING, log)
    with pytest.raises(InputError, match=f"Failed to connect to Ray. .*{way_out}"):
        asyncio.run(RayEngine(tmp_path, "auto", options=DriverOptions(command, PATIENCE_S)).find())


def test_a_driver_that_ends_is_quoted_without_stack_traces(tmp_path: Path) -> None:
    command = (sys.executable, "-c", f"import sys; sys.stderr.write({FORGOTTEN!r})")
    with pytest.raises(DriverFailed, match=r"has restarted\. .* Start its other nodes again") as failed:
        asyncio.run(RayEngine(tmp_path, "auto", options=DriverOptions(command, PATIENCE_S)).find())
    assert "_raylet.so" not in str(failed.value)


def test_requests_at_once_start_one_driver(tmp_path: Path) -> None:
    command = (sys.executable, "-c", LISTING, str(tmp_path / "started"))
    engine = RayEngine(tmp_path, options=DriverOptions(command, PATIENCE_S, PATIENCE_S))

    async def find() -> None:
        await asyncio.gather(engine.find(), engine.find())

    asyncio.run(find())
    engine.close()
    assert (tmp_path / "started").read_text() == "x"


LISTING = """
import json, sys
with open(sys.argv[1], "a") as started:
    started.write("x")
for line in sys.stdin:
    request = json.loads(line)
    answer = [] if request["do"] == "nodes" else {"address": "", "is_own": True}
    print(json.dumps({"id": request["id"], "answer": answer}), flush=True)
"""
