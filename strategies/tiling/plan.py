"""Which rows of a weight are gathered together.

Torch-free: arithmetic alone. A weight of ``rows`` rows is sharded as ``fully_shard`` does it: rank
r of ``ranks`` holds the rows from ``r * shard_rows`` on. Tile i is rows ``starts[i]`` to
``starts[i] + lengths[i]`` of *every* shard, so a tile is one all-gather of equal pieces, and it is
``ranks`` separate runs of the weight's rows.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TilePlan:
    """How one weight is cut."""

    rows: int
    ranks: int
    tile_rows: int
    """Rows of one shard in a tile; the last tile may have fewer."""

    @classmethod
    def of(cls, rows: int, row_bytes: int, ranks: int, max_bytes: int) -> "TilePlan":
        """Cut a weight so that no gathered tile is larger than ``max_bytes``.

        A tile has a row of each shard at least, whatever that takes. Tiles are alike in size, not
        all full but the last.
        """
        shard_rows = -(-rows // ranks)
        most = max(1, max_bytes // (row_bytes * ranks))
        count = -(-shard_rows // most)
        return cls(rows, ranks, -(-shard_rows // count))

    @property
    def shard_rows(self) -> int:
        """Rows of the largest shard; shards are padded to it."""
        return -(-self.rows // self.ranks)

    @property
    def count(self) -> int:
        """How many tiles there are."""
        return -(-self.shard_rows // self.tile_rows)

    def piece(self, tile: int) -> tuple[int, int]:
        """Return the first row of a tile within each shard, and how many it has."""
        start = tile * self.tile_rows
        return start, min(self.tile_rows, self.shard_rows - start)

    def runs(self, tile: int) -> list[tuple[int, int, int]]:
        """Return the runs of true rows in a gathered tile: first in it, first in the weight, count.

        What is missing of a tile's rows is padding.
        """
        start, length = self.piece(tile)
        found = []
        for rank in range(self.ranks):
            first = rank * self.shard_rows + start
            count = min(length, self.rows - first)
            if count > 0:
                found.append((rank * length, first, count))
        return found

    @property
    def is_even(self) -> bool:
        """Whether no shard has padding."""
        return self.rows == self.ranks * self.shard_rows
