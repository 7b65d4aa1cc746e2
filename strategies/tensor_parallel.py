"""``TensorParallelStrategy``: the ranks of a host share each layer, by an automatic plan."""

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

    The ranks of a host share each layer: every rank computes some heads of an attention,
    some hidden channels of an MLP, some tokens of the vocabulary. The results are those of one
    process with the batch. Ranks beyond ``size`` are replicas with batches of their own, as with
    ``bolt_ddp``.

    The plan is found by running ``training_step`` on tensors without data, and verified before the
    first step: with a batch of the run, the loss, every gradient and the output of each repeated
    kind of block must be the same whole and divided. Kinds that differ stay whole on every rank,
    and the plan lists them. Inputs, norms and activations between blocks are equal on all ranks.

    Each rank has its part of divided parameters, in plain tensors under their own names, so
    ``state_dict`` raises: ``Trainer.save_checkpoint`` and ``ModelCheckpoint`` write the whole, and
    ``gathered_parameters`` shows it. Gradient norms that a hook computes itself are those of one
    rank; ``trainer.strategy.gradient_norm(optimizer)`` and ``torch.nn.utils.clip_grad_norm_`` are
    over all ranks. Optimizers that need more of a parameter than its elements, such as Muon, step
    whole parameters, each on one rank; those that need all gradients at once are refused.

    Args:
        size: Ranks that share a layer; by default all ranks of a host. They must be on one host,
            since they wait for each other several times in every layer.
        plan: ``"auto"``, or a mapping of patterns of parameter names to styles (``"column"``,
            ``"row"``, ``"table"``, ``"vocabulary"``, ``"whole"``) that overrides parts of it.
        sequence_parallel: Divide the sequence between blocks, too: what norms and dropout store
            for the backward pass is then divided by ``size``, at the same traffic.
        loss_parallel: Whether the loss is computed from logits divided over the vocabulary:
            ``"auto"`` if possible, True (an error if not) or False.
        find_unused_parameters: As for ``DDPStrategy``, if there are replicas.
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
        """The plan that the model runs by; None before ``setup``."""
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
