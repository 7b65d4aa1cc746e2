"""Divides a config's model without its memory.

The model is built from fake tensors, and one batch of the data runs through it on tensors without
data, as at the start of a run.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig

from boltmesh.errors import ConfigError
from boltmesh.planning.dry_model import NumberTypes, build_fake, first_batch
from boltmesh.planning.dry_step import STEP
from boltmesh.planning.stand_ins import put_stand_ins
from boltmesh.quiet import quiet_lightning
from boltmesh.strategies import lightning_compat as compat
from boltmesh.strategies.blocks import find_blocks
from boltmesh.strategies.tensor.analysis.analyse import analyse
from boltmesh.strategies.tensor.hugging_face import disagreements
from boltmesh.strategies.tensor.plan import TensorPlan
from boltmesh.strategies.tensor.planning import make_plan
from boltmesh.strategies.tensor.rehearsal import Rehearsal
from boltmesh.strategies.torch_compat import fake_tensors

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


@dataclass(frozen=True)
class TensorSummary:
    """A plan before it runs, and what a rank keeps by it."""

    model: str
    plan: TensorPlan
    whole_bytes: int
    """Of all parameters."""
    rank_bytes: int
    """Of those that the fullest rank keeps."""
    notes: tuple[str, ...]

    def as_data(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return {"schema": 1, "tensor": asdict(self)}


def describe_division(
    config: DictConfig, size: int, given: Mapping[str, Any], *, source: str
) -> TensorSummary:
    """Divide a config's model over ``size`` ranks as its strategy will.

    Raises:
        ConfigError: When the model cannot be built or divided, or its data give no batch.
    """
    quiet_lightning()
    batch, complaint = first_batch(config, source)
    if complaint is not None:
        raise ConfigError(f"{source}: what can be divided is found by a batch, and {complaint}.")
    types = NumberTypes.of(config.trainer.precision)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a module without a Trainer
        with fake_tensors():
            module, notes = build_fake(config, types, source)
        put_stand_ins(module)
        plan = find_division(module, batch, size, given, source=source)
    return summarise(module, plan, types.stored.itemsize, notes)


def find_division(
    module: "LightningModule", batch: Any, size: int, given: Mapping[str, Any], *, source: str
) -> TensorPlan:
    """Return how a model of stand-ins is divided, by a look at its own step.

    Args:
        module: The whole model.
        batch: Of its data.
        size: Ranks that share each layer.
        given: ``plan``, ``loss_parallel`` and ``sequence_parallel`` of the strategy's section.
        source: The config's file, for errors.

    Raises:
        ConfigError: When it cannot be divided as was asked.
    """
    wanted = given.get("plan")
    args = (batch, *compat.step_arguments(module, STEP))
    rehearsal = Rehearsal(module, STEP, args, torch.device("cpu"))
    try:
        analysis = analyse(module, rehearsal.forward, blocks=find_blocks(module))
        return make_plan(
            analysis,
            size,
            loss_parallel=given.get("loss_parallel", "auto"),
            sequence_parallel=bool(given.get("sequence_parallel", False)),
            wanted=None if wanted in (None, "auto") else wanted,
        )
    except ConfigError as error:
        raise ConfigError(f"{source}: strategy: {error}") from error


def summarise(
    module: "LightningModule", plan: TensorPlan, element_bytes: int, notes: Sequence[str]
) -> TensorSummary:
    """Return what ranks keep by a plan.

    Args:
        module: The whole model.
        plan: Of it.
        element_bytes: Of its parameters.
        notes: What was assumed or not found out.
    """
    whole = {name: each.numel() for name, each in module.named_parameters()}
    divided = {name: math.prod(each.local_shape(plan.size)) for name, each in plan.sharded.items()}
    return TensorSummary(
        model=type(module).__name__,
        plan=plan,
        whole_bytes=element_bytes * sum(whole.values()),
        rank_bytes=element_bytes * sum({**whole, **divided}.values()),
        notes=(*disagreements(plan, module), *notes),
    )
