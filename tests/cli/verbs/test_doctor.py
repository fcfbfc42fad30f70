"""``carpool doctor``: one line per capability, and a way out for each that is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from carpool.cli.main import run
from carpool.jobs.devices import Gpu
from carpool.runtime import doctor
from carpool.runtime.compat import Feature, libc
from carpool.runtime.doctor import examine, has_nvidia_gpu
from carpool.runtime.sharing.mps_daemon import MpsUnavailable


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "list_gpus", list)


def test_every_line_says_yes_or_no(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "yes shared memory" in printed
    assert "no  GPUs" in printed
    assert "without a GPU" in printed
    assert all(line.startswith(("yes ", "no  ", "    ")) for line in printed.splitlines())


def test_json_has_a_way_out_for_all_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    names = {check["name"] for check in checks}
    assert {"GPUs", "CUDA", "CUDA graphs", "MPS", "NCCL", "NVML", "torch", "prctl", "foreach ops"} <= names
    assert len(names) == len(checks)
    assert all(len(name) < 15 for name in names), "names fit their column"
    assert all(check["is_there"] or check["way_out"] for check in checks)


def test_a_failed_check_reports_the_first_line_of_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_mps() -> str:
        raise MpsUnavailable("its pipes are taken")

    def succeeds() -> str:
        return "13.0"

    def fails() -> str:
        raise RuntimeError("CUDA error: no kernel image\nmore")

    monkeypatch.setattr(doctor, "list_gpus", lambda: [Gpu(0, "H200", 140 << 30)])
    monkeypatch.setattr(doctor, "_mps", no_mps)
    monkeypatch.setattr(doctor, "_cuda", succeeds)
    monkeypatch.setattr(doctor, "_graph", fails)
    monkeypatch.setattr(doctor, "_nccl", succeeds)
    found = {finding.name: finding for finding in doctor.examine()}
    assert found["GPUs"].found == "cuda:0 H200 (140 GiB)"
    assert found["CUDA"].is_there
    assert (found["MPS"].is_there, found["MPS"].found) == (False, "its pipes are taken")
    assert found["CUDA graphs"].found == "CUDA error: no kernel image"


def test_a_missing_interface_is_listed_with_its_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        libc, "features", lambda: [Feature("malloc", "no mallopt", "slower"), Feature("pidfd", "", "unused")]
    )
    found = {finding.name: finding for finding in doctor.examine()}
    assert found["malloc"] == doctor.Finding("malloc", False, "no mallopt", "slower")
    assert found["pidfd"] == doctor.Finding("pidfd", True, "available", "")


def test_a_gpu_without_a_driver_is_found_on_the_pci_bus(tmp_path: Path) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:17:00.0"
    device.mkdir(parents=True)
    assert not has_nvidia_gpu(tmp_path)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x040300\n")
    assert not has_nvidia_gpu(tmp_path), "its audio function"
    (device / "class").write_text("0x030200\n")
    assert has_nvidia_gpu(tmp_path)


def test_without_a_gpu_nothing_is_advised_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "has_nvidia_gpu", lambda: False)
    advice = {finding.name: finding.way_out for finding in examine() if not finding.is_there}
    missing = advice.keys() & {"NVML", "GPUs", "CUDA driver", "CUDA", "MPS", "NCCL"}
    assert {advice[name] for name in missing} == {advice["GPUs"]}
    assert "nstall" not in advice["GPUs"]
