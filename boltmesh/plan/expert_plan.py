"""Plans expert parallelism before a rank is started.

The model is built from fake tensors, and one batch of the data runs through stand-ins of almost no
memory: experts are found as at the start of a run. What a run does beside that is to prove them.
"""

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from boltmesh.configs.advice import located
from boltmesh.errors import ConfigError
from boltmesh.plan.dry_model import kept, stand_in_model
from boltmesh.plan.dry_step import STEP
from boltmesh.plan.text import align, size_text
from boltmesh.strategies.dry_run.step import DryRun
from boltmesh.strategies.expert.expected_traffic import ExchangeShape
from boltmesh.strategies.expert.find import Experts, find_experts
from boltmesh.strategies.lightning_compat.loops import step_arguments

_WIDTH = 96


@dataclass(frozen=True)
class ExpertModule:
    """The experts of one module."""

    name: str
    kind: str
    num_experts: int
    num_choices: int
    whole_bytes: int
    """Bytes of their parameters."""
    sent_bytes: float
    """Bytes that one rank gives to exchanges of one batch, forward and backward."""


@dataclass(frozen=True)
class ExpertSummary:
    """Experts that are divided over ranks, and the part of each rank."""

    model: str
    size: int
    """Ranks that have all experts together."""
    num_ranks: int
    stage: int
    """ZeRO stage of all parameters but those of experts."""
    experts: tuple[ExpertModule, ...]
    other_bytes: int
    """Bytes of all other parameters, whole."""
    whole: Mapping[str, str]
    """Why modules that choose stay whole, by name."""
    notes: tuple[str, ...]
    parts: int = 1
    """Ranks that divide each expert."""

    @property
    def expert_bytes(self) -> int:
        """Bytes of the parameters of all experts."""
        return sum(each.whole_bytes for each in self.experts)

    def as_data(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return {"schema": 1, "expert": asdict(self)}


@dataclass(frozen=True)
class WatchedExperts:
    """The experts of a config's model, as a batch of its data showed them."""

    model: str
    shapes: tuple[tuple[Experts, ExchangeShape], ...]
    sizes: Mapping[str, int]
    """Bytes of all parameters by name."""
    whole: Mapping[str, str]
    """Why modules that look like experts stay whole, by name."""
    notes: tuple[str, ...]


def watch_experts(config: DictConfig, source: str) -> WatchedExperts:
    """Find the experts of a config's model by running one batch of its data.

    Raises:
        ConfigError: When model or data cannot be built.
    """
    of_model, of_data = (OmegaConf.to_yaml(each) for each in (config.model, config.data))
    key = ("experts", of_model, of_data, config.trainer.precision)
    return kept(key, lambda: _watch(config, source))


def _watch(config: DictConfig, source: str) -> WatchedExperts:
    with stand_in_model(config, source, needs="experts are found") as made:
        module, batch = made.module, made.batch
        run = DryRun(module, STEP, (batch, *step_arguments(module, STEP)), torch.device("cpu"))
        with _DenseWeights():
            found = find_experts(module, lambda: run.run(has_backward=False))
    return WatchedExperts(
        type(module).__name__,
        tuple((each, ExchangeShape.of(each, found.calls[each.name])) for each in found.experts),
        {name: each.numel() * each.element_size() for name, each in module.named_parameters()},
        found.whole,
        tuple(made.notes),
    )


def plan_expert(
    config: DictConfig, ranks_per_node: int, given: Mapping[str, Any], *, source: str
) -> ExpertSummary:
    """Find the experts of each rank in a config's model, by the arguments of the strategy.

    Raises:
        ConfigError: When model or data cannot be built, or nothing can be divided.
    """
    parts = 1 if given.get("expert_tensor") in {None, 1} else int(given.get("tensor") or 1)
    num_ranks = ranks_per_node * config.trainer.num_nodes // parts
    asked = given.get("expert") or "node"
    size = min(ranks_per_node, num_ranks) if asked == "node" else int(asked)
    if num_ranks % size:
        raise ConfigError(
            f"{located(source, 'strategy.expert')}={size} does not divide the {num_ranks} ranks "
            f"of the plan. Plan for other ranks with --devices, or set strategy.expert."
        )
    found = watch_experts(config, source)
    sizes = dict(found.sizes)
    experts = []
    for each, shape in experts_over(config, size, source=source):
        sent = shape.expected(size, is_recomputed=False).payload
        whole = sum(sizes.pop(name) for name in (*each.parameters, *each.columns))
        experts.append(
            ExpertModule(each.name, each.kind, each.num_experts, shape.num_choices, whole, sent)
        )
    return ExpertSummary(
        found.model,
        size,
        num_ranks,
        int(given.get("stage") or 1),
        tuple(experts),
        sum(sizes.values()),
        found.whole,
        found.notes,
        parts,
    )


def experts_over(
    config: DictConfig, size: int, *, source: str
) -> tuple[tuple[Experts, ExchangeShape], ...]:
    """Return the experts of a config's model that ``size`` ranks divide, with rows of a batch.

    Raises:
        ConfigError: When model or data cannot be built, or nothing can be divided by so many.
    """
    found = watch_experts(config, source)
    for each, _ in found.shapes:
        if each.num_experts % size:
            raise ConfigError(
                f"{located(source, 'strategy.expert')}={size} does not divide the "
                f"{each.num_experts} experts of {each.name!r}."
            )
    if not found.shapes:
        reasons = "; ".join(f"{name!r}: {why}" for name, why in found.whole.items())
        raise ConfigError(
            f"{source}: no experts of {found.model} can be divided"
            f"{': ' + reasons if reasons else ', for training_step calls none'}."
        )
    return found.shapes


class _DenseWeights(TorchFunctionMode):
    """Gives kernels that need memory of their weights that of one at a time."""

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if "grouped_mm" in getattr(func, "__name__", ""):
            args = tuple(x.contiguous() if isinstance(x, Tensor) else x for x in args)
        return func(*args, **(kwargs or {}))


def write_expert(summary: ExpertSummary) -> str:
    """Return the experts that each rank keeps, and the bytes that exchanges move."""
    experts, size = summary.experts, summary.size
    share = size * summary.parts
    columns = [
        ("experts of", [each.name for each in experts]),
        ("experts", [str(each.num_experts) for each in experts]),
        ("of a row", [str(each.num_choices) for each in experts]),
        ("on a rank", [str(each.num_experts // size) for each in experts]),
        ("per rank", [size_text(each.whole_bytes // share) for each in experts]),
        ("exchanged", [size_text(round(each.sent_bytes)) for each in experts]),
    ]
    kept = f"{size_text(summary.expert_bytes // share)} of {size_text(summary.expert_bytes)}"
    copies = summary.num_ranks // size
    same = (
        f"; {copies} ranks have the same experts, and add up their gradients" if copies > 1 else ""
    )
    exchanged = sum(each.sent_bytes for each in experts)
    text = (
        f"Exchanged are bytes of one rank in the forward and backward pass of one batch, if all "
        f"experts are as likely: {size_text(round(exchanged))} in all. The other "
        f"{size_text(summary.other_bytes)} of parameters are those of ZeRO stage {summary.stage} "
        f"over {summary.num_ranks} ranks: boltmesh plan CONFIG --strategy zero{summary.stage} "
        f"counts them."
    )
    proof = (
        "A run proves each kind of experts on a batch before its first step. What differs when "
        "rows are exchanged stays whole, and the run says so."
    )
    whole = [f"whole: {name}: {why}" for name, why in summary.whole.items()]
    return "\n".join(
        [
            f"{summary.model} over {share} ranks: each keeps {kept} of experts{same}",
            "",
            *align(columns),
            "",
            *(line for each in (*whole, *summary.notes) for line in textwrap.wrap(each, _WIDTH)),
            *textwrap.wrap(f"{text} {proof}", _WIDTH),
        ]
    )
