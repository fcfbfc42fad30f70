"""Driver calls against a fake libcuda: success, refusal, a missing function and no driver."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from carpool.runtime.compat import cuda_driver
from carpool.runtime.compat.cuda_driver import CudaDriverError, call, is_mps_client


def use(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    monkeypatch.setattr(cuda_driver, "load", lambda: SimpleNamespace(**functions))


def test_a_refused_call_raises_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, cuInit=lambda flags: flags)
    call("cuInit", 0)
    with pytest.raises(CudaDriverError, match="cuInit") as caught:
        call("cuInit", 700)
    assert caught.value.code == 700
    assert "CUDA error: " in str(caught.value), "which is how a fault of the GPU is recognized"


def test_a_missing_function_raises_without_a_code(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    with pytest.raises(CudaDriverError, match="cuInit") as caught:
        call("cuInit", 0)
    assert caught.value.code is None


def test_the_mps_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    def attribute(found: Any, name: int, device: Any) -> int:
        found._obj.value = device.value == 1
        return 0 if name == 133 else 1

    use(monkeypatch, cuDeviceGetAttribute=attribute)
    assert (is_mps_client(0), is_mps_client(1)) == (False, True)
    use(monkeypatch, cuDeviceGetAttribute=lambda *args: 1)
    assert is_mps_client(0) is None


def test_features_name_what_a_driver_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    every = (*cuda_driver.VIRTUAL_MEMORY, *cuda_driver.STREAM_MEMORY_OPERATIONS, *cuda_driver.PROCESS_CHECKPOINT)
    use(monkeypatch, **dict.fromkeys(every), cuDeviceGetAttribute=None)
    (lacking,) = (feature for feature in cuda_driver.features() if feature.problem)
    assert (lacking.name, "cuGraphGetEdges_v2" in lacking.problem) == ("graph editing", True)


def test_without_a_driver_one_feature_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda_driver, "load", missing)
    (feature,) = cuda_driver.features()
    assert "libcuda" in feature.problem
    assert is_mps_client(0) is None
