"""What is planned for: how a model is shared out, and the job that it runs in."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from boltmesh.strategies.planner.precision import Widths


@dataclass(frozen=True)
class Sharing:
    """Which part of the model's state a rank keeps, and where."""

    name: str
    """As a config calls it, for example ``zero3_nvme``."""
    stage: int
    """0 is plain data parallelism; 1, 2 and 3 are ZeRO's."""
    state_shares: Mapping[str, float] = field(default_factory=dict)
    """Share of the optimizer state on ``host`` and ``disk``; what remains is on the device. Empty
    without offload of the optimizer."""
    parameter_place: str = "device"
    """Where shards wait to be gathered: ``device``, ``host`` or ``disk``."""
    tile_bytes: int | None = None
    """Larger weights are gathered in tiles of about this size."""
    keeps_in_buckets: bool | None = None
    """Whether replicas have their gradients in the buckets that they reduce; None: where nobody
    looks at them."""

    @property
    def has_engine(self) -> bool:
        """Whether the optimizer steps outside of the device, with fp32 masters of its own."""
        return bool(self.state_shares)


@dataclass(frozen=True)
class Job:
    """What is the same for every way to share a model out."""

    num_ranks: int
    """Of the data axis."""
    widths: Widths
    shard_size: int | None = None
    """Ranks that hold one copy of the state together; by default all."""
    num_microbatches: int = 1
    """Batches of a rank in an optimizer step."""
    state_copies: int = 2
    """Tensors of a parameter's size that the optimizer keeps: 2 for Adam, 1 for momentum."""
    optimizer: str = "AdamW"
    reads_gradients: bool = False
    """The Trainer itself looks at gradients, as a scaler and clipping by value do."""
    is_on_host: bool = False
    """The ranks compute on the CPU: device and host are one memory."""

    @property
    def num_shards(self) -> int:
        """Parts that the state of a copy is cut into."""
        return self.shard_size or self.num_ranks
