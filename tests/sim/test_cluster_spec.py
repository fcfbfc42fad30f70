"""Clusters from text and from TOML, and what wrong ones get."""

from pathlib import Path

import pytest

from carpool.core.errors import InputError
from carpool.core.host_resources import HostResources
from carpool.core.topology import Cluster
from carpool.sim.cluster_spec import parse_cluster, read_cluster

GOOD = """
[[node]]
count = 2
devices = 4
kind = "V100"
memory = "16GiB"
[[node]]
name = "mixed"
bank = [{ devices = 1, kind = "K80" }, { devices = 2, kind = "V100" }]
[[link]]
ends = ["n0", "mixed"]
bytes_per_s = 1e9
"""


def banks(cluster: Cluster) -> list[list[tuple[int, str]]]:
    return [[(len(bank.devices), bank.kind) for bank in node.banks] for node in cluster.nodes]


def test_text_becomes_nodes() -> None:
    assert banks(parse_cluster("2x4xV100,1x2xP100")) == [[(4, "V100")], [(4, "V100")], [(2, "P100")]]


def test_a_file_with_banks_and_links(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(GOOD, encoding="utf-8")
    cluster = parse_cluster(str(path))
    assert banks(cluster) == [[(4, "V100")], [(4, "V100")], [(1, "K80"), (2, "V100")]]
    assert cluster.nodes[0].banks[0].memory_bytes == 16 << 30
    assert cluster.links[0].ends == ("n0", "mixed")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("node = 3", "node is 3"),
        ("[[node]]\nbank = []", "bank is []"),
        ("[[node]]\nbank = 3", "bank is 3"),
        ("[[node]]\ndevices = 0\nkind = 'V'", "devices is 0"),
        ("[[node]]\ndevices = 99999999999\nkind = 'V'", "more than"),
        ("[[node]]\ncount = 99999999\ndevices = 1\nkind = 'V'", "more than"),
        ("[[node]]\ndevices = 1", "kind is None"),
        ("[[node]]\ndevices = 1\nkind = 'V'\nmemory = 'lots'", "'lots'"),
        ("[[node]]\ndevice = 1\nkind = 'V'", "Did you mean devices"),
        ("[[node]]\nbank = [{ devices = 1, kind = 'V', memori = 3 }]", "Did you mean memory"),
        ("link = 3\n[[node]]\ndevices = 1\nkind = 'V'", "link is 3"),
        ("[[node]]\ndevices = 1\nkind = 'V'\n[[link]]\nends = ['n0', 'n9']\nbytes_per_s = 1", "unknown node 'n9'"),
        ("[[node]]\ndevices = 1\nkind = 'V'\n[[link]]\nends = ['n0', 'n0']\nbytes_per_s = nan", "bytes_per_s is nan"),
        (
            "[[node]]\ndevices = 1\nkind = 'V'\n[[link]]\nends = ['n0', 'n0']\nbytes_per_s = 1\nlatency_s = 'x'",
            "latency_s",
        ),
        ("[[node]]\nname = 'a'\ndevices = 1\nkind = 'V'\n[[node]]\nname = 'a'\ndevices = 1\nkind = 'V'", "two nodes"),
        ("", "has no [[node]]"),
        ("[[node", "is not TOML"),
    ],
)
def test_wrong_files(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        parse_cluster(str(path))
    assert words in str(caught.value)
    assert "c.toml" in str(caught.value)


def test_nodes_of_a_file_have_supplies(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    table = '[[node]]\ncount = 2\ndevices = 4\nkind = "V100"\ncpus = 16\nram = "64GiB"\n'
    table += '[[node]]\ndevices = 1\nkind = "K80"\n'
    path.write_text(table, encoding="utf-8")
    supplies = [node.resources for node in read_cluster(path).nodes]
    assert supplies == [HostResources(16, 64 << 30), HostResources(16, 64 << 30), HostResources()]
    path.write_text(table.replace("cpus = 16", "cpus = 0"), encoding="utf-8")
    with pytest.raises(InputError, match="cpus is 0"):
        read_cluster(path)
