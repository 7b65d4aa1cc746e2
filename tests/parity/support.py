"""Things that LightningModules do, under every strategy, against one process.

    python -m tests.parity.support [--strategies ddp zero3 ...] [--cases lora ...]

Each case is a small module that does one thing. It trains for a few optimizer steps on two ranks
(3d: on four) and is validated. Prints a line for each case and strategy: ``same`` if the losses are
those of one process, ``differs`` with both, or the error. docs/support.md is written from this
table. Some minutes for each strategy.
"""

from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateFinder,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging

from boltmesh.strategies import (
    DDPStrategy,
    Parallel3DStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)
from tests.parity import support_hooks as hooks
from tests.parity import support_layers as layers
from tests.parity.support_batches import ROWS, loader_of
from tests.support.ranks import RankFailure, run_ranks

STEPS = 4

STRATEGIES: dict[str, tuple[Callable[[], Any], int, int]] = {
    # How it is made, ranks, and how many of those have batches of their own.
    "ddp": (lambda: DDPStrategy(telemetry=False), 2, 2),
    "zero1": (lambda: ZeROStrategy(stage=1, telemetry=False), 2, 2),
    "zero2": (lambda: ZeROStrategy(stage=2, telemetry=False), 2, 2),
    "zero3": (lambda: ZeROStrategy(stage=3, telemetry=False), 2, 2),
    "zero3_cpu": (
        lambda: ZeROStrategy(
            stage=3, offload_optimizer="cpu", offload_parameters="cpu", telemetry=False
        ),
        2,
        2,
    ),
    "pipeline": (lambda: PipelineParallelStrategy(microbatches=4, telemetry=False), 2, 1),
    "tensor": (lambda: TensorParallelStrategy(telemetry=False), 2, 1),
    "3d": (
        lambda: Parallel3DStrategy(pipeline=2, tensor=2, microbatches=4, telemetry=False),
        4,
        1,
    ),
}


Case = tuple[Callable[[], LightningModule], dict[str, Any]]

CASES: dict[str, Case] = {
    "plain": (layers.Model, {}),
    "parameter groups, scheduler": (layers.ParameterGroups, {}),
    "several optimizers, manual": (layers.ManualTwoOptimizers, {}),
    "manual optimisation": (layers.ManualOne, {}),
    "frozen layers": (layers.Frozen, {}),
    "frozen start": (layers.FrozenStart, {}),
    "frozen part under no_grad": (layers.FrozenUnderNoGrad, {}),
    "unfreezes a block later": (layers.Unfreezes, {}),
    "lora": (layers.LoRA, {}),
    "compiled blocks": (layers.CompiledBlocks, {}),
    "torch.utils.checkpoint": (layers.Checkpointed, {}),
    "tied weights": (layers.Tied, {}),
    "F.linear with embedding.weight": (layers.TiedByFunction, {}),
    "reads weights in the step": (layers.WeightPenalty, {}),
    "torchmetrics, log at epoch end": (layers.Metrics, {}),
    "lists for epoch end": (layers.EpochEndLists, {}),
    "training_step returns None": (layers.SkipsSteps, {}),
    "configure_model": (layers.ConfigureModel, {}),
    "batch-global loss": (layers.Contrastive, {}),
    "module under two names": (hooks.TwoNames, {}),
    "max_norm": (hooks.MaxNorm, {}),
    "lazy module": (hooks.Lazy, {}),
    "two optimizers, unused": (layers.UsesFindUnused, {}),
    "batch with a list and None": (hooks.OtherBatch, {"data": "lists"}),
    "batch as a dataclass": (hooks.OtherBatch, {"data": "dataclass"}),
    "batch of a custom class": (hooks.OtherBatch, {"data": "custom"}),
    "in-place buffer": (layers.Counts, {}),
    "batch norm": (layers.Normalized, {}),
    "sync_batchnorm": (layers.Normalized, {"sync_batchnorm": True}),
    "moving average by hand": (hooks.Teacher, {}),
    "moving average, gathered": (hooks.GatheredTeacher, {}),
    "generation in validation": (hooks.Generates, {}),
    "forward hook": (hooks.ForwardHook, {}),
    "backward hook of a module": (hooks.BackwardHook, {}),
    "hook keeps activations": (hooks.KeepsActivations, {}),
    "hook on a parameter": (hooks.ParameterHook, {}),
    "post-accumulate hook": (hooks.AccumulateHook, {}),
    "grad_norm in a hook": (hooks.LogsGradNorm, {}),
    "scales gradients in a hook": (hooks.ReadsGradients, {}),
    "clamps weights": (hooks.ClampsWeights, {}),
    "clamps weights, gathered": (hooks.GatheredClamp, {}),
    "optimizer_step override": (hooks.WarmsUp, {}),
    "ReduceLROnPlateau": (hooks.Plateau, {}),
    "autograd.grad in the step": (hooks.GradientPenalty, {}),
    "0-dim parameter": (hooks.Scalar, {}),
    "sparse embedding": (hooks.SparseEmbedding, {}),
    "LSTM": (hooks.Recurrent, {}),
    "branches on values": (hooks.BranchesOnValues, {}),
    "leaves a block out": (hooks.AlternatesLayers, {}),
    "unused parameter": (hooks.UnusedParameter, {}),
    "all_gather": (hooks.GathersInLoss, {}),
    "dataloader_iter": (hooks.DrawsBatches, {}),
    "dict batch": (layers.DictBatch, {"data": "dict"}),
    "two loaders": (hooks.TwoLoaders, {"data": "two"}),
    "IterableDataset": (layers.Model, {"data": "stream"}),
    "custom sampler": (layers.Model, {"data": "sampler"}),
    "gradient clipping": (layers.Model, {"gradient_clip_val": 0.1}),
    "accumulation": (layers.Model, {"accumulate_grad_batches": 2}),
    "bf16-mixed": (layers.Model, {"precision": "bf16-mixed"}),
    "bf16-true": (layers.Model, {"precision": "bf16-true"}),
    "64-true": (layers.Model, {"precision": "64-true"}),
    "EMAWeightAveraging": (layers.Model, {"callbacks": lambda: [EMAWeightAveraging()]}),
    "StochasticWeightAveraging": (
        layers.Model,
        {"callbacks": lambda: [StochasticWeightAveraging(0.1, swa_epoch_start=1)]},
    ),
    "ModelPruning": (
        layers.Model,
        {"callbacks": lambda: [ModelPruning("l1_unstructured", amount=0.5)]},
    ),
    "EarlyStopping": (layers.Model, {"callbacks": lambda: [EarlyStopping("val_loss")]}),
    "OnExceptionCheckpoint": (layers.Model, {"callbacks": lambda: [OnExceptionCheckpoint("x")]}),
    "LearningRateFinder": (
        hooks.FindsRate,
        {"callbacks": lambda: [LearningRateFinder(num_training_steps=8, attr_name="lr")]},
    ),
    "SGD": (layers.optimizer_case(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)), {}),
    "Adagrad": (layers.optimizer_case(lambda p: torch.optim.Adagrad(p, lr=0.01)), {}),
    "RMSprop": (layers.optimizer_case(lambda p: torch.optim.RMSprop(p, lr=0.01)), {}),
    "LBFGS": (layers.optimizer_case(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2)), {}),
    "Adafactor": (layers.optimizer_case(lambda p: torch.optim.Adafactor(p, lr=0.01)), {}),
    "LARS": (layers.optimizer_case(layers.LARS), {}),
}
if hasattr(torch.optim, "Muon"):
    CASES["Muon"] = (
        layers.optimizer_case(
            lambda p: torch.optim.Muon([each for each in p if each.dim() == 2], lr=0.01)
        ),
        {},
    )


