"""The rows of a weight that are gathered together.

Arithmetic, no torch. A weight of ``rows`` rows is sharded as ``fully_shard`` does it: rank r of
``ranks`` holds the rows from ``r * shard_rows`` on. Tile i is rows ``starts[i]`` to ``starts[i] +
lengths[i]`` of *every* shard, so a tile is one all-gather of equal pieces, and consists of
``ranks`` separate runs of the weight's rows.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TilePlan:
    """Division of one weight into tiles."""

    rows: int
    ranks: int
    tile_rows: int
    """Rows of one shard in a tile; the last tile may have fewer."""

    @classmethod
    def of(cls, rows: int, row_bytes: int, ranks: int, max_bytes: int) -> "TilePlan":
        """Divide a weight so that no gathered tile is larger than ``max_bytes``.

        A tile has at least one row of each shard, whatever its size. Tiles have nearly equal sizes,
        rather than all full but the last.
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
        """Number of tiles."""
        return -(-self.shard_rows // self.tile_rows)

    def piece(self, tile: int) -> tuple[int, int]:
        """Return the first row of a tile within each shard, and its number of rows."""
        start = tile * self.tile_rows
        return start, min(self.tile_rows, self.shard_rows - start)

    def runs(self, tile: int) -> list[tuple[int, int, int]]:
        """Return the runs of rows in a gathered tile: first in it, first in the weight, count.

        The other rows of the tile are padding.
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
