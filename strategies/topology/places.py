"""Where each rank of a job runs. Plain Python: what is told about places, not how it is found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from socket import gethostname

from boltmesh.strategies.topology.links import Link


@dataclass(frozen=True)
class Place:
    """Where one rank runs."""

    host: str
    """For messages."""
    machine: str
    """Equal on ranks that reach each other without the network, see ``this_host``."""
    device: str | None = None
    """The UUID of its GPU; None on the CPU, or where it has none."""
    index: int | None = None
    """What the rank calls its GPU: the number behind ``cuda:``."""


@dataclass(frozen=True)
class Topology:
    """The places of all ranks, and what joins those of a host."""

    places: Sequence[Place]
    """By global rank."""
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    """Between GPUs of one host, by ranks, the smaller one first; unknown ones are left out."""

    def link(self, one: int, other: int) -> Link | None:
        """Return what joins two ranks; None where they share a host and nobody knows more."""
        if self.places[one].machine != self.places[other].machine:
            return Link.NETWORK
        return self.links.get((min(one, other), max(one, other)))

    def hosts(self, ranks: Sequence[int]) -> list[str]:
        """Return the hosts of some ranks by name, in the order of the ranks, each once."""
        named = {self.places[rank].machine: self.places[rank].host for rank in ranks}
        return list(named.values())

    def by_host(self) -> list[list[int]]:
        """Return the ranks of each host."""
        found: dict[str, list[int]] = {}
        for rank, place in enumerate(self.places):
            found.setdefault(place.machine, []).append(rank)
        return list(found.values())


def this_host() -> tuple[str, str]:
    """Return the name of this host, and what tells it from others.

    Both count, the kernel's boot and the name, as for NCCL: containers of one machine that have
    names of their own do not share memory, and the network joins their ranks.
    """
    name = gethostname()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return name, f"{name} {boot}"
