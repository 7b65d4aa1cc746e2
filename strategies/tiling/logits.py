"""Logits in tiles: the loss over a large vocabulary without the logits of all positions in memory.

The output of the model's head is replaced by a tensor that has the shape of the logits and no data.
Views, slices and casts of it are taken of the head's input. ``cross_entropy`` computes the logits
of some positions at a time, and again in the backward pass; any other function gets the logits
whole. So a model is right whatever it does with them, and only memory differs. Logits that were
written in place or have a hook stay whole, and so do their views, as those of a plain tensor.

Source: ALST, Bekman et al. 2025, section 3.1, https://arxiv.org/abs/2506.13996
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Module, functional
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from boltmesh.errors import ConfigError, UnsupportedError
from boltmesh.strategies.blocks import find_blocks
from boltmesh.strategies.patch import Changes
from boltmesh.strategies.torch_compat.tensors import (
    make_wrapper,
    storage_key,
    subclasses_unasked,
    tree_leaves,
    tree_map,
)

_SHAPE_METHODS = frozenset({"size", "dim", "ndimension", "numel", "nelement", "__len__",
                            "is_floating_point", "is_complex", "element_size", "get_device",
                            "__hash__"})  # fmt: skip
_SHAPE_ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim", "is_cuda", "is_cpu", "layout",
                               "is_sparse", "is_nested", "is_quantized", "is_meta"})  # fmt: skip
_GRADIENT_METHODS = frozenset({"register_hook", "retain_grad"})
_WHOLE_ATTRIBUTES = frozenset({"data", "grad_fn"})
_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16,
          "bfloat16": torch.bfloat16}  # fmt: skip
_SWAPS = ({1, 2}, {-1, -2}, {1, -1}, {-2, 2})
"""Pairs of dims that ``transpose`` exchanges to make ``(B, V, S)`` of ``(B, S, V)``."""


class LogitTiling:
    """Makes the heads of a model return logits without data.

    Heads are ``nn.Linear`` modules outside of the repeated blocks with more outputs than inputs.

    Args:
        positions: How many positions have their logits in memory at once; None: no tiling.

    Raises:
        ConfigError: If it is less than one.
    """

    def __init__(self, positions: int | None) -> None:
        if positions is not None and positions < 1:
            raise ConfigError(
                f"tile_logits={positions} is the number of positions whose logits are computed "
                f"together. Set 1024 or more, or leave it out."
            )
        self.positions = positions
        self._changes = Changes()

    def put_on(self, root: Module, *, is_divided: bool = False) -> None:
        """Wrap the heads of a model. No effect on a model that is wrapped already.

        Args:
            root: The model.
            is_divided: Whether a pipeline or a tensor axis divides the model over ranks.

        Raises:
            ConfigError: If the model has no head, or is divided.
        """
        if self.positions is None or self._changes.modules():
            return
        if is_divided:
            self.refuse_division()
        inside = {part for block in find_blocks(root).values() for part in block.modules()}
        heads = [
            each
            for each in root.modules()
            if type(each) is nn.Linear
            and each not in inside
            and each.out_features > each.in_features
        ]
        if not heads:
            raise ConfigError(
                f"tile_logits={self.positions} computes the output of a model's head in tiles, "
                f"and {type(root).__name__} has none: a head is an nn.Linear outside of the "
                f"repeated blocks with more outputs than inputs. Leave tile_logits out."
            )
        for head in heads:
            self._changes.set(head, "forward", partial(_run, head, head.forward, self.positions))

    def refuse_division(self) -> None:
        """Refuse a model that a pipeline or a tensor axis divides over ranks.

        Raises:
            ConfigError: If ``positions`` is set.
        """
        if self.positions is not None:
            raise ConfigError(
                f"tile_logits={self.positions} needs the whole head of the model on each rank, and "
                f"a pipeline or a tensor axis divides the model. Leave it out: microbatches and "
                f"the division of the vocabulary make logits smaller there."
            )

    def take_off(self) -> None:
        """Restore the heads."""
        self._changes.undo()


def _run(
    head: nn.Linear, forward: Callable[[Tensor], Tensor], positions: int, inputs: Tensor
) -> Tensor:
    if isinstance(head.weight, DTensor):
        raise ConfigError(
            "tile_logits computes some positions of the model's head at a time, and "
            "tile_linear_bytes gathers some of its rows at a time. Leave one of the two out."
        )
    if not (head.training and torch.is_grad_enabled() and inputs.requires_grad):
        return forward(inputs)
    return make_tiled(inputs, Projection(head, positions, inputs))


class Projection:
    """One call of a head: computes its logits when they are needed, until the backward pass.

    Args:
        head: The module.
        positions: Number of positions in a tile.
        inputs: Inputs of the call, ``(..., in_features)``.
    """

    def __init__(self, head: nn.Linear, positions: int, inputs: Tensor) -> None:
        self.head = head
        self.positions = positions
        device = inputs.device.type
        self._autocast: Any = nullcontext
        self.dtype = inputs.dtype
        if torch.is_autocast_enabled(device):
            self.dtype = torch.get_autocast_dtype(device)
            self._autocast = partial(torch.autocast, device, self.dtype, cache_enabled=False)
        self._is_over = False
        inputs.register_hook(self._end)  # type: ignore[no-untyped-call]

    def _end(self, _: Tensor) -> None:
        self._is_over = True

    def logits(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the logits of inputs ``(..., in_features)``, with data: ``(..., V)``."""
        with self._autocast():
            return functional.linear(inputs, self.head.weight, self.head.bias).to(dtype)

    def check(self) -> None:
        """Raise UnsupportedError if the backward pass is over: weights may have changed since."""
        if self._is_over:
            raise UnsupportedError(
                "Logits of a training step were used after its backward pass, and with tile_logits "
                "they are not computed before they are used. Call .detach() on them in the step, "
                "or leave tile_logits out."
            )


