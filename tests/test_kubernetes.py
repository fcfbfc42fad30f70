"""The manifests of Kubernetes, as far as they can be checked without a cluster: they agree, also with carpool."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from carpool.cli.verbs.serve import serve
from carpool.core.units import parse_bytes
from carpool.service.config import PORT

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy" / "kubernetes"
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))


def documents(name: str) -> dict[str, dict[str, Any]]:
    """The documents of a file by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8"))}


RAY, KUEUE = documents("raycluster.yaml"), documents("kueue.yaml")
SPEC: dict[str, Any] = RAY["RayCluster"]["spec"]
HEAD: dict[str, Any] = SPEC["headGroupSpec"]
(WORKERS,) = SPEC["workerGroupSpecs"]


def containers(group: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in group["template"]["spec"]["containers"]}


def test_the_daemon_is_started_with_options_that_exist() -> None:
    daemon = containers(HEAD)["carpool"]
    verb, *words = daemon["args"]
    assert (daemon["command"], verb) == (["carpool"], "serve")
    given = {word.partition("=")[0].removeprefix("--").replace("-", "_"): word.partition("=")[2] for word in words}
    context = serve.make_context("carpool", list(words))
    assert context.params["engine"] == "ray"
    assert context.params["ray_idle"] > 0, "nodes are released for the autoscaler"
    assert context.params["devices"] == "cuda"
    assert int(given["port"]) == PORT == daemon["ports"][0]["containerPort"]
    variable = re.fullmatch(r"\$\((\w+)\):(\d+)", given["ray_address"])
    assert variable is not None
    assert variable[1] in {each["name"] for each in daemon["env"]}
    assert int(variable[2]) == containers(HEAD)["ray-head"]["ports"][0]["containerPort"]


def test_daemon_and_head_share_what_ray_needs_and_the_state_is_durable() -> None:
    head, daemon = containers(HEAD)["ray-head"], containers(HEAD)["carpool"]
    volumes = {each["name"]: each for each in HEAD["template"]["spec"]["volumes"]}
    mounted = [{each["mountPath"]: each["name"] for each in one["volumeMounts"]} for one in (head, daemon)]
    assert mounted[0]["/tmp/ray"] == mounted[1]["/tmp/ray"]
    state = next(word.partition("=")[2] for word in daemon["args"] if word.startswith("--state"))
    claim = volumes[mounted[1][state]]["persistentVolumeClaim"]["claimName"]
    assert claim == RAY["PersistentVolumeClaim"]["metadata"]["name"]
    assert {name for each in mounted for name in each.values()} == volumes.keys()


def test_all_containers_have_one_image_and_the_pinned_ray() -> None:
    images = {each["image"] for group in (HEAD, WORKERS) for each in containers(group).values()}
    assert len(images) == 1
    assert SPEC["rayVersion"] == PINS["ray"]


def test_workers_have_what_the_agent_needs() -> None:
    (worker,) = containers(WORKERS).values()
    environment = {each["name"]: each["value"] for each in worker["env"]}
    assert environment == {"RAY_memory_monitor_refresh_ms": "0", "RAY_worker_niceness": "0"}
    assert int(worker["resources"]["limits"]["nvidia.com/gpu"]) > 0
    assert HEAD["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}, "the head is no machine for jobs"
    assert SPEC["enableInTreeAutoscaling"] is True
    assert WORKERS["minReplicas"] <= WORKERS["replicas"] <= WORKERS["maxReplicas"]


def test_the_queue_admits_the_whole_cluster_at_its_largest() -> None:
    metadata = RAY["RayCluster"]["metadata"]
    local, cluster = KUEUE["LocalQueue"], KUEUE["ClusterQueue"]
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == local["metadata"]["name"]
    assert metadata["namespace"] == local["metadata"]["namespace"] == KUEUE["Namespace"]["metadata"]["name"]
    assert RAY["PersistentVolumeClaim"]["metadata"]["namespace"] == metadata["namespace"]
    assert local["spec"]["clusterQueue"] == cluster["metadata"]["name"]
    (group,) = cluster["spec"]["resourceGroups"]
    (flavor,) = group["flavors"]
    assert flavor["name"] == KUEUE["ResourceFlavor"]["metadata"]["name"]
    quota = {each["name"]: amount(each["nominalQuota"]) for each in flavor["resources"]}
    assert [*quota] == group["coveredResources"]
    scaler = {"cpu": 0.5, "memory": float(512 << 20)}  # KubeRay's container for the autoscaler, beside the head
    for name, most in quota.items():
        head = sum(requested(each, name) for each in containers(HEAD).values())
        workers = sum(requested(each, name) for each in containers(WORKERS).values())
        assert head + WORKERS["maxReplicas"] * workers + scaler.get(name, 0.0) <= most, name


def requested(container: dict[str, Any], name: str) -> float:
    return amount(container["resources"]["requests"].get(name, "0"))


def amount(text: str) -> float:
    return float(text) if text.isdecimal() else float(parse_bytes(f"{text}B", "quota"))
