"""Devices: parsing of --devices for given cores and GPUs, and what invalid values report."""

import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import InputError
from carpool.core.model import JobId, JobSpec, Kind, lane_of
from carpool.jobs.devices import (
    Gpu,
    as_cluster,
    devices_of_gpu,
    foreign_process_note,
    list_gpus,
    overlap_note,
    parse_devices,
    short_model,
    usable_devices,
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
def test_cores_are_assigned_round_robin_or_by_group(text: str, num_cores: int, cores: list[tuple[int, ...]]) -> None:
    assert cores_of(text, num_cores) == cores


@pytest.mark.parametrize(
    ("specs", "cores"),
    [
        ([JobSpec(JobId("a"))], [(0, 1, 2, 3)]),
        ([JobSpec(JobId("a")), JobSpec(JobId("b")), JobSpec(JobId("c"))], [(0, 3), (1,), (2,)]),
        ([JobSpec(JobId("a"), max_devices=3)], [(0, 3), (1,), (2,)]),
        ([JobSpec(JobId(str(number))) for number in range(9)], [(0,), (1,), (2,), (3,)]),
        ([JobSpec(JobId(str(n)), array="x", at_most=2) for n in range(9)], [(0, 2), (1, 3)]),
        ([JobSpec(JobId("a"), exact=True)], [(0,), (1,), (2,), (3,)]),
        ([JobSpec(JobId("a"), kinds=(Kind("cpu1"),))], [(0,), (1,), (2,), (3,)]),
    ],
)
def test_fewer_jobs_than_cores_get_several_cores_each(specs: list[JobSpec], cores: list[tuple[int, ...]]) -> None:
    found = parse_devices("", cores=range(4), gpus=(), most_on_cpu=usable_devices(specs))
    assert [device.cores for device in found] == cores
    assert len(parse_devices("cpu:4", cores=range(4), gpus=(), most_on_cpu=1)) == 4


def test_names_and_device_types() -> None:
    devices = parse_devices("cpu:2x1,1x2", cores=(4, 5, 6, 7), gpus=())
    assert [(device.id, device.name, device.kind) for device in devices] == [
        (0, "cpu:0", "cpu1"),
        (1, "cpu:1", "cpu1"),
        (2, "cpu:2", "cpu2"),
    ]


def test_oversubscribed_devices_share_cores_with_a_note() -> None:
    assert cores_of("cpu:2x2", 2, oversubscribe=True) == [(0, 1), (0, 1)]
    devices = parse_devices("cpu:5", cores=(0, 1), gpus=())
    note = overlap_note(devices)
    assert all(words in note for words in ("5 devices", "2 cores", "up to 3")), note
    assert overlap_note(parse_devices("cpu:2", cores=(0, 1), gpus=())) == ""


@given(st.integers(1, 40), st.integers(1, 12))
def test_every_device_has_a_core_and_every_core_a_device(count: int, num_cores: int) -> None:
    core_sets = cores_of(f"cpu:{count}", num_cores)
    assert len(core_sets) == count
    assert all(core_sets)
    assert {core for cores in core_sets for core in cores} == set(range(num_cores))
    sizes = [len(cores) for cores in core_sets]
    assert max(sizes) - min(sizes) <= 1


def test_gpus_are_the_default_and_equal_models_are_adjacent() -> None:
    devices = parse_devices("", cores=(0,), gpus=GPUS)
    assert [(device.name, device.kind, device.cuda) for device in devices] == [
        ("cuda:0", "H200", 0),
        ("cuda:2", "H200", 2),
        ("cuda:1", "V100", 1),
    ]
    assert devices[0].memory_bytes == 150
    assert [device.name for device in parse_devices("cuda:2,1", cores=(0,), gpus=GPUS)] == ["cuda:2", "cuda:1"]


def test_lanes_of_a_gpu_are_devices_of_their_own_types_that_share_its_memory() -> None:
    devices = parse_devices("cuda:0@25,cuda:1,0@50, 0@25", cores=(0,), gpus=GPUS)
    assert [(device.name, device.kind, device.cuda, device.lane_percent) for device in devices] == [
        ("cuda:0@50", "H200@50", 0, 50),
        ("cuda:0@25", "H200@25", 0, 25),
        ("cuda:0@25/2", "H200@25", 0, 25),
        ("cuda:1", "V100", 1, 0),
    ]
    assert [device.memory_bytes for device in devices] == [75, 37, 37, 16]
    assert as_cluster(devices).capacity == {"H200@50": 1, "H200@25": 2, "V100": 1}
    assert lane_of(Kind("H200@25")) == ("H200", 0.25)
    assert lane_of(Kind("H200")) == ("H200", 1.0)
    assert [devices_of_gpu(devices, device) for device in devices] == [[0, 1, 2]] * 3 + [[3]]
    assert overlap_note(devices) == ""


def test_lanes_may_have_more_than_a_gpu_has_which_a_note_says() -> None:
    devices = parse_devices("cuda:0@100,cuda:0@50", cores=(0,), gpus=GPUS)
    assert [device.memory_bytes for device in devices] == [100, 50]
    assert all(word in overlap_note(devices) for word in ("cuda:0", "150 %"))


def test_the_cluster_has_one_node_with_a_bank_per_device_type() -> None:
    cluster = as_cluster(parse_devices("cpu:2x1,1x2", cores=range(4), gpus=()))
    assert [node.name for node in cluster.nodes] == ["local"]
    assert cluster.capacity == {"cpu1": 2, "cpu2": 1}
    assert as_cluster(parse_devices("cuda", cores=(0,), gpus=GPUS)).least_memory == {"H200": 150, "V100": 16}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu:1", ["'gpu'", "cuda:0,1"]),
        ("cpu:0", ["0 devices", "at least 1"]),
        ("cpu:2000", ["2000 devices", "1024"]),
        ("cpu:2x", ["'2x'", "cpu:2x1,1x2"]),
        ("cpu:1x3", ["'1x3'", "3 cores", "2"]),
        ("cpu:3x1", ["3 cores", "2", "--oversubscribe"]),
        ("cuda", ["no GPU", "CUDA_VISIBLE_DEVICES"]),
        ("cpu:-1", ["'-1'"]),
    ],
)
def test_invalid_devices_report_value_limit_and_way_out(text: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse_devices(text, cores=range(2), gpus=())
    assert repr(text) in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("cuda:3", "GPU 3.*0, 1, 2"),
        ("cuda:0,0", "twice"),
        ("cuda:a", "'a'"),
        ("cuda:0@0", "0 %.*1 to 100"),
        ("cuda:0@101", "101 %"),
        ("cuda:0@x", "'0@x'.*cuda:0@50"),
        ("cuda:0,cuda:0@50", "as a whole and a lane"),
        ("cuda:7@50", "GPU 7"),
        ("cuda:@50", "'@50'"),
    ],
)
def test_invalid_gpus(text: str, word: str) -> None:
    with pytest.raises(InputError, match=word):
        parse_devices(text, cores=range(2), gpus=GPUS)


