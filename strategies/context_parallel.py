"""``ContextParallelStrategy``: the ranks of a group divide the sequence of each batch."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from boltmesh.axes import divisors
from boltmesh.errors import LayoutError
from boltmesh.strategies.context.axis import ContextAxis
from boltmesh.strategies.context.options import ContextOptions
from boltmesh.strategies.context.positions import Balance
from boltmesh.strategies.context.seq_shard import Mechanism
from boltmesh.strategies.data_parallel.ddp import DdpAxis, DdpOptions
from boltmesh.strategies.data_parallel.options import ZeroOptions
from boltmesh.strategies.data_parallel.zero import ZeroAxis
from boltmesh.strategies.engine import MeshStrategy
from boltmesh.strategies.mesh import MeshLayout

if TYPE_CHECKING:
    from boltmesh.strategies.engine.data_axis import DataAxis


class ContextParallelStrategy(MeshStrategy):
    """Context parallelism, for long sequences, with an unchanged LightningModule.

    Every rank of a context group gets the whole batch and keeps some positions of its sequence,
    from the first embedding on: activations take ``1 / size`` of the memory. Results equal those of
    one process with the batch. What the code computes from the batch alone (labels, masks, position
    ids, counts) is whole on every rank; a divided tensor has the shape of the whole one. Functions
    that need all positions gather them; attention fetches the keys that its queries attend to, or
    exchanges heads for positions, whichever sends less.

    Which tensors hold the sequence is found by running the step on tensors without data. Before the
    first step one batch is run whole and divided: the run is refused unless the loss and every
    gradient agree.

    The loss that ``training_step`` returns, and logged or predicted values, are those of the whole
    sequence. Gradients are averaged over ``data x context``; hooks on activations see gradients
    that are ``size`` times those of one process.

    Args:
        size: Number of ranks that divide a sequence; None: all. A group may span hosts.
        zero_stage: What is sharded over the ranks of ``data x context``: 0 nothing, 1 optimizer
            state, 2 also gradients, 3 also parameters.
        attention: ``"keys"`` fetches the keys that this rank's queries attend to, ``"heads"``
            exchanges heads for positions, ``"ring"`` sends keys around a ring, one rank's at a
            time; ``"auto"`` picks keys or heads for each call, by the bytes sent. A call that the
            chosen one cannot do uses keys.
        balance: ``"contiguous"`` gives each rank one range of positions; ``"zigzag"`` two, one
            from each end, which balances causal attention; ``"documents"`` as many as balance it
            within the documents of each batch, which are found by position ids that restart.
        max_gather_bytes: Largest gathered tensor; a larger one is refused by name. Keys of
            attention are fetched for as many heads at a time as fit.
        dims: The dims of the sequence, by name or index of a batch entry: ``{"input_ids": 1}``;
            dims of that length are cut. None: found from the functions that work along it.
        tile_tokens: Positions that modules which treat each position alone, such as MLPs, compute
            at a time, and again in the backward pass. None: all at once, without recomputation.
        find_unused_parameters: As for ``DDPStrategy``, with ``zero_stage=0``.
        **kwargs: As for ``MeshStrategy``: ``timeout_s``, ``telemetry``, ``seed``,
            ``activation_checkpointing``, ``process_group_backend``, ``start_method`` and
            Lightning's own.

    Raises:
        ConfigError: If options contradict each other or do not exist.

    Sources: Llama 3, Grattafiori et al. 2024, section 3.3.2, https://arxiv.org/abs/2407.21783;
    DeepSpeed-Ulysses, Jacobs et al. 2023, https://arxiv.org/abs/2309.14509; Ring Attention, Liu et
    al. 2023, https://arxiv.org/abs/2310.01889
    """

    strategy_name = "bolt_context"

    def __init__(
        self,
        *,
        size: int | None = None,
        zero_stage: int = 0,
        attention: Mechanism = "auto",
        balance: Balance = "contiguous",
        max_gather_bytes: int | None = None,
        dims: Mapping[str | int, int] | None = None,
        tile_tokens: int | None = None,
        find_unused_parameters: bool = False,
        **kwargs: Any,
    ) -> None:
        self.options = ContextOptions(size, attention, balance, max_gather_bytes, dims, tile_tokens)
        self.context_axis = ContextAxis(self.options)
        replicas: DataAxis = DdpAxis(DdpOptions(find_unused_parameters=find_unused_parameters))
        if zero_stage:
            replicas = ZeroAxis(ZeroOptions(stage=zero_stage, key="zero_stage"))
        super().__init__(axes=[replicas, self.context_axis], **kwargs)

    @override
    def choose_layout(self, world_size: int) -> MeshLayout:
        size = self.options.size or world_size
        if size > world_size or world_size % size:
            fitting = max(each for each in divisors(world_size) if each <= size)
            raise LayoutError(
                f"size={size} was asked of a job with {world_size} ranks, and a context group "
                f"needs {size} of them. Set size={fitting}, or start a multiple of {size} ranks."
            )
        return MeshLayout.fill_data(world_size=world_size, context=size)
