"""Data, pipeline and tensor axes as a user composes them of torch's own parts, for one model.

``parallelize_module`` on a plan written for this model, ``fully_shard`` on each block and on the
stage, and ``Schedule1F1B``: what torchtitan does for its models. Parameters are gathered once and
gradients reduced once a step, which is ZeRO's stage 1: nothing is resharded after a forward pass,
and torch's pipeline reduces after the last microbatch. The norm is one collective of all ranks.

The same ranks stand at the same places as in ``MeshLayout``: pipeline outermost, tensor innermost.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from boltmesh.strategies.mesh import MeshLayout
from tests.benchmarks.peers.transformer import Transformer, cross_entropy


class StageModule(nn.Module):
    """Some blocks, behind the embedding on the first stage and before the head on the last."""

    def __init__(self, whole: Transformer, number: int, num_stages: int) -> None:
        super().__init__()
        count = len(whole.blocks)
        first, end = (each * count // num_stages for each in (number, number + 1))
        self.blocks = whole.blocks[first:end]
        self.embedding = whole.embedding if number == 0 else None
        self.norm = whole.norm if end == count else None
        self.head = whole.head if end == count else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        if self.norm is None or self.head is None:
            return x
        return self.head(self.norm(x))


def parallelize(stage: "StageModule | Transformer", mesh: DeviceMesh) -> None:
    """Divide layers over the tensor axis; logits stay divided up to the loss."""
    for block in stage.blocks:
        plan: dict[str, ParallelStyle] = {
            # One input of three projections: their gradients of it are reduced together.
            "attention": PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Replicate()
            )
        }
        for name in ("attention.q", "attention.k", "attention.v", "up"):
            plan[name] = ColwiseParallel()
        for name in ("attention.out", "down"):
            plan[name] = RowwiseParallel()
        parallelize_module(block, mesh, plan)
    ends: dict[str, ParallelStyle] = {}
    if stage.embedding is not None:
        ends["embedding"] = RowwiseParallel(input_layouts=Replicate())
    if stage.head is not None:
        ends["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(stage, mesh, ends)


class HandWritten:
    """One rank's stage and its steps. Collective to make.

    Args:
        whole: The model, alike on all ranks; its modules are used.
        layout: The sizes of the axes.
        microbatches: Of a batch.
        max_norm: Of all gradients together.
        learning_rate: Of AdamW.
    """

    def __init__(
        self,
        whole: Transformer,
        layout: MeshLayout,
        *,
        microbatches: int,
        max_norm: float,
        learning_rate: float,
    ) -> None:
        self._mesh = init_device_mesh(
            "cpu", tuple(layout.sizes.values()), mesh_dim_names=tuple(layout.sizes)
        )
        self._layout, self._max_norm, self._learning_rate = layout, max_norm, learning_rate
        number = self._mesh["pipeline"].get_local_rank()
        self._is_first, self.is_last = number == 0, number == layout.pipeline - 1
        stage = StageModule(whole, number, layout.pipeline)
        if layout.tensor > 1:
            parallelize(stage, self._mesh["tensor"])
        self._divided = {name for name, each in stage.named_parameters() if _is_divided(each)}
        if layout.data > 1:
            for module in (*stage.blocks, stage):
                fully_shard(module, mesh=self._mesh["data"], reshard_after_forward=False)
        self.stage = stage
        group = self._mesh["pipeline"].get_group()
        pipeline_stage = PipelineStage(
            stage, number, layout.pipeline, torch.device("cpu"), group=group
        )
        self._schedule = Schedule1F1B(pipeline_stage, microbatches, loss_fn=cross_entropy)
        self.norm = torch.zeros(())
        """Of the newest step's gradients before they were clipped."""
        self.restart()

    def restart(self) -> None:
        """Begin with a new optimizer, as each run of a Trainer does."""
        # One group's parameters go through one fused operator, which takes no mixture.
        parameters = list(self.stage.parameters())
        kinds = [
            [each for each in parameters if isinstance(each, DTensor) is kind]
            for kind in (False, True)
        ]
        groups = [{"params": kind} for kind in kinds if kind]
        self._optimizer = torch.optim.AdamW(groups, lr=self._learning_rate, fused=True)

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor | None:
        """Train on a batch of this data rank; return its loss on ranks of the last stage."""
        self._optimizer.zero_grad()
        losses: list[Tensor] = []
        with self._loss_context():
            self._schedule.step(
                *((tokens,) if self._is_first else ()),
                target=targets if self.is_last else None,
                losses=losses if self.is_last else None,
                return_outputs=False,
            )
        self._clip()
        self._optimizer.step()
        return _whole(torch.stack(losses).mean()) if losses else None

    def _loss_context(self) -> AbstractContextManager[None]:
        is_divided = self._layout.tensor > 1 and self.is_last
        return loss_parallel() if is_divided else nullcontext()

    @torch.no_grad()
    def _clip(self) -> None:
        """What is alike on all ranks of the tensor axis is counted once."""
        alike: list[Tensor] = []
        divided: list[Tensor] = []
        for name, grad in self._gradients():
            (divided if name in self._divided else alike).append(grad)
        squares = _sum_of_squares(divided) + _sum_of_squares(alike) / self._layout.tensor
        dist.all_reduce(squares)
        self.norm = squares.sqrt()
        factor = (self._max_norm / (self.norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(divided + alike, factor)

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, each in self.stage.named_parameters():
            if each.grad is not None:
                grad = each.grad
                yield name, grad.to_local() if isinstance(grad, DTensor) else grad


def _is_divided(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and any(each.is_shard() for each in parameter.placements)


def _sum_of_squares(grads: list[Tensor]) -> Tensor:
    if not grads:
        return torch.zeros(())
    return torch.stack(torch._foreach_norm(grads)).square().sum()


def _whole(loss: Tensor) -> Tensor:
    return loss.full_tensor() if isinstance(loss, DTensor) else loss
