"""``carpool doctor``: checks with what was found, and how to fix what is missing."""

from __future__ import annotations

import json

import pytest

from carpool.cli.main import run
from carpool.jobs.devices import Gpu
from carpool.runtime import doctor
from carpool.runtime.sharing.mps_daemon import MpsUnavailable


def test_each_check_prints_yes_or_no(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "list_gpus", list)
    assert run(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "yes shared memory" in printed
    assert "no  GPUs" in printed
    assert "CUDA_VISIBLE_DEVICES" in printed


def test_json_says_how_to_fix_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "list_gpus", list)
    assert run(["doctor", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert {"GPUs", "CUDA", "CUDA graphs", "MPS", "NCCL", "torch", "Ray"} <= {check["name"] for check in checks}
    assert all(check["is_there"] or check["way_out"] for check in checks)


def test_a_failed_check_shows_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_service() -> str:
        raise MpsUnavailable("its pipes are taken")

    def computes() -> str:
        return "13.0"

    def fails() -> str:
        raise RuntimeError("CUDA error: no kernel image\nmore")

    monkeypatch.setattr(doctor, "list_gpus", lambda: [Gpu(0, "H200", 140 << 30)])
    monkeypatch.setattr(doctor, "_mps", no_service)
    monkeypatch.setattr(doctor, "_cuda", computes)
    monkeypatch.setattr(doctor, "_graph", fails)
    monkeypatch.setattr(doctor, "_nccl", computes)
    found = {finding.name: finding for finding in doctor.examine()}
    assert found["GPUs"].found == "cuda:0 H200 (140 GiB)"
    assert found["CUDA"].is_there
    assert (found["MPS"].is_there, found["MPS"].found) == (False, "its pipes are taken")
    assert found["CUDA graphs"].found == "CUDA error: no kernel image"
