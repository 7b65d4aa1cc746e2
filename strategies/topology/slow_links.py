"""Groups of ranks that a slow link delays although the job has a faster one for them.

Results do not depend on links. So a finding is a warning, which names the group, its link and the
alternative. Sizes that no order of ranks can place inside a host are refused earlier, by
``fit_layout`` in ``mesh.py``.

``arrange`` divides the GPUs of a host into groups connected by fast links.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from boltmesh.strategies.topology.links import Link, Topology

MOST_RANKS = 16
"""Hosts with more ranks are not searched: no host has more GPUs of one job, and the search grows
fast."""


class Arrangement(NamedTuple):
    """An order of ranks in which neighbours form groups."""

    ranks: list[int]
    """The ranks whose GPUs the ranks of the host should use, in the order of the ranks."""
    link: Link
    """The slowest link within any group."""


def arrange(
    topology: Topology, ranks: Sequence[int], size: int, *, above: Link
) -> Arrangement | None:
    """Find the order with the fastest links within groups; the present one if it is as good.

    Args:
        topology: Topology of the job.
        ranks: Ranks of one host, in order.
        size: Size of a group; divides their number.
        above: All links have to be faster than this.

    Returns:
        None if there is no such order.
    """
    if len(ranks) > MOST_RANKS:
        return None
    for link in sorted((each for each in Link if each > above), reverse=True):
        found = _cut(topology, list(ranks), size, link)
        if found is not None:
            return Arrangement(found, link)
    return None


def _cut(topology: Topology, ranks: list[int], size: int, link: Link) -> list[int] | None:
    """Return the ranks in groups connected by at least ``link``, group after group."""
    if not ranks:
        return []
    first, rest = ranks[0], ranks[1:]
    near = [rank for rank in rest if _is_joined(topology, first, rank, link)]
    for others in combinations(near, size - 1):
        if all(_is_joined(topology, one, two, link) for one, two in combinations(others, 2)):
            left = _cut(topology, [rank for rank in rest if rank not in others], size, link)
            if left is not None:
                return [first, *others, *left]
    return None


def _is_joined(topology: Topology, one: int, other: int, link: Link) -> bool:
    found = topology.link(one, other)
    return found is not None and found >= link


Groups = Sequence[Sequence[int]]

CARRIED = {
    "tensor": "sums of every layer",
    "context": "the keys of every attention",
    "shard": "the gathered parameters and reduced gradients of every block",
    "data": "the gradients of each step",
}
"""Traffic of each kind of group, for messages."""


def find_slow_groups(topology: Topology, groups: Mapping[str, Groups]) -> list[str]:
    """Return a message for each kind of group that could be placed on faster links.

    Args:
        topology: Topology of the job.
        groups: Groups whose ranks should be near each other, by kind, in decreasing order of
            traffic: ``"tensor"``, ``"shard"``, ``"data"``.

    Returns:
        A sentence or two for each finding: at most one on hosts, since they have one cause, and one
        on the links within hosts.
    """
    found = []
    for kind, ranks in groups.items():
        if text := _on_hosts(topology, kind, ranks):
            found.append(text)
            break
    if text := _on_links(topology, groups.get("tensor", ())):
        found.append(text)
    return found


def _on_hosts(topology: Topology, kind: str, groups: Groups) -> str | None:
    """Return a message about groups that cross hosts although they need not."""
    crossing = [each for each in groups if len(topology.hosts(each)) > 1]
    if not crossing:
        return None
    by_host = topology.by_host()
    # The rank at each place if ranks were numbered host by host.
    ordered = [rank for ranks in by_host for rank in ranks]
    better = [[ordered[at] for at in each] for each in groups]
    spans = [max(len(topology.hosts(each)) for each in cut) for cut in (groups, better)]
    num_apart = [sum(len(topology.hosts(each)) > 1 for each in cut) for cut in (groups, better)]
    first = crossing[0]
    said = (
        f"{_group(kind, first)} crosses the hosts {_and(topology.hosts(first))}: "
        f"{CARRIED[kind]} go over {Link.NETWORK.words}."
    )
    if (spans[1], num_apart[1]) < (spans[0], num_apart[0]):
        numbered = "; ".join(
            f"{topology.places[ranks[0]].host} has {_ranks(ranks)}" for ranks in by_host[:2]
        )
        return (
            f"{said} Ranks are not numbered host by host ({numbered}), by which they would stay "
            f"within one. Start them so: torchrun does, srun with --distribution=block, mpirun "
            f"with --map-by slot."
        )
    if kind != "tensor":
        return None  # the data axis has to cross hosts somewhere
    size = _largest_within([len(ranks) for ranks in by_host], len(first))
    if size == 1:
        return f"{said} Start a multiple of {len(first)} ranks on each host."
    return f"{said} Use tensor={size}, whose groups stay within a host."


def _on_links(topology: Topology, groups: Groups) -> str | None:
    """Return a message about groups within a host whose GPUs have faster links in another order."""
    for ranks in topology.by_host():
        inside = [each for each in groups if set(each) <= set(ranks)]
        if not inside or len(inside[0]) < 2:
            continue
        members = [rank for each in inside for rank in each]
        slowest = min(inside, key=lambda each: _slowest(topology, each) or Link.NVLINK)
        level = _slowest(topology, slowest)
        if level is None or level == Link.NVLINK:
            continue
        said = (
            f"{_group('tensor', slowest)} on {topology.places[slowest[0]].host} is joined by "
            f"{level.words}: {CARRIED['tensor']} go over it."
        )
        best = arrange(topology, members, len(slowest), above=level)
        if best is not None:
            order = _order(topology, best.ranks)
            return f"{said} {_capital(best.link.words)} joins them in another order: {order}."
        for size in _divisors_below(len(slowest)):
            best = arrange(topology, members, size, above=level)
            if best is not None:
                order = "" if best.ranks == members else f", with {_order(topology, best.ranks)}"
                return f"{said} {_capital(best.link.words)} joins groups of tensor={size}{order}."
    return None


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]


def _slowest(topology: Topology, ranks: Sequence[int]) -> Link | None:
    """Return the slowest link among ranks; None where one is not known."""
    slowest = Link.NVLINK
    for at, one in enumerate(ranks):
        for other in ranks[at + 1 :]:
            link = topology.link(one, other)
            if link is None:
                return None
            slowest = min(slowest, link)
    return slowest


def _order(topology: Topology, ranks: Sequence[int]) -> str:
    """Format the order in which a host's ranks should use its GPUs."""
    indices = [topology.places[rank].index for rank in ranks]
    if None in indices or len(set(indices)) < len(indices):  # each rank sees only its own GPU
        gpus = ", ".join(str(topology.places[rank].device) for rank in ranks)
        return f"give its ranks the GPUs {gpus}"
    return f"devices={indices}"


def _largest_within(num_ranks: Sequence[int], size: int) -> int:
    """Return the largest divisor of ``size`` that divides the number of ranks of each host."""
    return next(
        each
        for each in range(size, 0, -1)
        if not size % each and not any(n % each for n in num_ranks)
    )


def _divisors_below(size: int) -> list[int]:
    return [each for each in range(size - 1, 1, -1) if not size % each]


def _group(kind: str, ranks: Sequence[int]) -> str:
    return f"The {kind} group {{{', '.join(map(str, ranks))}}}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _and(names: Sequence[str]) -> str:
    shown = list(names[:3]) + ([f"{len(names) - 3} more"] if len(names) > 3 else [])
    return " and ".join([", ".join(shown[:-1]), shown[-1]])
