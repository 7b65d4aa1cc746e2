"""What the ranks of an engine hold at the fullest moment of a step and between steps, in bytes.

An engine first trains a small model, so that what libraries take once for all is in the baseline.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from boltmesh.strategies import telemetry
from boltmesh.strategies.cost_model.memory import MemoryEstimate, estimate_memory
from boltmesh.strategies.cost_model.model import ModelShape, ShardingLayout, TensorShape, UnitShape
from boltmesh.strategies.data_parallel.expected_memory import describe_job
from boltmesh.strategies.data_parallel.zero import ZeroAxis
from boltmesh.strategies.ddp import DDPStrategy
from boltmesh.strategies.engine import MeshStrategy
from boltmesh.strategies.zero import ZeROStrategy
from boltmesh.telemetry.writer.memory import measure
from tests.benchmarks.peers.boltmesh_engine import Batches, Module, silence
from tests.benchmarks.peers.deepspeed_engine import Sharded, memory_config_of
from tests.benchmarks.peers.network import build_batches, build_network, loss_of
from tests.benchmarks.peers.problem import Problem
from tests.benchmarks.peers.resident import forget_peak, resident_bytes

STEPS = 3


@dataclass
class Weights:
    """Of one rank, in bytes; without what was resident before the model was built."""

    peak: int = 0
    """The most within the last step."""
    between: int = 0
    """After it."""
    kinds: dict[str, int] = field(default_factory=dict)
    """Tensors before the optimizer's step, by what they are for."""
    planned: MemoryEstimate | None = None
    losses: list[float] = field(default_factory=list)


class Scale(Callback):
    """Weighs this process around the last step."""

    reads_gradients = False

    def __init__(self, strategy: MeshStrategy, accumulate: int) -> None:
        self.weights = Weights()
        self._strategy, self._accumulate = strategy, accumulate

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % self._accumulate == 0:
            gc.collect()
            forget_peak()

    def on_before_optimizer_step(self, *args: Any) -> None:
        strategy = self._strategy
        assert strategy.model is not None
        tensors = strategy.data_axis.tensors_by_kind(strategy.model, strategy.optimizers)
        found = measure(tensors or telemetry.tensors_by_kind(strategy), "host")
        self.weights.kinds = {kind: size for (kind, _), size in found.items()}
        self.weights.planned = plan(strategy, pl_module=args[1], accumulate=self._accumulate)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, *args: Any
    ) -> None:
        # The Trainer has divided it for the mean over micro-batches.
        self.weights.losses.append(float(outputs["loss"]) * self._accumulate)
        self.weights.peak = resident_bytes("VmHWM")
        gc.collect()
        self.weights.between = resident_bytes()


def plan(strategy: MeshStrategy, pl_module: Module, accumulate: int) -> MemoryEstimate:
    """What our own planner says of the same rank."""
    axis = strategy.data_axis
    if isinstance(axis, ZeroAxis):
        stage = axis.options.stage
        known = axis._expectations
        return estimate_memory(known.shape, ShardingLayout("", stage), known.job)
    shapes = tuple(
        TensorShape(name, tuple(each.shape), is_multiplied=name.endswith("weight"))
        for name, each in pl_module.named_parameters()
    )
    job = describe_job(
        num_ranks=strategy.world_size,
        shard_size=strategy.world_size,
        num_microbatches=accumulate,
        compute_dtype=torch.bfloat16 if pl_module.problem.is_bf16 else None,
        is_on_host=True,
    )
    return estimate_memory(ModelShape("", (UnitShape("", shapes),)), ShardingLayout("", 0), job)


def weigh_ours(
    rank: int, world_size: int, stage: int, problem: Problem, accumulate: int
) -> Weights:
    """``ZeROStrategy``, or ``DDPStrategy`` as stage 0, under the Trainer."""
    return _weigh(problem, partial(_train_ours, world_size, stage, accumulate))


def _train_ours(world_size: int, stage: int, accumulate: int, problem: Problem) -> Weights:
    strategy = ZeROStrategy(stage=stage, telemetry=False) if stage else DDPStrategy(telemetry=False)
    scale = Scale(strategy, accumulate)
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        precision="bf16-mixed" if problem.is_bf16 else "32-true",
        gradient_clip_val=problem.max_norm,
        accumulate_grad_batches=accumulate,
        max_steps=STEPS,
        callbacks=[scale],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(problem), DataLoader(Batches(problem), batch_size=None))
    return scale.weights


def weigh_deepspeed(
    rank: int, world_size: int, stage: int, problem: Problem, accumulate: int, setting: Sharded
) -> Weights:
    """DeepSpeed's engine."""
    return _weigh(problem, partial(_train_deepspeed, stage, accumulate, setting))


def _train_deepspeed(stage: int, accumulate: int, setting: Sharded, problem: Problem) -> Weights:
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    model = build_network(problem.width, problem.depth)
    config = memory_config_of(stage, problem, accumulate, setting)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    batches = build_batches(problem.width, problem.rows)
    dtype = torch.bfloat16 if problem.is_bf16 else torch.float32
    weights = Weights()
    for number in range(STEPS * accumulate):
        if number % accumulate == 0:
            gc.collect()
            forget_peak()
        inputs, targets = batches[number % len(batches)]
        loss = loss_of(engine(inputs.to(dtype)), targets, scale=problem.loss_scale)
        engine.backward(loss)
        engine.step()
        weights.losses.append(loss.item())
        del loss
    weights.peak = resident_bytes("VmHWM")
    gc.collect()
    weights.between = resident_bytes()
    engine.destroy()
    return weights


def _weigh(problem: Problem, train: Callable[[Problem], Weights]) -> Weights:
    silence()
    train(replace(problem, width=64, depth=2))
    dist.barrier()
    gc.collect()
    before = resident_bytes()
    weights = train(problem)
    weights.peak -= before
    weights.between -= before
    return weights
