"""Divides embeddings and heads over the vocabulary, while their code sees whole tensors.

A module whose parameter is divided over the vocabulary finds a `VocabularyTensor` under its name
while it runs, so any code that looks up tokens or multiplies by the table works: subclasses of
``nn.Embedding`` that scale, tied heads, heads with a bias. Lookups in a table sum what the ranks
found, so the result is replicated. Matrix products have tokens as outputs or inputs; logits stay
divided until a loss is computed.

A vocabulary that does not divide is not padded: the first ranks have one token more. Tables whose
rows are counted or written while they are read stay whole; `left_whole` gives the reason.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from boltmesh.strategies.patch import Around, Changes, patched
from boltmesh.strategies.tensor.plan import LossParallel, ShardedParameter, TensorPlan, Unsharded
from boltmesh.strategies.tensor.runtime import vocab_local, vocab_reductions
from boltmesh.strategies.tensor.runtime.collectives import TensorGroup, reduce_gradient, reduce_sum
from boltmesh.strategies.tensor.runtime.param_swap import own_parameters
from boltmesh.strategies.tensor.runtime.vocab_tensor import (
    NO_RULE,
    Vocabulary,
    VocabularyTensor,
    gather,
    rule_for,
    unwrap,
    wrap,
)

_FUNCTIONS = (vocab_local, vocab_reductions)
"""Importing them registers their rules in ``vocab_tensor``; the other rules are below."""


def left_whole(plan: TensorPlan, module: Module) -> TensorPlan:
    """Return the plan without vocabularies that a module needs whole, with the reasons.

    Axes keep their indices; all parameters of an axis stay whole if one of them must.
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
) -> list[Vocabulary]:
    """Give the modules of divided vocabularies tensors that look whole.

    Args:
        module: The model; its parameters are shards already.
        plan: The plan; its parameters of style ``vocabulary`` are used.
        group: Ranks that share them.
        changes: Records the wrappers.
        loss_parallel: What to do if a function needs whole logits.

    Returns:
        One vocabulary per axis of the plan. They count gathers.
    """
    found: dict[int, Vocabulary] = {}
    owners: dict[str, dict[str, tuple[Vocabulary, int]]] = {}
    for entry in _divided(plan):
        vocabulary = found.setdefault(entry.axis, Vocabulary(group, entry.length, loss_parallel))
        for name in entry.names:
            owner, _, own_name = name.rpartition(".")
            owners.setdefault(owner, {})[own_name] = vocabulary, entry.dim
    for owner, views in owners.items():
        around = module.get_submodule(owner)
        changes.wrap(around, ShownUnsharded(around, views))
    return list(found.values())


@dataclass(frozen=True)
class ShownUnsharded:
    """Wrapper of a module with shards of a vocabulary, which finds tensors that look whole."""

    module: Module
    views: Mapping[str, tuple[Vocabulary, int]]
    """Vocabulary and token dim of each parameter, by its name."""

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        own = own_parameters(self.module)
        views = {name: wrap(own[name], *self.views[name]) for name in self.views}
        with patched(self.module, **views):
            return forward(*args, **kwargs)


def _divided(plan: TensorPlan) -> list[ShardedParameter]:
    return [each for each in plan.sharded.values() if each.style == "vocabulary"]


def _needs_whole(module: Module, size: int, entry: ShardedParameter) -> str:
    """Return why a table cannot be divided; empty if it can."""
    if entry.length < size:
        return f"{entry.length} tokens are fewer than {size} ranks"
    if getattr(module, "max_norm", None) is not None:
        return "max_norm rescales rows when they are read, on the rank that reads them"
    if getattr(module, "scale_grad_by_freq", False) is True:
        return "scale_grad_by_freq counts tokens, others' too"
    if getattr(module, "sparse", False) is True:
        return "sparse gradients list the tokens that were read, others' too"
    return ""


@rule_for("embedding")
def embedding(
    func: Callable[..., Any],
    tokens: Tensor,
    table: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Look up this rank's tokens and sum over the ranks: ``(..., E)`` for tokens ``(...)``.

    ``padding_idx`` keeps its row without a gradient. Arguments that count or write rows need the
    whole table.
    """
    if (
        isinstance(tokens, VocabularyTensor)
        or table.divided_dim != 0
        or max_norm is not None
        or scale_grad_by_freq
        or sparse
    ):
        return NO_RULE
    vocabulary: Vocabulary = table.vocabulary
    places, is_others = vocabulary.find(tokens)
    own_padding = None
    if padding_idx is not None:
        own_padding = padding_idx % vocabulary.size - vocabulary.start
        own_padding = own_padding if 0 <= own_padding < vocabulary.length else None
    found = F.embedding(places, unwrap(table), own_padding)
    return reduce_sum(found.masked_fill(is_others.unsqueeze(-1), 0), vocabulary.group)


@rule_for("linear")
def linear(func: Callable[..., Any], inputs: Any, weight: Any, bias: Tensor | None = None) -> Any:
    """Compute the logits of this rank's tokens, ``(..., v)``, from replicated ``(..., E)``."""
    if not _makes_logits(inputs, weight, 0):
        return NO_RULE
    vocabulary: Vocabulary = weight.vocabulary
    if isinstance(bias, VocabularyTensor):
        bias = unwrap(bias)
    elif bias is not None:
        bias = vocabulary.take(bias, 0)
    return _logits(
        func(reduce_gradient(inputs, vocabulary.group), unwrap(weight), bias), vocabulary
    )


@rule_for("matmul mm __matmul__")
def product(func: Callable[..., Any], left: Any, right: Any) -> Any:
    """Compute logits by a transposed table, or the expectation of a table's rows."""
    if _makes_logits(left, right, 1):
        vocabulary: Vocabulary = right.vocabulary
        return _logits(func(reduce_gradient(left, vocabulary.group), unwrap(right)), vocabulary)
    if (
        isinstance(left, VocabularyTensor)
        and isinstance(right, VocabularyTensor)
        and left.vocabulary.is_divided_like(right.vocabulary)
        and left.divided_dim == left.dim() - 1
        and right.dim() == 2
        and right.divided_dim == 0
    ):
        return reduce_sum(func(unwrap(left), unwrap(right)), left.vocabulary.group)
    return NO_RULE


def _makes_logits(inputs: Any, weight: Any, token_dim: int) -> bool:
    return (
        isinstance(weight, VocabularyTensor)
        and not isinstance(inputs, VocabularyTensor)
        and weight.dim() == 2
        and weight.divided_dim == token_dim
    )


def _logits(local: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return logits, divided unless ``loss_parallel`` is False."""
    logits = wrap(local, vocabulary, local.dim() - 1)
    return gather(logits) if vocabulary.loss_parallel is False else logits
