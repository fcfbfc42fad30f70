"""What nodes have besides devices: how it is counted, and what is said when it runs short."""

from carpool.core.supplies import NOBODY, Supplies, described, most_devices, shortage

GIB = 1 << 30
NODE = Supplies(8, 16 * GIB, 0)


def test_hosting_counts_by_node_and_forgets_who_leaves() -> None:
    hosting = NOBODY.taking(0, "a", Supplies(2, GIB)).taking(0, "b", Supplies(1)).taking(1, "a", Supplies(4))
    assert hosting.taken(0) == Supplies(3, GIB)
    assert hosting.taken(0, but="a") == Supplies(1)
    left = hosting.giving(0, "a").giving(0, "b").giving(1, "nobody")
    assert left.taken(0) == Supplies()
    assert left.taken(1) == Supplies(4)
    assert hosting.taken(0) == Supplies(3, GIB), "a value does not change"
    assert left.giving(1, "a") is NOBODY


def test_a_shortage_is_told_with_what_is_left_and_what_is_needed() -> None:
    assert shortage(NODE, Supplies(6), Supplies(2, GIB)) == ""
    assert shortage(NODE, Supplies(7), Supplies(2)) == "1 of 8 cores left, 2 needed"
    assert shortage(NODE, Supplies(0, 10 * GIB), Supplies(1, 8 * GIB)) == "6 of 16 GiB RAM left, 8 needed"


def test_what_nobody_knows_is_not_checked() -> None:
    assert shortage(NODE, Supplies(), Supplies(disk_bytes=1 << 60)) == ""
    assert most_devices(Supplies(), Supplies(), Supplies(1)) is None


def test_the_scarcest_supply_says_for_how_many_devices_there_is_enough() -> None:
    assert most_devices(NODE, Supplies(2, 0), Supplies(2, GIB)) == 3
    assert most_devices(NODE, Supplies(2, 15 * GIB), Supplies(2, GIB)) == 1
    assert most_devices(NODE, Supplies(8, 0), Supplies(2)) == 0


def test_supplies_in_words() -> None:
    assert described(Supplies(4, 16 * GIB)) == "4 cores, 16 GiB RAM"
    assert described(Supplies()) == ""
