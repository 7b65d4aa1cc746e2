"""A tensor divided over a vocabulary, which looks whole to the code that uses it.

The weights of embeddings and heads are such tensors while a module runs, and logits are until a
loss is computed from them. ``RULES`` lists, by name, the functions that work on each rank's part;
for any other the tensor is gathered, with the right gradient, and the function runs replicated.

As with DTensor, autograd sees the whole tensor; `unwrap` and `wrap` convert to this rank's part and
back. So hooks, retained gradients, custom autograd functions and reentrant checkpointing work as
on any tensor. Incoming gradients may be parts or, from code that had the tensor gathered, whole.

Reading values of such a tensor may communicate with all ranks, so code that only one rank runs must
not use its values, not even to print them; ``repr`` does not communicate.

``Vocabulary`` assigns tokens to ranks, also if their number does not divide: the first
``size % ranks`` ranks have one token more than the others. Parameters are not padded, only messages
that need equal parts.

Shapes: V tokens of all ranks, ``v`` of this rank (``Vocabulary.length``); a whole tensor
``(..., V, ...)`` has a part ``(..., v, ...)``. Dtypes are kept.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from typing_extensions import Self, override

from boltmesh.errors import ConfigError
from boltmesh.strategies.tensor.plan import LossParallel, balanced_share
from boltmesh.strategies.tensor.runtime.collectives import TensorGroup, gather_parts, take_part
from boltmesh.strategies.torch_compat.tensors import (
    make_wrapper,
    subclasses_unasked,
    times_written,
    tree_map_only,
    written_or_viewed,
)


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of one table or head, and their division over the ranks of a group."""

    group: TensorGroup
    size: int
    """V, the number of tokens."""
    loss_parallel: LossParallel = "auto"
    gathered_for: dict[str, int] = field(default_factory=dict)
    """How often a function without a rule had a tensor gathered, by the function's name."""

    @property
    def start(self) -> int:
        """Index of this rank's first token."""
        return balanced_share(self.size, self.group.size, self.group.rank)[0]

    @property
    def length(self) -> int:
        """v, the number of this rank's tokens."""
        return self.length_of(self.group.rank)

    def length_of(self, rank: int) -> int:
        """Return the number of a rank's tokens."""
        return balanced_share(self.size, self.group.size, rank)[1]

    def is_divided_like(self, other: "Vocabulary") -> bool:
        """Whether each rank has the same tokens of both vocabularies."""
        return self.size == other.size and self.group is other.group

    def own(self, whole: Tensor, dim: int) -> Tensor:
        """Return a view of this rank's tokens of a replicated tensor, without communication."""
        return whole.narrow(dim, self.start, self.length)

    def gather(self, local: Tensor, dim: int) -> Tensor:
        """Join the tokens of all ranks along ``dim``, V of them. Collective.

        The gradient is this rank's part of a replicated gradient.
        """
        if self._is_even:
            return gather_parts(local, self.group, dim)
        missing = self.length_of(0) - self.length
        joined = gather_parts(_lengthened(local, missing, dim), self.group, dim)
        parts = joined.chunk(self.group.size, dim)
        return torch.cat(
            [part.narrow(dim, 0, self.length_of(rank)) for rank, part in enumerate(parts)], dim
        )

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's tokens of a replicated tensor.

        The backward pass gathers the gradient, which is replicated. Collective there.
        """
        if not whole.requires_grad:
            return self.own(whole, dim)
        if self._is_even:
            return take_part(whole, self.group, dim)
        lengths = [self.length_of(rank) for rank in range(self.group.size)]
        parts = [
            _lengthened(part, lengths[0] - part.shape[dim], dim)
            for part in torch.split(whole, lengths, dim)
        ]
        return take_part(torch.cat(parts, dim), self.group, dim).narrow(dim, 0, self.length)

    def find(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return where tokens are in this rank's part, and which belong to other ranks.

        Args:
            tokens: Indices in the vocabulary, any shape, int64.

        Returns:
            Indices in the part, 0 for tokens of other ranks; a mask of those. Both of that shape.

        Raises:
            IndexError: A token is not in the vocabulary. On an accelerator a device assertion
                fails instead, as for a table that is not divided.
        """
        # Tokens of other ranks read row 0, so one that no rank has would not be noticed otherwise.
        torch.zeros((), device=tokens.device).expand(self.size).index_select(0, tokens.reshape(-1))
        places = tokens - self.start
        is_others = (places < 0) | (places >= self.length)
        return places.masked_fill(is_others, 0), is_others

    @property
    def _is_even(self) -> bool:
        return self.size % self.group.size == 0

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return self


def _lengthened(tensor: Tensor, missing: int, dim: int) -> Tensor:
    """Append ``missing`` zeros along ``dim``."""
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


Rule = Callable[..., Any]
"""Called with the function and its arguments; returns the result, or `NO_RULE`."""

