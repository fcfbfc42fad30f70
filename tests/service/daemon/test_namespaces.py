"""Examples over two network namespaces with engine hosts: exact weights, and one-device gradients within rounding."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from carpool.core.model import JobId
from carpool.jobs.job_file import read_jobs
from carpool.runtime.state.checkpoint import load
from carpool.runtime.worker.entry_loader import load_training
from carpool.testing.reference import plain_loop
from tests.support.daemon_crash import outcomes, read
from tests.support.netns_rig import ADDRESSES, NetworkPair, network_pair, why_no_namespaces

EXAMPLES = Path(__file__).parents[3] / "examples"
SPAN = "devices = 2\nmax_nodes = 2\n"
TOKEN = "0123456789abcdef0123456789abcdef"
PATIENCE_S = 240

ONE_STEP = """
from dataclasses import replace

import digits_of_the_test as digits
import torch

import carpool


def one_step():
    training = digits.mlp(dropout=0.0)
    optimizer = torch.optim.SGD(training.model.parameters(), lr=1.0)
    return replace(training, optimizer=optimizer, stop=carpool.Stop(steps=1), evaluate=None, best="")
"""
JOBS = f"""
[[job]]
name = "cnn"
entry = "digits.py:cnn"
args = {{ epochs = 1 }}
exact = true
{SPAN}
[[job]]
name = "ncf"
entry = "ncf.py:ncf"
args = {{ epochs = 1 }}
exact = true
{SPAN}
[[job]]
name = "step"
entry = "one_step.py:one_step"
{SPAN}
"""


@pytest.fixture(scope="module")
def network() -> Iterator[NetworkPair]:
    if reason := why_no_namespaces():
        pytest.skip(reason)
    with network_pair() as pair:
        yield pair


def start_agents(network: NetworkPair, folder: Path, stack: ExitStack) -> Path:
    """An agent with a certificate of its own in each namespace; the hosts file that names them."""
    token = folder / "fleet.token"
    token.touch(mode=0o600)
    token.write_text(TOKEN, encoding="ascii")
    tables = []
    for place, address in enumerate(ADDRESSES):
        words = [sys.executable, "-m", "carpool", "agent", "--listen", f"{address}:7638", "--token-file", token]
        command = network.inside(place, [*words, "--devices", "cpu:1", "--state", folder / f"agent-{place}"])
        agent = stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        stack.callback(agent.terminate)
        assert agent.stderr is not None
        assert "listening" in agent.stderr.readline()
        tables.append(f'[[host]]\nname = "box{place}"\naddress = "{address}"\ntoken_file = "{token}"\n')
    hosts = folder / "lab.toml"
    hosts.write_text("\n".join(tables), encoding="utf-8")
    return hosts


def test_examples_over_two_namespaces(network: NetworkPair, tmp_path: Path) -> None:
    code, state = tmp_path / "code", tmp_path / "state"
    code.mkdir()
    for name in ("digits.py", "ncf.py"):
        (code / name).write_bytes((EXAMPLES / name).read_bytes())
    (code / "digits_of_the_test.py").write_bytes((EXAMPLES / "digits.py").read_bytes())  # a name no other test imports
    (code / "one_step.py").write_text(ONE_STEP, encoding="utf-8")
    (code / "jobs.toml").write_text(JOBS, encoding="utf-8")
    with ExitStack() as stack:
        hosts = start_agents(network, tmp_path, stack)
        words = ["-m", "carpool", "run", code / "jobs.toml", "--engine", "hosts", "--hosts", hosts, "--state", state]
        command = network.inside(0, [sys.executable, *words, "--policy", "fifo"])
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert not done.returncode, done.stderr
    assert "box0/cpu:0,box1/cpu:0" in done.stderr + done.stdout, "jobs ran on both"
    jobs = {job.spec.id: job.program for job in read_jobs(code / "jobs.toml").jobs}
    found = outcomes(read(state))
    for name in map(JobId, ("cnn", "ncf")):
        training = load_training(jobs[name].entry, dict(jobs[name].args), folder=code)
        assert found[name].digest == plain_loop(training, shards=jobs[name].shards).digest
    training = load_training("one_step.py:one_step", {}, folder=code)
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    plain_loop(training)
    (path,) = (state / "jobs" / "step" / "checkpoints").glob("step-*.ckpt")
    for name, value in load(path)["model"].items():
        gradient, alone = before[name] - value, before[name] - training.model.state_dict()[name]
        assert torch.dist(gradient, alone) <= 1e-5 * torch.linalg.vector_norm(alone)