class TiledLogits(Tensor):
    """Logits without data: positions as in ``inputs``, and classes as the last dim or as dim 1."""

    inputs: Tensor
    projection: Projection
    are_classes_second: bool
    """Whether the shape is ``(B, V, S)``, for inputs ``(B, S, E)``."""
    whole: Tensor | None
    """The logits with data, once a function has needed them."""
    base: "TiledLogits | None"
    """The logits of which these would be a view if they had data."""
    as_view: Callable[[Tensor], Tensor]
    """Makes the view from the data of ``base``."""
    like: Tensor
    """Meta tensor with the strides that logits with data would have."""
    stays_whole: bool
    """Whether a user holds data that may be written, or that have a hook."""
    was_recomputed: bool
    """Whether some gradients bypass ``whole``: those of a loss in tiles, or of a copy."""

    def line(self) -> "Iterator[TiledLogits]":
        """Yield this tensor, then those of which it is a view."""
        each: TiledLogits | None = self
        while each is not None:
            yield each
            each = each.base

    @property
    def is_whole(self) -> bool:
        """Whether ``whole`` has to be used, since recomputed logits would differ from it."""
        return any(
            each.stays_whole or (each.whole is not None and each.whole._version > 0)  # noqa: SLF001
            for each in self.line()
        )

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _function(func, args, kwargs or {})

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise UnsupportedError(
            f"{func} got logits that are computed in tiles from code that hides its arguments from "
            f"torch functions, as compiled modules do. Leave tile_logits out."
        )


def make_tiled(
    inputs: Tensor,
    projection: Projection,
    dtype: torch.dtype | None = None,
    *,
    are_classes_second: bool = False,
) -> TiledLogits:
    """Return logits of ``inputs`` without data.

    Args:
        inputs: ``(..., in_features)``.
        projection: Computes the logits later.
        dtype: Dtype of the logits; None: as the head would return them.
        are_classes_second: Return ``(B, V, S)`` for inputs ``(B, S, E)``, else ``(..., V)``.
    """
    shape = [*inputs.shape[:-1], projection.head.out_features]
    if are_classes_second:
        shape[1], shape[2] = shape[2], shape[1]
    dtype = dtype or projection.dtype
    made: TiledLogits = make_wrapper(
        TiledLogits, torch.empty(0, dtype=dtype, device=inputs.device), shape
    )
    made.inputs, made.projection = inputs, projection
    made.are_classes_second, made.whole = are_classes_second, None
    made.base, made.stays_whole, made.was_recomputed = None, False, False
    made.like = torch.empty(shape, dtype=dtype, device="meta")
    return made


