"""Replicas: every rank of the data axis holds the whole model, gradients are averaged.

The work is done by torch's ``DistributedDataParallel``; this module sets its options and its
communication hook, and predicts the traffic of a step.

Source: PyTorch Distributed, Li et al. 2020, https://arxiv.org/abs/2006.15704
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.errors import UnsupportedError, first_of
from boltmesh.strategies.data_parallel.expected_memory import expected_held_memory
from boltmesh.strategies.data_parallel.single_rank import SingleRankAxis
from boltmesh.strategies.dry_run.unsupported import refuse_untrained
from boltmesh.strategies.engine.data_axis import AxisContext, DataAxis, broadcast_composites
from boltmesh.strategies.lightning_compat import prepare_for_backward
from boltmesh.strategies.torch_compat.communication import Replica, device_index, flush_static_graph
from boltmesh.strategies.torch_compat.tensors import storage_key
from boltmesh.telemetry.snapshot import MemoryKind
from boltmesh.telemetry.traffic import ExpectedTraffic

COMPRESSIONS = ("bf16", "powersgd")

_POWERSGD_MIN_RATE = 2.0
"""torch's default: a gradient is compressed if that at least halves it."""


_LEFT_OUT = re.compile(r"not receive grad for rank \d+: ([\d ]*\d)")

_TORCH_NAMES = (
    ("`torch.nn.parallel.DistributedDataParallel`", "`DDPStrategy`"),
    ("_set_static_graph()", "`DDPStrategy(static_graph=True)`"),
)


@dataclass(frozen=True)
class DdpOptions:
    """Options of ``DDPStrategy``; see its docstring."""

    bucket_cap_mb: float = 25.0
    static_graph: bool = False
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool | None = None
    """None: True unless user code may read gradients."""
    gradient_compression: str | None = None
    powersgd_rank: int = 1
    powersgd_start_step: int = 1000


class DdpAxis(DataAxis):
    """The data axis of plain data parallelism."""

    def __init__(self, options: DdpOptions) -> None:
        self.options = options
        self._trained_names: list[str] = []
        """Names of the trained parameters, by DDP's indices."""
        self._is_static_graph_flushed = False
        self._is_graph_known = False
        self._is_in_buckets = False
        """Whether gradients are views of buckets, which the next backward pass writes to."""
        self._has_averaged = False
        """Whether manual optimisation has run a backward pass through the strategy."""

    @override
    def for_one_rank(self) -> DataAxis:
        return SingleRankAxis()

    @override
    def wrap(self, module: Module, context: AxisContext) -> Module:
        options, group, device = self.options, context.group, context.device
        refuse_untrained(module)
        if group.size() > 1:
            _refuse_max_norm(module)
        self.other_shares = context.norm_shares
        self._is_in_buckets = self._keeps_in_buckets(context)
        broadcast_composites(module, group)
        # Built on the stream of the steps: autograd nodes of different streams wait for each other.
        wrapped = Replica(
            module,
            device_ids=device_index(device),
            process_group=group,
            bucket_cap_mb=options.bucket_cap_mb,
            static_graph=options.static_graph,
            find_unused_parameters=options.find_unused_parameters,
            gradient_as_bucket_view=self._is_in_buckets,
        )
        self._is_static_graph_flushed = False
        self._is_graph_known = False
        self._trained_names = [
            name for name, each in module.named_parameters() if each.requires_grad
        ]
        trained = frozenset(each for each in module.parameters() if each.requires_grad)
        wrapped.register_forward_pre_hook(partial(_refuse_unfrozen, trained))
        self._register_compression(wrapped, group)
        return wrapped

    def _keeps_in_buckets(self, context: AxisContext) -> bool:
        chosen = self.options.gradient_as_bucket_view
        return not context.reads_gradients if chosen is None else chosen

    @override
    def adopt(self, optimizers: Sequence[Optimizer], *, reads_gradients: bool) -> None:
        for each in optimizers if self._is_in_buckets else ():
            is_of_torch = type(each).__module__.startswith("torch.")  # and keeps no gradient
            if not is_of_torch and hasattr(each, "register_step_post_hook"):
                each.register_step_post_hook(_copy_kept_gradients)

    def _register_compression(self, wrapped: DistributedDataParallel, group: ProcessGroup) -> None:
        if self.options.gradient_compression == "bf16":
            wrapped.register_comm_hook(group, bf16_hook)
        elif self.options.gradient_compression == "powersgd":
            state = PowerSGDState(
                process_group=group,
                matrix_approximation_rank=self.options.powersgd_rank,
                start_powerSGD_iter=self.options.powersgd_start_step,
                min_compression_rate=_POWERSGD_MIN_RATE,
            )
            wrapped.register_comm_hook(state, powerSGD_hook)

    @override
    @contextmanager
    def no_sync(self, module: Module) -> Iterator[None]:
        if not isinstance(module, DistributedDataParallel):
            yield
        elif module.static_graph and not self._is_graph_known:
            # DDP learns a static graph from its first backward pass and has to reduce in it. The
            # averages left in ``.grad`` do not change when they are averaged again.
            self._is_graph_known = True
            yield
        else:
            with module.no_sync():
                yield

    @override
    def explain(self, error: BaseException) -> None:
        """Replace torch's argument names and parameter indices in its error by ours."""
        text = str(error)
        left_out = _LEFT_OUT.search(text)
        if left_out and not self.options.find_unused_parameters:
            names = [repr(self._trained_names[int(each)]) for each in left_out[1].split()]
            advice = (
                f"{first_of(names)} took no part in the loss of the batch before, and DDP waits "
                f"for the gradients. Use every parameter in every step, or write "
                f"strategy='bolt_ddp_find_unused_parameters_true' (find_unused_parameters=True, of "
                f"DDPStrategy and TensorParallelStrategy), or zero_stage=1 for Parallel3DStrategy."
            )
            error.args = (advice,)
        elif isinstance(error, RuntimeError) and _TORCH_NAMES[0][0] in text:
            for name, own in _TORCH_NAMES:
                text = text.replace(name, own)
            error.args = (text,)

    @override
    def before_manual_backward(self, module: Module, loss: torch.Tensor) -> None:
        # Under manual optimisation the forward pass must not prepare the reducer: each
        # ``manual_backward`` does, for its own loss.
        self._has_averaged = True
        if isinstance(module, DistributedDataParallel):
            prepare_for_backward(module, loss)

    @override
    def after_manual_backward(self, module: Module) -> None:
        if (
            isinstance(module, DistributedDataParallel)
            and module.static_graph
            and not self._is_static_graph_flushed
        ):
            flush_static_graph(module)
            self._is_static_graph_flushed = True

    @override
    def after_optimizer_step(self, module: Module, optimizer: Optimizer) -> None:
        if self._has_averaged or not isinstance(module, DistributedDataParallel):
            return
        if not module.module.automatic_optimization:
            self._has_averaged = True  # warn once
            rank_zero_warn(
                "An optimizer stepped, and no backward pass went through self.manual_backward, so "
                "the ranks have averaged no gradients and train apart. Write "
                "self.manual_backward(loss) for loss.backward(), or average .grad in the step."
            )

    @override
    def expected_traffic(self, module: Module) -> list[ExpectedTraffic]:
        # Valid from the third step on: DDP rebuilds its buckets once, in the second.
        if not isinstance(module, DistributedDataParallel):
            return []
        parameters = [p for p in module.module.parameters() if p.requires_grad]
        whole = sum(p.numel() * p.element_size() for p in parameters)
        compression = self.options.gradient_compression
        if compression == "bf16":
            payload, why = 2 * sum(p.numel() for p in parameters), "gradients in bf16"
        elif compression == "powersgd":
            payload = sum(self._powersgd_bytes(p) for p in parameters)
            why = f"PowerSGD factors of rank {self.options.powersgd_rank}"
        else:
            payload, why = whole, "gradients of the trainable parameters, once per optimizer step"
        if self.options.find_unused_parameters:
            payload += 4 * len(parameters)
            why = f"{why}; a map of the used parameters, 4 bytes each"
        traffic = [ExpectedTraffic("data", "allreduce", payload, None, why)]
        buffers = sum(b.numel() * b.element_size() for b in module.modules_buffers)
        if buffers:
            why = "buffers of the first data rank, before a synchronised forward pass"
            traffic.append(ExpectedTraffic("data", "broadcast", buffers, None, why))
        return traffic

    @override
    def expected_memory(self, module: Module, optimizers: Sequence[Optimizer]) -> list[MemoryKind]:
        return expected_held_memory(module, optimizers)

    def _powersgd_bytes(self, parameter: torch.Tensor) -> int:
        """Bytes after the warm-up: both factors if that compresses enough, else the gradient."""
        numel, size = parameter.numel(), parameter.element_size()
        if parameter.dim() < 2:
            return numel * size
        rows = parameter.shape[0]
        columns = numel // rows
        rank = min(rows, columns, self.options.powersgd_rank)
        factors = (rows + columns) * rank
        return (factors if factors * _POWERSGD_MIN_RATE < numel else numel) * size