NO_RULE = object()
"""Returned by a rule that does not support the arguments."""

RULES: dict[str, Rule] = {}
"""Rules by function name. Complete when `vocab_modules` is imported."""

_ABOUT = frozenset(
    name
    for line in (
        "size dim numel nelement element_size get_device is_floating_point is_complex is_signed",
        "ndimension requires_grad_ register_hook retain_grad __hash__ backward grad is_same_size",
        "is_inference stride storage_offset has_names result_type is_tensor __len__ data_ptr",
        "untyped_storage",
    )
    for name in line.split()
)
"""Functions that read only metadata, or are part of autograd."""

_COPYING = {"T", "mT", "H", "mH", "data", "real", "imag"}
"""Properties that are tensors. All others are those of the whole tensor."""

_WRITING = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"}
"""Functions that modify their first argument, beside those whose name ends with ``_``."""


def rule_for(*lines: str) -> Callable[[Rule], Rule]:
    """Register a function as the rule for torch functions, named in space-separated lines."""

    def register(rule: Rule) -> Rule:
        for line in lines:
            RULES.update(dict.fromkeys(line.split(), rule))
        return rule

    return register


def name_of(func: Callable[..., Any]) -> tuple[str, bool]:
    """Return a function's name, and whether it is a property."""
    name = getattr(func, "__name__", "")
    if name in {"__get__", "__set__"}:
        return getattr(getattr(func, "__self__", None), "__name__", ""), True
    return name, False


class VocabularyTensor(Tensor):
    """Has the shape of the whole; stores ``local``, this rank's tokens along ``divided_dim``."""

    local: Tensor
    vocabulary: Vocabulary
    divided_dim: int
    times_written: int
    """Version of ``local`` that this tensor has accounted for."""

    def __new__(cls, local: Tensor, vocabulary: Vocabulary, divided_dim: int) -> "VocabularyTensor":
        """Build without autograd; see `wrap`."""
        shape = list(local.shape)
        shape[divided_dim] = vocabulary.size
        made = cast("VocabularyTensor", make_wrapper(cls, local, shape))
        made.local = local
        made.vocabulary = vocabulary
        made.divided_dim = divided_dim % len(shape)
        made.times_written = times_written(local)
        return made

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"VocabularyTensor(shape={tuple(self.shape)}, divided_dim={self.divided_dim}, "
            f"local={self.local!r})"
        )

    @override
    def __format__(self, spec: str) -> str:
        return repr(self)

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name, is_property = name_of(func)
        if is_property and name == "data" and len(args) > 1:
            raise NotImplementedError("'data' of a divided tensor cannot be set. Use copy_().")
        if name in _ABOUT or (is_property and name not in _COPYING):
            with subclasses_unasked():
                return func(*args, **kwargs)
        if name in _WRITING or (name.endswith("_") and not name.endswith("__")):
            return _write(func, name, args, kwargs)
        return apply_rule(func, name, args, kwargs)

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run operators of autograd and of C++ code, below ``__torch_function__``."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in {"detach", "alias", "clone"}:
            return _like(args[0], func(_local_of(args[0]), *args[1:], **kwargs))
        if name == "add" and not kwargs and args[0].shape == getattr(args[1], "shape", None):
            # Two gradients of one tensor, one of which may be whole.
            divided = next(each for each in args if isinstance(each, VocabularyTensor))
            return _like(divided, func(*(part_like(divided, each) for each in args)))
        for value, is_written in written_or_viewed(func, args, kwargs):
            if is_written and (found := _divided_in(value)):
                length = found[0].vocabulary.length
                raise NotImplementedError(
                    f"{name} writes to a tensor of which each rank has {length} tokens. "
                    "Write to a clone, or set strategy.loss_parallel=false."
                )
        note(args, kwargs, name)
        args, kwargs = tree_map_only(VocabularyTensor, _gather_value, (args, kwargs))
        return func(*args, **kwargs)


def wrap(local: Tensor, vocabulary: Vocabulary, divided_dim: int) -> VocabularyTensor:
    """Return the whole tensor of which ``local``, ``(..., v, ...)``, is this rank's part. Local."""
    return cast("VocabularyTensor", _Wrap.apply(local, vocabulary, divided_dim))  # type: ignore[no-untyped-call]


def unwrap(divided: VocabularyTensor) -> Tensor:
    """Return this rank's part, ``(..., v, ...)``; results from it are divided or partial."""
    return cast("Tensor", _Unwrap.apply(divided))  # type: ignore[no-untyped-call]


def gather(divided: VocabularyTensor) -> Tensor:
    """Return all tokens, ``(..., V, ...)``, for replicated computations. Collective."""
    return divided.vocabulary.gather(unwrap(divided), divided.divided_dim)


def gathered(values: Any) -> Any:
    """Replace divided tensors in nested lists, tuples and dicts by whole ones. Collective."""
    return tree_map_only(VocabularyTensor, gather, values)