def _function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", "")
    first = args[0] if args else None
    if name == "__hash__":
        with subclasses_unasked():
            return func(*args)
    if isinstance(first, TiledLogits):
        attribute = func.__self__.__name__ if name == "__get__" else ""
        if not first.is_whole:
            if name in _SHAPE_METHODS or attribute in _SHAPE_ATTRIBUTES:
                with subclasses_unasked():
                    return func(*args, **kwargs)
            if attribute == "requires_grad":
                return True
            kept = _without_data(name, first, args[1:], kwargs)
            if kept is not NotImplemented:
                return _linked(kept, first, partial(_call_on, func, args[1:], kwargs))
            if name in _GRADIENT_METHODS and first.was_recomputed:
                raise UnsupportedError(
                    f"{name} was called on logits behind a loss or a copy of them, and with "
                    f"tile_logits its gradient does not pass them. Call it directly behind the "
                    f"model's head, or leave tile_logits out."
                )
        if name in _GRADIENT_METHODS or name == "__set__" or attribute in _WHOLE_ATTRIBUTES:
            first.stays_whole = True
    computed: list[TiledLogits] = []
    values = func(*tree_map(partial(_with_data, computed), args),
                  **tree_map(partial(_with_data, computed), kwargs))  # fmt: skip
    if computed and not torch.is_grad_enabled():
        _forget(computed, values)
    return values


def _call_on(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], logits: Tensor) -> Any:
    return func(logits, *args, **kwargs)


def _linked(made: Any, logits: TiledLogits, as_view: Callable[[Tensor], Any]) -> Any:
    """Note what new logits are a view of, where logits with data would be one; return them."""
    if not isinstance(made, TiledLogits) or made is logits:
        return made
    made.like = as_view(logits.like)
    if made.like is logits.like:
        return logits
    if storage_key(made.like) == storage_key(logits.like):
        made.base, made.as_view = logits, as_view
    else:
        _note_recomputed(logits)
    return made


def _note_recomputed(logits: TiledLogits) -> None:
    for each in logits.line():
        each.was_recomputed = True


def _forget(found: list[TiledLogits], values: Any) -> None:
    """Free data that were made for one function without gradients, unless its values use them."""
    handed = [each for each in tree_leaves(values) if isinstance(each, Tensor)]
    for each in found:
        whole = each.whole
        if whole is None or each.is_whole or type(whole) is not Tensor:
            continue
        if not any(
            type(one) is not Tensor or storage_key(one) == storage_key(whole) for one in handed
        ):
            each.whole = None