def test_visible_gpus_are_numbered_as_cuda_does() -> None:
    assert visible(GPUS, None) == list(GPUS)
    assert [(gpu.index, gpu.uuid) for gpu in visible(GPUS, "2,0")] == [(0, "GPU-cc"), (1, "GPU-aa")]
    assert [gpu.uuid for gpu in visible(GPUS, "GPU-bb")] == ["GPU-bb"]
    assert [gpu.uuid for gpu in visible(GPUS, "0,7,1")] == ["GPU-aa"]
    assert visible(GPUS, "") == []


def test_short_model_drops_the_vendor() -> None:
    assert [short_model(name) for name in ("NVIDIA H200", "Tesla V100-SXM2-16GB", "NVIDIA GeForce RTX 4090")] == [
        "H200",
        "V100-SXM2-16GB",
        "RTX-4090",
    ]


def test_gpus_with_foreign_processes_are_not_used_unless_named() -> None:
    gpus = (Gpu(0, "H200", 150, "GPU-aa", (4711,), 50), Gpu(1, "H200", 150, "GPU-bb"))
    assert [device.name for device in parse_devices("cuda", cores=(0,), gpus=gpus)] == ["cuda:1"]
    assert [device.name for device in parse_devices("", cores=(0,), gpus=gpus)] == ["cuda:1"]
    (named,) = parse_devices("cuda:0", cores=(0,), gpus=gpus)
    assert named.memory_bytes == 100  # 50 of 150 are taken
    assert all(words in foreign_process_note(gpus) for words in ("cuda:0", "4711", "not used"))
    assert foreign_process_note(gpus[1:]) == ""


def test_all_gpus_are_used_where_each_has_foreign_processes() -> None:
    gpus = (Gpu(0, "H200", 150, "GPU-aa", (4711, 4712), 150),)
    (only,) = parse_devices("cuda", cores=(0,), gpus=gpus)
    assert only.memory_bytes == 1  # 0 would mean unknown
    assert "used anyway" in foreign_process_note(gpus)


def test_gpus_are_listed_with_their_foreign_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def computing(handle: int) -> list[SimpleNamespace]:
        if handle:
            raise OSError("not supported")
        return [SimpleNamespace(pid=7, usedGpuMemory=40), SimpleNamespace(pid=8, usedGpuMemory=None)]

    driver = SimpleNamespace(  # the part of nvidia-ml-py that is used
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
    assert len(parse_devices("cuda", cores=(0,), is_ours={7, 8}.__contains__)) == 2, (
        "our own workers do not occupy a GPU"
    )
    assert len(parse_devices("cuda", cores=(0,))) == 1
