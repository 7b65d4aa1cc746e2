"""Gives embeddings and heads the tokens of their rank, and lets their code see whole ones.

A module whose parameter is divided over the vocabulary finds a `VocabularyTensor` under its name
while it runs, so any code that looks tokens up or multiplies by the table works: subclasses of
``nn.Embedding`` that scale, tied heads, heads with a bias. What comes out of a lookup is alike on
all ranks; logits are divided until a loss is taken of them.

A vocabulary that does not divide is not padded: the first ranks have one token more. Tables whose
rows are counted or written while they are read stay whole; `left_whole` says why.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.nn import Module

from boltmesh.strategies.tensor.plan import LossParallel, ShardedParameter, TensorPlan, Unsharded
from boltmesh.strategies.tensor.runtime import vocab_collective, vocab_local
from boltmesh.strategies.tensor.runtime.collectives import TensorGroup
from boltmesh.strategies.tensor.runtime.param_swap import (
    Around,
    Changes,
    in_place_of,
    own_parameters,
)
from boltmesh.strategies.tensor.runtime.vocab_tensor import (
    Vocabulary,
    wrap,
)

_FUNCTIONS = (vocab_local, vocab_collective)
"""Loaded, they have put their rules into the table of ``vocab_tensor``."""


def left_whole(plan: TensorPlan, module: Module) -> TensorPlan:
    """Return the plan without the vocabularies that a module of theirs needs whole, and say why.

    Axes keep their places; all parameters of an axis stay whole with the one that has to.
    """
    reasons: dict[int, str] = {}
    for entry in _divided(plan):
        for name in entry.names:
            reason = _needs_whole(module.get_submodule(name.rpartition(".")[0]), plan.size, entry)
            if reason:
                reasons.setdefault(entry.axis, f"'{name}': {reason}")
    if not reasons:
        return plan
    dropped = [each for each in plan.sharded.values() if each.axis in reasons]
    return replace(
        plan,
        sharded={name: each for name, each in plan.sharded.items() if each.axis not in reasons},
        whole=plan.whole + tuple(Unsharded(each.name, reasons[each.axis]) for each in dropped),
    )


def divide_vocabularies(
    module: Module,
    plan: TensorPlan,
    group: TensorGroup,
    changes: Changes,
    *,
    loss_parallel: LossParallel = "auto",
    tell: Callable[[str], None] = lambda _: None,
) -> list[Vocabulary]:
    """Show the modules of divided vocabularies whole tables and heads.

    Args:
        module: The model; its parameters are shards already.
        plan: Whose parameters of style ``vocabulary`` are meant.
        group: Ranks that share them.
        changes: Collects what is done to the modules.
        loss_parallel: What to do where a function needs whole logits.
        tell: Hears once of each function that had logits gathered.

    Returns:
        One per axis of the plan. They count what was gathered.
    """
    found: dict[int, Vocabulary] = {}
    owners: dict[str, dict[str, tuple[Vocabulary, int]]] = {}
    for entry in _divided(plan):
        vocabulary = found.setdefault(
            entry.axis, Vocabulary(group, entry.length, loss_parallel, tell)
        )
        for name in entry.names:
            owner, _, own_name = name.rpartition(".")
            owners.setdefault(owner, {})[own_name] = vocabulary, entry.dim
    for owner, views in owners.items():
        around = module.get_submodule(owner)
        changes.wrap(around, ShownUnsharded(around, views))
    return list(found.values())


@dataclass(frozen=True)
class ShownUnsharded:
    """Around a module that has shards of a vocabulary and finds tensors that look whole."""

    module: Module
    views: Mapping[str, tuple[Vocabulary, int]]
    """By name of a parameter: its vocabulary, and the dimension of the tokens."""

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        own = own_parameters(self.module)
        views = {name: wrap(own[name], *self.views[name]) for name in self.views}
        with in_place_of(self.module, views):
            return forward(*args, **kwargs)


def _divided(plan: TensorPlan) -> list[ShardedParameter]:
    return [each for each in plan.sharded.values() if each.style == "vocabulary"]


def _needs_whole(module: Module, size: int, entry: ShardedParameter) -> str:
    """Why a table cannot be divided; empty if it can."""
    if entry.length < size:
        return f"{entry.length} tokens are fewer than {size} ranks"
    if getattr(module, "max_norm", None) is not None:
        return "max_norm rescales rows when they are read, on the rank that reads them"
    if getattr(module, "scale_grad_by_freq", False) is True:
        return "scale_grad_by_freq counts tokens, others' too"
    if getattr(module, "sparse", False) is True:
        return "sparse gradients list the tokens that were read, others' too"
    return ""
