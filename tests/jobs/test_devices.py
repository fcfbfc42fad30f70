"""Devices from text: what each word means on a machine of so many cores and GPUs, and what wrong words get."""

import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import InputError
from carpool.jobs.devices import (
    Gpu,
    as_cluster,
    foreign_process_note,
    list_gpus,
    overlap_note,
    parse_devices,
    short_model,
    visible,
)

GPUS = (Gpu(0, "H200", 150, "GPU-aa"), Gpu(1, "V100", 16, "GPU-bb"), Gpu(2, "H200", 150, "GPU-cc"))


def cores_of(text: str, num_cores: int, *, oversubscribe: bool = False) -> list[tuple[int, ...]]:
    devices = parse_devices(text, oversubscribe=oversubscribe, cores=range(num_cores), gpus=())
    return [device.cores for device in devices]


@pytest.mark.parametrize(
    ("text", "num_cores", "cores"),
    [
        ("cpu:2", 2, [(0,), (1,)]),
        ("cpu:2", 5, [(0, 2, 4), (1, 3)]),
        ("cpu:1", 3, [(0, 1, 2)]),
        ("cpu:3", 2, [(0,), (1,), (0,)]),
        ("cpu:2x1,1x2", 4, [(0,), (1,), (2, 3)]),
        ("cpu", 2, [(0,), (1,)]),
        ("", 3, [(0,), (1,), (2,)]),
    ],
)
def test_cores_are_dealt(text: str, num_cores: int, cores: list[tuple[int, ...]]) -> None:
    assert cores_of(text, num_cores) == cores


def test_names_and_kinds() -> None:
    devices = parse_devices("cpu:2x1,1x2", cores=(4, 5, 6, 7), gpus=())
    assert [(device.id, device.name, device.kind) for device in devices] == [
        (0, "cpu:0", "cpu1"),
        (1, "cpu:1", "cpu1"),
        (2, "cpu:2", "cpu2"),
    ]


def test_oversubscribed_devices_share_cores_and_say_so() -> None:
    assert cores_of("cpu:2x2", 2, oversubscribe=True) == [(0, 1), (0, 1)]
    devices = parse_devices("cpu:5", cores=(0, 1), gpus=())
    assert overlap_note(devices) == "5 devices on 2 cores: up to 3 devices take turns on one core"
    assert overlap_note(parse_devices("cpu:2", cores=(0, 1), gpus=())) == ""


@given(st.integers(1, 40), st.integers(1, 12))
def test_every_device_has_a_core_and_every_core_a_device(count: int, num_cores: int) -> None:
    hands = cores_of(f"cpu:{count}", num_cores)
    assert len(hands) == count
    assert all(hands)
    dealt = {core for hand in hands for core in hand}
    assert dealt == set(range(num_cores))
    sizes = [len(hand) for hand in hands]
    assert max(sizes) - min(sizes) <= 1


def test_gpus_by_default_and_like_ones_side_by_side() -> None:
    devices = parse_devices("", cores=(0,), gpus=GPUS)
    assert [(device.name, device.kind, device.cuda) for device in devices] == [
        ("cuda:0", "H200", 0),
        ("cuda:2", "H200", 2),
        ("cuda:1", "V100", 1),
    ]
    assert devices[0].memory_bytes == 150
    assert [device.name for device in parse_devices("cuda:2,1", cores=(0,), gpus=GPUS)] == ["cuda:2", "cuda:1"]


