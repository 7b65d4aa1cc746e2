"""What a pipeline cannot do, refused before it takes any memory."""

from collections.abc import Iterable

from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from boltmesh.errors import ConfigError
from boltmesh.strategies.mesh import MeshLayout
from boltmesh.strategies.pipeline.joint_steps import joins_gradients
from boltmesh.strategies.pipeline.kinds import schedule_kind
from boltmesh.strategies.pipeline.options import PipelineOptions
from boltmesh.strategies.pipeline.replay.absent import is_absent
from boltmesh.strategies.steps.refusals import Reasons

STAGES = Reasons(
    dataloader_iter="a pipeline runs it on microbatches of a batch that is there before",
    batch_size_finder=(
        "and in a pipeline that is on one rank alone, for which the others wait. Choose batch_size "
        "and microbatches by boltmesh plan, or try them."
    ),
    sync_batchnorm=(
        "makes a batch norm wait for all ranks, and in a pipeline one rank runs it: on one "
        "microbatch after the other, each by its own moments. Leave it out, or use GroupNorm or "
        "LayerNorm, which do not depend on how a batch is cut."
    ),
    gradients="the gradients of one stage, others on each rank",
)
"""Why ranks that hold stages cannot do apart what one process does."""


def refuse_manual_optimization(module: LightningModule) -> None:
    """Refuse to train where the step itself asks for backward passes.

    Raises:
        ConfigError: With what to do instead.
    """
    if not module.automatic_optimization:
        raise ConfigError(
            f"{type(module).__name__} optimises by hand (automatic_optimization=False), and in a "
            f"pipeline forward and backward passes of several microbatches are under way at once, "
            f"so manual_backward has no place in training_step. Return the loss from "
            f"training_step, or use bolt_ddp or bolt_zero3."
        )


def refuse_layout(options: PipelineOptions, layout: MeshLayout) -> None:
    """Refuse what the schedule has no order for, or cannot do beside other pipelines.

    Raises:
        ConfigError: With what to do instead.
    """
    options.num_stages(layout.pipeline)
    if schedule_kind(options.schedule).is_asynchronous and layout.data > 1:
        raise ConfigError(
            f"schedule={options.schedule!r} applies gradients a step late, and checkpoints keep "
            f"those of one pipeline; {layout} would have {layout.data} pipelines. Use "
            f"schedule='1f1b', or as many stages as there are ranks."
        )


def refuse_late_gradients(trainer: Trainer, scaler: object) -> None:
    """Refuse what cannot be with gradients that are applied a step late.

    Raises:
        ConfigError: Naming it, and what to do instead.
    """
    refuse_accumulation(trainer)
    if scaler is not None:
        raise ConfigError(
            "schedule='pipedream_2bw' applies gradients a step late, when fp16's loss scale may "
            "have become another one. Use precision='bf16-mixed', or schedule='1f1b'."
        )


def refuse_accumulation(trainer: Trainer) -> None:
    """Refuse to accumulate gradients that are applied a step late; a callback may begin any time.

    Raises:
        ConfigError: With what to do instead.
    """
    count = trainer.accumulate_grad_batches
    if count != 1:
        raise ConfigError(
            f"accumulate_grad_batches={count} with schedule='pipedream_2bw', which steps after "
            f"each batch. Take batches {count} times as large, cut into {count} times as many "
            f"microbatches, or use schedule='1f1b'."
        )


def refuse_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers that look at all gradients to step one parameter.

    Raises:
        ConfigError: Naming the optimizer.
    """
    for optimizer in optimizers:
        if joins_gradients(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} steps each parameter by what it finds in all "
                f"gradients, and a rank of a pipeline has those of its own stages alone. Use "
                f"bolt_ddp, or an optimizer that steps each parameter by itself, such as AdamW."
            )


def refuse_measuring(options: PipelineOptions) -> None:
    """Refuse to time layers on one rank that can only run together with others.

    Raises:
        ConfigError: With what to do instead.
    """
    if options.split == "measured":
        raise ConfigError(
            "split='measured' lets one rank time each layer by itself, and with tensor ranks "
            "layers run on several ranks together. Use split='auto', which counts operations."
        )


def refuse_remains(module: LightningModule) -> None:
    """Refuse to divide layers of a model that stages have been made of.

    Raises:
        ConfigError: With what to do in which order.
    """
    gone = [name for name, each in module.named_parameters() if is_absent(each)]
    if gone:
        raise ConfigError(
            f"{type(module).__name__} was divided into stages for another run, and this rank no "
            f"longer has {gone[0]!r} and {len(gone) - 1} other parameters, which the proof of a "
            f"tensor plan needs. Call Trainer.fit before validate, test and predict, with the same "
            f"strategy object, or build the module anew and load a checkpoint."
        )
