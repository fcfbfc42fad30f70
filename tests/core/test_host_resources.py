"""What nodes have besides devices: how it is counted, and what is said when it runs short."""

from carpool.core.host_resources import NO_USAGE, HostResources, describe_resources, most_devices, resource_shortage

GIB = 1 << 30
NODE = HostResources(8, 16 * GIB, 0)


def test_hosting_counts_by_node_and_forgets_who_leaves() -> None:
    host_usage = (
        NO_USAGE.taking(0, "a", HostResources(2, GIB)).taking(0, "b", HostResources(1)).taking(1, "a", HostResources(4))
    )
    assert host_usage.taken(0) == HostResources(3, GIB)
    assert host_usage.taken(0, but="a") == HostResources(1)
    left = host_usage.giving(0, "a").giving(0, "b").giving(1, "nobody")
    assert left.taken(0) == HostResources()
    assert left.taken(1) == HostResources(4)
    assert host_usage.taken(0) == HostResources(3, GIB), "a value does not change"
    assert left.giving(1, "a") is NO_USAGE


def test_a_shortage_is_told_with_what_is_left_and_what_is_needed() -> None:
    assert resource_shortage(NODE, HostResources(6), HostResources(2, GIB)) == ""
    assert resource_shortage(NODE, HostResources(7), HostResources(2)) == "1 of 8 cores left, 2 needed"
    assert (
        resource_shortage(NODE, HostResources(0, 10 * GIB), HostResources(1, 8 * GIB))
        == "6 of 16 GiB RAM left, 8 needed"
    )


def test_what_nobody_knows_is_not_checked() -> None:
    assert resource_shortage(NODE, HostResources(), HostResources(disk_bytes=1 << 60)) == ""
    assert most_devices(HostResources(), HostResources(), HostResources(1)) is None


def test_the_scarcest_supply_says_for_how_many_devices_there_is_enough() -> None:
    assert most_devices(NODE, HostResources(2, 0), HostResources(2, GIB)) == 3
    assert most_devices(NODE, HostResources(2, 15 * GIB), HostResources(2, GIB)) == 1
    assert most_devices(NODE, HostResources(8, 0), HostResources(2)) == 0


def test_supplies_in_words() -> None:
    assert describe_resources(HostResources(4, 16 * GIB)) == "4 cores, 16 GiB RAM"
    assert describe_resources(HostResources()) == ""