def part_like(divided: VocabularyTensor, value: Tensor) -> Tensor:
    """Return this rank's part of ``value``, divided or whole, of the shape of ``divided``."""
    if isinstance(value, VocabularyTensor):
        return _local_of(value)
    return divided.vocabulary.own(value, divided.divided_dim)


def apply_rule(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a function on parts if there is a rule for it, else on gathered tensors."""
    rule = RULES.get(name)
    if "input" in kwargs:
        args, kwargs = (kwargs["input"], *args), {k: v for k, v in kwargs.items() if k != "input"}
    result = NO_RULE if rule is None or "out" in kwargs else rule(func, *args, **kwargs)
    if result is NO_RULE:
        if _divided_in(kwargs.get("out")):
            raise NotImplementedError(f"{name} cannot write its result to a divided tensor.")
        note(args, kwargs, name)
        args, kwargs = gathered((args, kwargs))
        return func(*args, **kwargs)
    return result


def note(args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> None:
    """Count a gather for a function at the vocabulary of its first divided argument.

    Raises:
        ConfigError: With ``loss_parallel=True``, if a loss may be computed from the tensor.
    """
    found: list[VocabularyTensor] = []
    tree_map_only(VocabularyTensor, found.append, (args, kwargs))
    needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in found)
    vocabulary = found[0].vocabulary
    if vocabulary.loss_parallel is True and needs_grad:
        raise ConfigError(
            f"loss_parallel=True, but '{name}' needs the logits of all {vocabulary.size} "
            "tokens. Set strategy.loss_parallel=auto to have them gathered there."
        )
    vocabulary.gathered_for[name] = vocabulary.gathered_for.get(name, 0) + 1


def _write(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Modify a copy, then overwrite the tensor with it."""
    target = args[0]
    if not isinstance(target, VocabularyTensor):
        note(args, kwargs, name)
        args, kwargs = gathered((args, kwargs))
        return func(*args, **kwargs)
    copy = wrap(unwrap(target).clone(), target.vocabulary, target.divided_dim)
    rule = RULES.get(name)
    changed = NO_RULE if rule is None else rule(func, copy, *args[1:], **kwargs)
    if changed is NO_RULE:
        note(args, kwargs, name)
        whole = gather(target)
        others, kwargs = gathered((args[1:], kwargs))
        func(whole, *others, **kwargs)
        changed = wrap(
            target.vocabulary.take(whole, target.divided_dim), target.vocabulary, target.divided_dim
        )
    _Overwrite.apply(target, changed)  # type: ignore[no-untyped-call]
    return None if name == "__setitem__" else target


class _Wrap(Function):
    @staticmethod
    @override
    def forward(ctx: Any, local: Tensor, vocabulary: Vocabulary, dim: int) -> VocabularyTensor:
        made = VocabularyTensor(local.detach(), vocabulary, dim)
        ctx.vocabulary, ctx.dim = vocabulary, made.divided_dim
        return made

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if isinstance(gradient, VocabularyTensor):
            return unwrap(gradient), None, None
        return ctx.vocabulary.take(gradient, ctx.dim), None, None


class _Unwrap(Function):
    @staticmethod
    @override
    def forward(ctx: Any, divided: VocabularyTensor) -> Tensor:
        ctx.vocabulary, ctx.dim = divided.vocabulary, divided.divided_dim
        return _local_of(divided).detach()

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> VocabularyTensor:
        return wrap(gradient, ctx.vocabulary, ctx.dim)


class _Overwrite(Function):
    """Replaces the values and the history of a tensor that is modified in place."""

    @staticmethod
    @override
    def forward(ctx: Any, target: VocabularyTensor, changed: VocabularyTensor) -> VocabularyTensor:
        ctx.mark_dirty(target)
        _local_of(target).copy_(_local_of(changed))
        target.times_written = times_written(target.local)
        return target

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def _local_of(divided: VocabularyTensor) -> Tensor:
    """Return this rank's part, without autograd.

    Raises:
        RuntimeError: A view of it was modified in place, which its history does not contain.
    """
    if times_written(divided.local) != divided.times_written:
        raise RuntimeError(
            "A view of logits that are divided over the tensor axis was written in place. Write "
            "to the logits themselves, or set strategy.loss_parallel=false."
        )
    return divided.local


def _like(divided: VocabularyTensor, local: Tensor) -> VocabularyTensor:
    return VocabularyTensor(local, divided.vocabulary, divided.divided_dim)


def _gather_value(divided: VocabularyTensor) -> Tensor:
    with torch.no_grad():
        return divided.vocabulary.gather(_local_of(divided), divided.divided_dim)


def _divided_in(value: Any) -> list[VocabularyTensor]:
    """Return the divided tensors among a value, or among the items of a list or tuple."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return [each for each in values if isinstance(each, VocabularyTensor)]