def _without_data(
    name: str, logits: TiledLogits, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function that needs no data; NotImplemented if this one needs them."""
    if name == "cross_entropy":
        return _cross_entropy(logits, *args, **kwargs)
    if name in _CASTS and not args and not kwargs:
        return _like(logits, logits.inputs, _CASTS[name])
    if name in {"to", "type"} and len(args) == 1 and not kwargs:
        if isinstance(args[0], torch.dtype):
            return _like(logits, logits.inputs, args[0])
        return logits if args[0] == logits.device else NotImplemented
    if name == "contiguous":
        return _like(logits, logits.inputs)
    if logits.are_classes_second or kwargs:
        return NotImplemented
    if name in {"view", "reshape"}:
        sizes = list(args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
        if _keeps_classes(logits, sizes):
            width = logits.inputs.shape[-1]
            return _like(logits, logits.inputs.reshape(*sizes[:-1], width))
    if name == "flatten" and len(args) == 2 and args[1] % logits.ndim < logits.ndim - 1:
        return _like(logits, logits.inputs.flatten(*args))
    if name == "__getitem__":
        index = args[0] if isinstance(args[0], tuple) else (args[0],)
        if _leaves_classes(index, logits.ndim):
            return _like(logits, logits.inputs[args[0]])
    is_swap = (name in {"transpose", "swapaxes"} and set(args) in _SWAPS) or (
        name == "permute" and tuple(args[0] if len(args) == 1 else args) == (0, 2, 1)
    )
    if is_swap and logits.ndim == 3:
        return make_tiled(logits.inputs, logits.projection, logits.dtype, are_classes_second=True)
    return NotImplemented


def _like(logits: TiledLogits, inputs: Tensor, dtype: torch.dtype | None = None) -> TiledLogits:
    return make_tiled(
        inputs,
        logits.projection,
        dtype or logits.dtype,
        are_classes_second=logits.are_classes_second,
    )


def _keeps_classes(logits: TiledLogits, sizes: list[int]) -> bool:
    """Whether a view with these sizes leaves the last dim as it is."""
    num_classes = logits.shape[-1]
    if sizes[-1] == -1:
        rest = torch.Size(sizes[:-1]).numel()
        return rest == logits.numel() // num_classes
    return sizes[-1] == num_classes


def _leaves_classes(index: tuple[Any, ...], num_dims: int) -> bool:
    """Whether an index selects positions with all of their classes."""
    if any(isinstance(each, TiledLogits) for each in index):
        return False
    if not all(isinstance(each, (int, slice, type(Ellipsis))) for each in index):
        return False
    if Ellipsis in index:
        behind = index[index.index(Ellipsis) + 1 :]
        return not behind or behind[-1] == slice(None)
    return len(index) < num_dims or index[-1] == slice(None)


def _with_data(computed: list[TiledLogits], value: Any) -> Any:
    """Return logits with data, other values as they are; append to ``computed`` if data are new."""
    if not isinstance(value, TiledLogits):
        return value
    if value.whole is not None:
        return value.whole
    with torch.inference_mode(False), torch.enable_grad():
        if value.base is not None:
            value.whole = value.as_view(_with_data(computed, value.base))
        else:
            value.projection.check()
            whole = value.projection.logits(value.inputs, value.like.dtype)
            whole = whole.transpose(1, 2) if value.are_classes_second else whole
            value.whole = whole.contiguous() if value.like.is_contiguous() else whole
    computed.append(value)
    return value.whole


def _cross_entropy(
    logits: TiledLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``torch.nn.functional.cross_entropy``, in tiles where its arguments allow that."""
    is_plain = (
        weight is None
        and size_average is reduce is None
        and not target.is_floating_point()
        and logits.ndim > 1
        and (logits.ndim == 2 or (logits.are_classes_second and logits.ndim == 3))
    )
    if not is_plain:
        return functional.cross_entropy(
            _with_data([], logits), target, weight, size_average, ignore_index, reduce, reduction,
            label_smoothing,
        )  # fmt: skip
    logits.projection.check()
    _note_recomputed(logits)
    compute = _TiledLoss(logits, ignore_index, label_smoothing)
    inputs, shape = logits.inputs, target.shape
    if logits.ndim == 3:
        inputs, target = inputs.flatten(0, 1), target.flatten()
    loss = compute(inputs, target, ignore_index=ignore_index, reduction=reduction)
    return loss.view(shape) if reduction == "none" and logits.ndim == 3 else loss


class _TiledLoss:
    """Cross entropy computed from the head's inputs, tile by tile.

    Its ``__name__`` is ``cross_entropy``, so that a tensor subclass that has some of the
    positions treats it as it treats the loss of logits.
    """

    __name__ = "cross_entropy"

    def __init__(self, logits: TiledLogits, ignore_index: int, label_smoothing: float) -> None:
        self._projection = logits.projection
        self._dtype = logits.dtype
        self._ignore_index = ignore_index
        self._label_smoothing = label_smoothing

    def __call__(
        self, inputs: Tensor, target: Tensor, *, ignore_index: int, reduction: str = "mean"
    ) -> Tensor:
        """Return the loss.

        Args:
            inputs: ``(positions, in_features)``.
            target: Indices of classes, int64 ``(positions,)``.
            ignore_index: Target of positions that do not count.
            reduction: As in torch.
        """
        if type(inputs) is not Tensor and has_torch_function_unary(inputs):
            return handle_torch_function(
                self, (inputs, target), inputs, target,
                ignore_index=ignore_index, reduction=reduction,
            )  # fmt: skip
        size = self._projection.positions
        losses = torch.cat(
            [
                checkpoint(self._losses, *part, use_reentrant=False)
                for part in zip(torch.split(inputs, size), torch.split(target, size), strict=True)
            ]
        )
        if reduction == "none":
            return losses
        total = losses.sum()
        return total if reduction == "sum" else total / (target != ignore_index).sum()

    def _losses(self, inputs: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(
            self._projection.logits(inputs, self._dtype),
            target,
            ignore_index=self._ignore_index,
            reduction="none",
            label_smoothing=self._label_smoothing,
        )
