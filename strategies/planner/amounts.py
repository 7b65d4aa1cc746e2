"""Bytes by place."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import add


@dataclass(frozen=True)
class Bytes:
    """Bytes in the device's memory, in the host's and on a disk, of one rank."""

    device: int = 0
    host: int = 0
    disk: int = 0

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(self.device + other.device, self.host + other.host, self.disk + other.disk)

    @classmethod
    def at(cls, place: str, num_bytes: float) -> "Bytes":
        """So many bytes in one place."""
        return cls(**{place: round(num_bytes)})

    def on_host(self) -> "Bytes":
        """The same where the device has no memory but the host's."""
        return Bytes(0, self.device + self.host, self.disk)

    def items(self) -> list[tuple[str, int]]:
        """Place and bytes, for every place."""
        return [("device", self.device), ("host", self.host), ("disk", self.disk)]


def total(amounts: Iterable[Bytes]) -> Bytes:
    """Return the sum of any number of amounts."""
    return reduce(add, amounts, Bytes())
