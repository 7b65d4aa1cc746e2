"""``TensorParallelStrategy``: the ranks of a host share each layer, by a plan that finds itself."""

from typing import Any, Literal

from typing_extensions import override

from boltmesh.errors import LayoutError
from boltmesh.strategies.data_parallel.ddp import DdpAxis, DdpOptions
from boltmesh.strategies.engine import MeshStrategy
from boltmesh.strategies.mesh import MeshLayout
from boltmesh.strategies.tensor.axis import TensorAxis
from boltmesh.strategies.tensor.options import TensorOptions, UserPlan
from boltmesh.strategies.tensor.plan import TensorPlan


class TensorParallelStrategy(MeshStrategy):
    """Tensor parallelism for a LightningModule as its author wrote it.

    The ranks of a host share each layer: of attention every rank computes some heads, of an MLP
    some hidden channels, of the vocabulary some tokens. The same numbers as one process with the
    batch. Ranks beyond ``size`` are replicas with batches of their own, as with ``bolt_ddp``.

    Which dimensions can be divided is found by running ``training_step`` on tensors without data,
    and proven before the first step: with a batch of the run, the loss, every gradient and the
    output of each repeated kind of block are the same whole and divided. Kinds that are not stay
    whole on every rank, and the plan says so. Inputs, norms and what lies between blocks are alike
    on all ranks.

    Each rank has its part of divided parameters, in plain tensors under their own names, so
    ``state_dict`` raises: ``Trainer.save_checkpoint`` and ``ModelCheckpoint`` write the whole, and
    ``gathered_parameters`` shows it. Norms that a hook takes of gradients by hand are those of one
    rank; ``trainer.strategy.gradient_norm(optimizer)`` and ``torch.nn.utils.clip_grad_norm_`` are
    over all. Optimizers that need more of a parameter than its elements, such as Muon, step whole
    parameters, each at one rank; those that step by all gradients at once are refused.

    Args:
        size: Ranks that share a layer; by default all ranks of a host. They have to be on one host,
            for they wait for each other several times in every layer.
        plan: ``"auto"``, or a mapping of patterns of parameter names to styles (``"column"``,
            ``"row"``, ``"table"``, ``"vocabulary"``, ``"whole"``) that overrides parts of it.
        sequence_parallel: Divide the sequence between blocks, too: what norms and dropout keep for
            the backward pass is then divided by ``size``, at the same traffic.
        loss_parallel: Whether the loss is computed of logits that are divided over the vocabulary:
            ``"auto"`` where that is possible, True (an error where it is not) or False.
        find_unused_parameters: As for ``DDPStrategy``, where there are replicas.
        **kwargs: As for ``MeshStrategy``: ``timeout_s``, ``telemetry``, ``seed``,
            ``activation_checkpointing``, ``process_group_backend``, ``start_method`` and
            Lightning's own.

    Raises:
        ConfigError: When options contradict each other or do not exist.

    Sources: Megatron-LM, Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053; sequence
    parallelism, Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198
    """

    strategy_name = "bolt_tensor"

    def __init__(
        self,
        *,
        size: int | None = None,
        plan: UserPlan = "auto",
        sequence_parallel: bool = False,
        loss_parallel: bool | Literal["auto"] = "auto",
        find_unused_parameters: bool = False,
        **kwargs: Any,
    ) -> None:
        self.options = TensorOptions(size, plan, sequence_parallel, loss_parallel)
        self.tensor_axis = TensorAxis(self.options)
        replicas = DdpAxis(DdpOptions(find_unused_parameters=find_unused_parameters))
        super().__init__(axes=[replicas, self.tensor_axis], **kwargs)

    @property
    def plan(self) -> TensorPlan | None:
        """What is divided and how it is run; None before ``setup``."""
        return self.tensor_axis.plan

    @override
    def choose_layout(self, world_size: int) -> MeshLayout:
        per_host = min(self.num_processes or world_size, world_size)
        size = self.options.size or per_host
        if size > per_host or per_host % size:
            smaller = range(1, min(size, per_host) + 1)
            fitting = max(each for each in smaller if per_host % each == 0)
            raise LayoutError(
                f"size={size} was asked of hosts with {per_host} ranks each, and the ranks of a "
                f"tensor group have to be on one host, {size} by {size}. Set size={fitting}, or "
                f"start a multiple of {size} ranks on each host."
            )
        return MeshLayout.fill_data(world_size=world_size, tensor=size)
