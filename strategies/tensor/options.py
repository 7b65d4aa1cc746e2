"""Options of the tensor axis, checked before anything starts, and what it refuses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning.pytorch import LightningModule
from torch.distributed.tensor import DTensor

from boltmesh.errors import ConfigError, UnsupportedError
from boltmesh.strategies.dry_run.unsupported import Reasons, refuse_undividable
from boltmesh.strategies.parameter_access import is_part
from boltmesh.strategies.tensor.plan import LossParallel

UserPlan = Literal["auto"] | Mapping[str, str]


@dataclass(frozen=True)
class TensorOptions:
    """The arguments of ``TensorParallelStrategy``; see there.

    Raises:
        ConfigError: For an unknown value of an option.
    """

    size: int | None = None
    plan: UserPlan = "auto"
    sequence_parallel: bool = False
    loss_parallel: LossParallel = "auto"

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise ConfigError(f"size={self.size} holds no rank. Use 2 or more, or leave it out.")
        if self.plan != "auto" and not isinstance(self.plan, Mapping):
            raise ConfigError(
                f"plan={self.plan!r} is neither 'auto' nor a mapping of patterns of parameter "
                f"names to styles, such as {{'*.up.weight': 'column'}}."
            )
        if not isinstance(self.sequence_parallel, bool):
            raise ConfigError(
                f"sequence_parallel={self.sequence_parallel!r} is neither true nor false."
            )
        if self.loss_parallel not in {True, False, "auto"}:
            raise ConfigError(
                f"loss_parallel={self.loss_parallel!r} is none of its settings. Use 'auto', true "
                f"or false."
            )


LAYERS = Reasons(
    dataloader_iter="the ranks of a tensor group compare each batch before a step with it",
    batch_size_finder=(
        "which need not be on all ranks of a tensor group at once, and those that are left wait "
        "for the others. Choose batch_size by boltmesh plan, or try sizes."
    ),
    sync_batchnorm=(
        "takes the moments of batch norms over all ranks of the job, and the ranks of a tensor "
        "group have the same batch: they would count it several times. Leave it out, or use "
        "GroupNorm or LayerNorm."
    ),
    gradients="each rank's part of the gradients",
)
"""Reasons why ranks that share layers cannot do separately what one process does."""


def refuse_late_proof(module: LightningModule, *, is_divided: bool) -> None:
    """Refuse to verify another step on parameters that are sharded in addition.

    Args:
        module: About to be divided.
        is_divided: Whether it was divided before, by a plan that was verified with a step that
            does not train.

    Raises:
        ConfigError: With the order in which to run.
    """
    if is_divided and any(isinstance(each, DTensor) for each in module.parameters()):
        raise ConfigError(
            f"{type(module).__name__} was divided for an evaluation and has been sharded since, so "
            f"the parts of the plan that training needs cannot be proven any more. Call "
            f"Trainer.fit first, or build a new module and load a checkpoint; with zero_stage=0 "
            f"either order works."
        )


def refuse_parameters(module: LightningModule, *, is_divided: bool) -> None:
    """Refuse parameters that cannot be divided, or that another strategy has divided.

    Args:
        module: About to be divided.
        is_divided: Whether it was divided before, by this strategy.

    Raises:
        UnsupportedError: Naming the parameter.
    """
    for name, parameter in module.named_parameters():
        if is_part(parameter) and not is_divided:
            raise UnsupportedError(
                f"{name!r} of {type(module).__name__} was divided by another strategy object. Give "
                f"the Trainer the same object, or build a new module and load a checkpoint."
            )
    refuse_undividable(
        module,
        instead="Build a new module and load a checkpoint.",
        sparse="whose norm cannot be computed over ranks",
    )