def run_case(name: str, strategy: str | None, rank: int, world_size: int) -> Any:
    make, options = CASES[name]
    options = dict(options)
    make_strategy, _, shares = STRATEGIES[strategy] if strategy else (lambda: "auto", 1, 1)
    kind = options.pop("data", "tuple")
    callbacks = options.pop("callbacks", list)()
    seed_everything(1, verbose=False)
    module = make()
    made = make_strategy()
    if strategy == "ddp" and isinstance(module, layers.UsesFindUnused):
        made = DDPStrategy(find_unused_parameters=True, telemetry=False)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=made, max_epochs=2, logger=False,
        enable_checkpointing=any("Checkpoint" in type(each).__name__ for each in callbacks),
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        limit_train_batches=STEPS, callbacks=callbacks, use_distributed_sampler=kind == "sampler",
        **options,
    )  # fmt: skip
    share = rank if shares > 1 else 0
    trainer.fit(module, loader_of(kind, share=share, shares=shares, rows=ROWS),
                loader_of("tuple", share=share, shares=shares, rows=16))  # fmt: skip
    (found,) = trainer.validate(
        module, loader_of("tuple", share=share, shares=shares, rows=16), verbose=False
    )
    logged: dict[str, Any] = {
        f"train {key}": value for key, value in trainer.logged_metrics.items()
    }
    return {key: float(value) for key, value in {**found, **logged}.items()}


def _outcome(name: str, strategy: str | None, rank: int, world_size: int) -> Any:
    try:
        return run_case(name, strategy, rank, world_size)
    except Exception as error:  # noqa: BLE001 - the table shows it
        return f"{type(error).__name__}: {error}"


def work(rank: int, world_size: int, strategy: str | None, names: list[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in names:
        found[name] = _outcome(name, strategy, rank, world_size)
    return found


def tell(name: str, strategy: str, whole: Any, found: Any) -> None:
    if isinstance(found, str):
        verdict = found if isinstance(whole, dict) else f"{found} | one process: {whole}"
    elif isinstance(whole, str):
        verdict = f"runs; one process: {whole}"
    else:
        differing = {
            key: (value, found.get(key))
            for key, value in whole.items()
            if key not in found or abs(found[key] - value) > 2e-4 * max(1.0, abs(value))
        }
        verdict = f"differs: {differing}" if differing else "same"
    print(f"{strategy:10} {name:32} {' '.join(verdict.split())[:600]}", flush=True)


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES))
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    options = parser.parse_args()
    (whole,) = run_ranks(work, 1, None, options.cases, timeout_s=1500)
    for name in options.cases:
        if isinstance(whole[name], str):
            tell(name, "one", {}, whole[name])
    for strategy in options.strategies:
        ranks = STRATEGIES[strategy][1]
        for name in options.cases:
            try:
                found = run_ranks(work, ranks, strategy, [name])[0]
            except RankFailure as failure:
                found = {name: f"died: {str(failure)[-500:]}"}
            tell(name, strategy, whole[name], found[name])


if __name__ == "__main__":
    main()
