"""Peers: their devices keep all properties on the way to another machine."""

import json

from carpool.jobs.devices import LocalDevice
from carpool.jobs.hosts_file import Host
from carpool.runtime.remote.remote_worker_stream import Peer, peer_from_json, peer_to_json

LANE = LocalDevice(3, "cuda:0@50", "H200@50", (), 0, 7, 50)
PEER = Peer(Host("b", "10.0.0.2", 7000, "secret"), (LocalDevice(2, "cpu:0", "cpu2", (0, 1)), LANE))


def test_a_peer_is_the_same_after_json() -> None:
    assert peer_from_json(json.loads(json.dumps(peer_to_json(PEER)))) == PEER


def test_a_lane_is_a_lane_on_another_machine() -> None:
    remote = PEER.remote_devices[3]
    assert (remote.name, remote.kind, remote.lane_percent, remote.host) == ("b/cuda:0@50", "H200@50", 50, "b")


def test_a_peer_of_an_older_version_has_whole_gpus() -> None:
    value = json.loads(json.dumps(peer_to_json(PEER)))
    value["devices"] = [device[:6] for device in value["devices"]]
    assert [device.lane_percent for device in peer_from_json(value).devices] == [0, 0]
