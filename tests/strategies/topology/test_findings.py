"""Which groups a slow link holds up, on hosts as they are built."""

import pytest

from boltmesh.strategies.mesh import MeshLayout
from boltmesh.strategies.topology.links import (
    Link,
    RankLocation,
    Topology,
    arrange,
    find_slow_groups,
)


def hosts(*names: str) -> Topology:
    """Ranks without GPUs, each on the host of that name."""
    return Topology([RankLocation(name, f"machine of {name}") for name in names])


def host_of(
    num_gpus: int, slow: Link, *joined: tuple[set[int], Link], shows: bool = True
) -> Topology:
    """One host whose GPUs ``slow`` joins, but for sets of them that something else does."""
    links = {
        (one, other): max([slow, *(link for members, link in joined if {one, other} <= members)])
        for one in range(num_gpus)
        for other in range(one + 1, num_gpus)
    }
    places = [
        RankLocation("node-a", "a", f"GPU-{rank}", rank if shows else 0) for rank in range(num_gpus)
    ]
    return Topology(places, links)


def found(topology: Topology, **sizes: int) -> list[str]:
    layout = MeshLayout(**sizes)
    assert layout.world_size == len(topology.places)
    kinds = [axis for axis in ("tensor", "data") if layout.sizes[axis] > 1]
    return find_slow_groups(topology, {axis: layout.groups(axis) for axis in kinds})


@pytest.mark.parametrize(
    "sizes",
    [
        {"pipeline": 2, "tensor": 2},
        {"data": 2, "tensor": 2},
        {"pipeline": 2, "data": 2},
        {"data": 4},  # which has to cross hosts somewhere
        {"pipeline": 4},
    ],
)
def test_ranks_host_by_host_are_placed_well(sizes: dict[str, int]) -> None:
    assert found(hosts("a", "a", "b", "b"), **sizes) == []


def test_a_tensor_group_over_two_hosts_is_named_with_them() -> None:
    (text,) = found(hosts("a", "b", "a", "b"), pipeline=2, tensor=2)
    assert text == (
        "The tensor group {0, 1} crosses the hosts a and b: sums of every layer go over the "
        "network. Ranks are not numbered host by host (a has ranks 0, 2; b has ranks 1, 3), by "
        "which they would stay within one. Start them so: torchrun does, srun with "
        "--distribution=block, mpirun with --map-by slot."
    )


def test_a_data_group_that_could_stay_within_a_host_is_named() -> None:
    (text,) = found(hosts("a", "b", "a", "b"), pipeline=2, data=2)
    assert text.startswith("The data group {0, 1} crosses the hosts a and b: the gradients of each")


def test_hosts_of_one_cause_are_told_of_once() -> None:
    texts = found(hosts(*"abababab"), pipeline=2, data=2, tensor=2)
    assert [text.split(" crosses")[0] for text in texts] == ["The tensor group {0, 1}"]


def test_groups_of_shards_are_held_against_hosts_like_others() -> None:
    shards = [[0, 1], [2, 3]]
    assert find_slow_groups(hosts("a", "a", "b", "b"), {"shard": shards}) == []
    (text,) = find_slow_groups(hosts("a", "b", "b", "a"), {"shard": shards})
    assert text.startswith("The shard group {0, 1} crosses the hosts a and b: the gathered")


@pytest.mark.parametrize(
    ("kind", "carried"),
    [("expert", "the rows of every layer of experts"), ("new", "its collectives")],
)
def test_groups_of_any_axis_are_held_against_hosts(kind: str, carried: str) -> None:
    halves = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert find_slow_groups(hosts(*"aabbccdd"), {kind: halves}) == []  # they have to cross hosts
    (text,) = find_slow_groups(hosts(*"abbaabba"), {kind: [[0, 1], [2, 3]]})
    assert text.startswith(f"The {kind} group {{0, 1}} crosses the hosts a and b: {carried} go")


def test_a_tensor_size_that_fits_no_host_gets_one_that_does() -> None:
    (text,) = found(hosts("a", "a", "b", "b"), tensor=4)
    assert text.endswith("Use tensor=2, whose groups stay within a host.")
    (text,) = found(hosts("a", "a", "a", "b"), data=2, tensor=2)
    assert text.startswith("The tensor group {2, 3} crosses the hosts a and b")
    assert text.endswith("Start a multiple of 2 ranks on each host.")


def test_another_order_of_gpus_is_given_where_nvlink_joins_other_pairs() -> None:
    pairs = ({0, 2}, Link.NVLINK), ({1, 3}, Link.NVLINK)
    topology = host_of(4, Link.SOCKETS, *pairs)
    (text,) = found(topology, data=2, tensor=2)
    assert text == (
        "The tensor group {0, 1} on node-a is joined by the link between NUMA nodes: sums of every "
        "layer go over it. NVLink joins them in another order: devices=[0, 2, 1, 3]."
    )
    # Where each rank sees its own GPU alone, all are cuda:0.
    (text,) = found(host_of(4, Link.SOCKETS, *pairs, shows=False), data=2, tensor=2)
    assert text.endswith("give its ranks the GPUs GPU-0, GPU-2, GPU-1, GPU-3.")


def test_a_smaller_tensor_group_is_named_where_no_order_helps() -> None:
    topology = host_of(4, Link.HOST_BRIDGE, ({0, 1}, Link.NVLINK), ({2, 3}, Link.NVLINK))
    assert found(topology, data=2, tensor=2) == []
    (text,) = found(topology, tensor=4)
    assert text.endswith("NVLink joins groups of tensor=2.")
    crossed = host_of(4, Link.HOST_BRIDGE, ({0, 3}, Link.SWITCH), ({1, 2}, Link.SWITCH))
    (text,) = found(crossed, tensor=4)
    assert text.endswith("One PCIe switch joins groups of tensor=2, with devices=[0, 3, 1, 2].")


def test_what_nothing_faster_joins_is_no_finding() -> None:
    assert found(host_of(4, Link.SOCKETS), data=2, tensor=2) == []
    assert found(host_of(8, Link.NVLINK), tensor=8) == []
    # One pair has NVLink, and the other group would still wait for its own link.
    assert found(host_of(4, Link.SOCKETS, ({0, 3}, Link.NVLINK)), data=2, tensor=2) == []


def test_links_that_nobody_knows_are_no_finding() -> None:
    topology = host_of(4, Link.SOCKETS, ({0, 2}, Link.NVLINK), ({1, 3}, Link.NVLINK))
    unknown = Topology(topology.places, {(0, 2): Link.NVLINK, (1, 3): Link.NVLINK})
    assert found(unknown, data=2, tensor=2) == []


def test_an_order_joins_every_group_by_what_it_promises() -> None:
    topology = host_of(8, Link.SOCKETS, ({0, 3, 5, 6}, Link.NVLINK), ({1, 2, 4, 7}, Link.SWITCH))
    best = arrange(topology, list(range(8)), 4, above=Link.SOCKETS)
    assert best is not None
    assert (best.ranks, best.link) == ([0, 3, 5, 6, 1, 2, 4, 7], Link.SWITCH)
    assert arrange(topology, list(range(8)), 4, above=Link.SWITCH) is None
