"""The division of a job's layers over the tensor axis, shown beside its run."""

import msgspec

WHOLE = "whole"
"""The style of parameters that every rank keeps whole."""


class PlannedParameters(msgspec.Struct, frozen=True, gc=False):
    """Parameters that differ only in the numbers of their blocks."""

    pattern: str
    """Their names, with ``*`` in the place of numbers."""
    count: int
    shape: tuple[int, ...]
    """Shape of each, whole."""
    style: str
    """``whole``, or how it is divided: style, dimension, and the parts of that dimension."""
    why: str
    rank_bytes: int
    """Bytes that one rank keeps of them all; the most if ranks differ."""
    whole_bytes: int
    """Bytes of all of them."""
    collectives: str
    """Their collectives in every step, in words; empty for none."""


class PlannedBlocks(msgspec.Struct, frozen=True, gc=False):
    """Repeated blocks of one kind."""

    first: str
    """The name of the first of them; empty for parameters outside of blocks."""
    count: int
    backend: str
    """How their code is run: ``local`` on plain shards, ``region`` as DTensors, ``replicated``
    whole on every rank."""


class TensorPlanTable(msgspec.Struct, frozen=True):
    """How the parameters of a model are divided over the tensor axis."""

    size: int
    """Ranks of the axis."""
    rows: tuple[PlannedParameters, ...]
    """Divided parameters in the order of the model, then whole ones."""
    blocks: tuple[PlannedBlocks, ...] = ()
    """Empty before the plan was verified."""
    notes: tuple[str, ...] = ()
    """Disagreements, and the blocks that fell back with their reasons."""

    @property
    def rank_bytes(self) -> int:
        """Bytes that one rank keeps of all parameters."""
        return sum(row.rank_bytes for row in self.rows)

    @property
    def whole_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(row.whole_bytes for row in self.rows)