def _copy_kept_gradients(optimizer: Optimizer, *_: object) -> None:
    """Copy gradients that an optimizer stored in its state, as some do for the next step."""
    for parameter, state in optimizer.state.items():
        gradient = getattr(parameter, "grad", None)
        if gradient is None or not isinstance(state, dict):
            continue
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and storage_key(value) == storage_key(gradient):
                state[key] = value.clone()


def _refuse_max_norm(module: Module) -> None:
    """Refuse embeddings that renormalize rows in place: each rank would for its own batch's rows.

    Raises:
        UnsupportedError: Naming the embedding.
    """
    for name, each in module.named_modules():
        if isinstance(each, (nn.Embedding, nn.EmbeddingBag)) and each.max_norm is not None:
            raise UnsupportedError(
                f"{name!r} has max_norm={each.max_norm}, and every rank would shorten the rows of "
                f"its own batch, so that replicas differ. Leave max_norm out, or normalise rows "
                f"in forward()."
            )


def _refuse_unfrozen(
    trained: frozenset[Parameter], wrapped: DistributedDataParallel, _inputs: object
) -> None:
    """Refuse parameters unfrozen during the run: DDP would not average their gradients.

    Raises:
        UnsupportedError: Naming one of them.
    """
    if not torch.is_grad_enabled():
        return
    for name, parameter in wrapped.module.named_parameters():
        if parameter.requires_grad and parameter not in trained:
            raise UnsupportedError(
                f"{name!r} was unfrozen after the run had begun, and DDP averages the gradients of "
                f"parameters that were trained at its beginning. Unfreeze it before Trainer.fit "
                f"and leave it out of the optimizer until then, or use bolt_zero1."
            )


def bf16_hook(group: ProcessGroup, bucket: GradBucket) -> Future[torch.Tensor]:
    """Run torch's bf16 compression under another name.

    torch refuses its own hook by name unless NCCL is available, but gloo reduces bf16, too.
    Collective.

    Args:
        group: The ranks.
        bucket: Flat gradients, ``(N,)``.

    Returns:
        A future of their average, in the same shape and dtype.
    """
    hook: Future[torch.Tensor] = default_hooks.bf16_compress_hook(group, bucket)
    return hook