def test_the_cluster_has_one_node_with_a_bank_for_each_kind() -> None:
    cluster = as_cluster(parse_devices("cpu:2x1,1x2", cores=range(4), gpus=()))
    assert [node.name for node in cluster.nodes] == ["local"]
    assert cluster.capacity == {"cpu1": 2, "cpu2": 1}
    assert as_cluster(parse_devices("cuda", cores=(0,), gpus=GPUS)).least_memory == {"H200": 150, "V100": 16}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu:1", ["'gpu:1'", "cuda:0,1"]),
        ("cpu:0", ["'cpu:0'", "at least 1"]),
        ("cpu:2000", ["2000", "at most 1024"]),
        ("cpu:2x", ["'2x'", "cpu:2x1,1x2"]),
        ("cpu:1x3", ["asks 3 cores", "there are 2"]),
        ("cpu:3x1", ["ask 3 cores", "there are 2", "--oversubscribe"]),
        ("cuda", ["none is visible", "cpu:N"]),
        ("cpu:-1", ["'-1'"]),
    ],
)
def test_bad_words_get_value_limit_and_way_out(text: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse_devices(text, cores=range(2), gpus=())
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("text", "word"), [("cuda:3", "GPU 3; there are 0, 1, 2"), ("cuda:0,0", "twice"), ("cuda:a", "not understood")]
)
def test_bad_gpus(text: str, word: str) -> None:
    with pytest.raises(InputError, match=word):
        parse_devices(text, cores=range(2), gpus=GPUS)


def test_visible_gpus_are_numbered_as_cuda_does() -> None:
    assert visible(GPUS, None) == list(GPUS)
    assert [(gpu.index, gpu.uuid) for gpu in visible(GPUS, "2,0")] == [(0, "GPU-cc"), (1, "GPU-aa")]
    assert [gpu.uuid for gpu in visible(GPUS, "GPU-bb")] == ["GPU-bb"]
    assert [gpu.uuid for gpu in visible(GPUS, "0,7,1")] == ["GPU-aa"]
    assert visible(GPUS, "") == []


def test_models_lose_their_makers_name() -> None:
    assert [short_model(name) for name in ("NVIDIA H200", "Tesla V100-SXM2-16GB", "NVIDIA GeForce RTX 4090")] == [
        "H200",
        "V100-SXM2-16GB",
        "RTX-4090",
    ]


def test_gpus_that_others_compute_on_are_left_out_unless_named() -> None:
    gpus = (Gpu(0, "H200", 150, "GPU-aa", (4711,), 50), Gpu(1, "H200", 150, "GPU-bb"))
    assert [device.name for device in parse_devices("cuda", cores=(0,), gpus=gpus)] == ["cuda:1"]
    assert [device.name for device in parse_devices("", cores=(0,), gpus=gpus)] == ["cuda:1"]
    (named,) = parse_devices("cuda:0", cores=(0,), gpus=gpus)
    assert named.memory_bytes == 100  # what the others leave
    assert foreign_process_note(gpus) == "other programs compute on cuda:0 (process 4711): left out unless named"
    assert foreign_process_note(gpus[1:]) == ""


def test_where_others_compute_on_every_gpu_all_are_used() -> None:
    gpus = (Gpu(0, "H200", 150, "GPU-aa", (4711, 4712), 150),)
    (only,) = parse_devices("cuda", cores=(0,), gpus=gpus)
    assert only.memory_bytes == 1  # 0 would mean that nobody knows
    assert "used all the same" in foreign_process_note(gpus)


def test_the_driver_tells_who_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    def computing(handle: int) -> list[SimpleNamespace]:
        if handle:
            raise OSError("not supported")
        return [SimpleNamespace(pid=7, usedGpuMemory=40), SimpleNamespace(pid=8, usedGpuMemory=None)]

    driver = SimpleNamespace(  # as much of nvidia-ml-py as is asked
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda place: place,
        nvmlDeviceGetName=lambda handle: b"NVIDIA H200",
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=150),
        nvmlDeviceGetComputeRunningProcesses=computing,
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert list_gpus() == [Gpu(0, "H200", 150, "GPU-1"), Gpu(1, "H200", 150, "GPU-0", (7, 8), 40)]
    assert list_gpus({7, 8}.__contains__) == [Gpu(0, "H200", 150, "GPU-1"), Gpu(1, "H200", 150, "GPU-0")]
    assert len(parse_devices("cuda", cores=(0,), is_ours={7, 8}.__contains__)) == 2, "workers of ours keep nobody away"
    assert len(parse_devices("cuda", cores=(0,))) == 1
