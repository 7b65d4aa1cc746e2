"""Runs a function of which some argument is cut: by its rule, or as the axis analysis says.

A function that nothing needs whole runs on plain local tensors, and operands that every rank has
whole are cut where they meet the sequence. Where it needs an operand whole, that one is gathered.
So a model is right whatever it does; rules decide memory and bytes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from boltmesh.errors import UnsupportedError
from boltmesh.strategies.context import attention  # noqa: F401 - registers its rules
from boltmesh.strategies.context.ask import Answer, Call, ask
from boltmesh.strategies.context.cut import (
    CutTensor,
    by_positions,
    make_all_whole,
    make_cut,
    make_whole,
    moved_to,
    part_of,
    run_functions_by,
)
from boltmesh.strategies.context.positions import Positions
from boltmesh.strategies.context.rules import CUT_RULES
from boltmesh.strategies.tensor.runtime.collectives import Collective
from boltmesh.strategies.tensor.runtime.vocab_tensor import VocabularyTensor, gathered
from boltmesh.strategies.torch_compat.autograd import CHECKPOINT_INPUTS
from boltmesh.strategies.torch_compat.tensors import (
    subclasses_asked,
    subclasses_unasked,
    tree_flatten,
    tree_unflatten,
)

_OF_THE_WHOLE = frozenset({
    "__len__", "dim", "element_size", "get_device", "is_complex", "is_conj", "is_floating_point",
    "is_neg", "is_same_size", "is_signed", "ndimension", "nelement", "numel", "size", "stride",
    "is_contiguous", "__hash__", "storage_offset", "is_inference",
})  # fmt: skip
"""Methods that the shape and type of the whole answer."""

_ATTRIBUTES_OF_THE_WHOLE = frozenset({
    "device", "dtype", "is_cpu", "is_cuda", "is_meta", "is_mkldnn", "is_mps", "is_mtia",
    "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_xpu", "itemsize", "layout",
    "names", "nbytes", "ndim", "shape",
})  # fmt: skip
_ATTRIBUTES_OF_THE_PART = frozenset({
    "_backward_hooks", "_base", "_version", "grad_fn", "is_leaf", "output_nr", "requires_grad",
    "retains_grad",
})  # fmt: skip

_WRITES_FIRST = frozenset({
    "__iadd__", "__iand__", "__ifloordiv__", "__ilshift__", "__imod__", "__imul__", "__ior__",
    "__ipow__", "__irshift__", "__isub__", "__itruediv__", "__ixor__", "__setitem__",
})  # fmt: skip


def run_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function with cut arguments. Collective where it communicates."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return _attribute(func, args)
    if name in _OF_THE_WHOLE:
        with subclasses_unasked():
            return func(*args, **kwargs)
    if name in {"__repr__", "__format__", "__str__"}:
        cut = next(each for each in args if isinstance(each, CutTensor))
        return f"CutTensor(shape={tuple(cut.shape)}, cut_dim={cut.cut_dim})"
    if name == "register_hook":
        return _hooked(*args, **kwargs)
    if name in {"requires_grad_", "retain_grad"}:
        func(args[0].local, *args[1:], **kwargs)
        return args[0]
    if name == "backward":
        raise UnsupportedError(
            "backward() was called on a tensor whose sequence is divided over ranks. Reduce it to "
            "a loss, such as by .sum() or .mean(), and call backward() on that."
        )
    rule = CUT_RULES.get(name)
    if rule is not None:
        result = rule(func, args, kwargs)
        if result is not NotImplemented:
            return result
    return run_by_answer(func, args, kwargs)


run_functions_by(run_function)


def _attribute(func: Any, args: tuple[Any, ...]) -> Any:
    """Get or set an attribute of a tensor."""
    name, cut = func.__self__.__name__, args[0]
    if func.__name__ == "__set__":
        if name == "requires_grad":
            cut.local.requires_grad = args[1]
            return None
        raise UnsupportedError(
            f".{name} of a tensor whose sequence is divided over ranks was set. Make a new tensor "
            f"instead."
        )
    if name in _ATTRIBUTES_OF_THE_WHOLE:
        with subclasses_unasked():
            return func(cut)
    if name in _ATTRIBUTES_OF_THE_PART:
        return getattr(cut.local, name)
    if name == "grad":
        return None if cut.local.grad is None else cut.like(cut.local.grad)
    if name == "data":
        return cut.detach()
    if name == "T":
        return cut.permute(*reversed(range(cut.ndim)))
    if name == "mT":
        return cut.transpose(-2, -1)
    if name in {"real", "imag"}:
        return run_by_answer(getattr(torch, name), args, {})
    return getattr(make_whole(cut, f".{name}"), name)


def _hooked(cut: CutTensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Let a hook see gradients as the model's code sees values: cut."""

    def call(gradient: Tensor) -> Tensor | None:
        result = hook(cut.like(gradient))
        return result.local if isinstance(result, CutTensor) else result

    return cut.local.register_hook(call)  # type: ignore[no-untyped-call]


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    return (
        name in _WRITES_FIRST
        or (name.endswith("_") and not name.endswith("__"))
        or kwargs.get("out") is not None
    )


def run_by_answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function as the axis analysis says.

    Raises:
        UnsupportedError: When it writes into a cut tensor and looks along the sequence.
    """
    name = getattr(func, "__name__", str(func))
    writes = _writes(name, kwargs)
    first = args[0] if args else None
    if writes and (kwargs.get("out") is not None or not isinstance(first, CutTensor)):
        # A write into a slice of a whole tensor would be lost.
        if isinstance(kwargs.get("out"), CutTensor):
            raise UnsupportedError(f"{name}(out=...) writes into a tensor whose sequence is "
                                   f"divided over ranks. Use what {name} returns.")  # fmt: skip
        args, kwargs = make_all_whole((args, kwargs), f"{name} into a whole tensor")
        return func(*args, **kwargs)
    call = Call(func, args, kwargs)
    while True:
        leaves = call.leaves
        cuts = [place for place, each in enumerate(leaves) if isinstance(each, CutTensor)]
        if not cuts:
            return call.run(leaves)
        answer = ask(call)
        if not answer.gathers:
            return _run_local(call, cuts, answer)
        worst = max(answer.gathers)
        if _brought_together(leaves, cuts):
            continue
        if writes and leaves[worst] is first:
            raise UnsupportedError(
                f"{name} writes in place into a tensor whose sequence is divided over ranks, and "
                f"{answer.gathers[worst]}. Use a function that returns a new tensor, such as "
                f"torch.where or torch.cat."
            )
        leaves[worst] = make_whole(leaves[worst], f"{name}, which {answer.gathers[worst]},")


def _brought_together(leaves: list[Any], cuts: list[int]) -> bool:
    """Divide by positions what is divided by channels, beside another tensor of its shape."""
    others = [leaves[each] for each in cuts if not leaves[each].positions.are_channels]
    for place in cuts:
        value = leaves[place]
        if value.positions.are_channels and value.cut_dim == 1 and value.is_simple:
            for each in others:
                if each.shape == value.shape and each.cut_dim == 2 and each.is_simple:
                    leaves[place] = by_positions(value, each)
                    return True
    return False


def _run_local(call: Call, cuts: list[int], answer: Answer) -> Any:
    """Run a function on local tensors, and wrap what it gives."""
    leaves = call.leaves
    state = leaves[cuts[0]].state
    lead = {operand: leaves[leader].positions for operand, leader in answer.leaders.items()}
    local = list(leaves)
    with subclasses_unasked():
        for place, several in answer.inputs.items():
            value = leaves[place]
            if isinstance(value, CutTensor):
                local[place] = moved_to(value, lead.get(place, value.positions)).local
                continue
            for each in several:
                if local[place].shape[each.dim] != 1:
                    local[place] = part_of(
                        local[place], each.dim, lead[each.operands[0]], state,
                        each.num_outer, each.num_inner,
                    )  # fmt: skip
        with state.draws.own() if answer.draws else nullcontext():
            result = _run_on_parts(call, local)
        outputs = answer.cut_outputs
        if isinstance(result, Tensor):
            found = outputs.get(0)
            return result if found is None else _wrapped(result, found, lead, state)
        flat, spec = tree_flatten(result)
        for place, each in outputs.items():
            flat[place] = _wrapped(flat[place], each, lead, state)
        return tree_unflatten(flat, spec)


def _run_on_parts(call: Call, local: list[Any]) -> Any:
    """Run a function on plain tensors, or on this rank's tokens of a divided vocabulary."""
    if VocabularyTensor not in map(type, local):
        return call.run(local)
    with subclasses_asked():
        return gathered(call.run(local))


def _wrapped(result: Tensor, found: Any, lead: dict[int, Positions], state: Any) -> CutTensor:
    positions = lead[found.operands[0]]
    return make_cut(result, found.dim, positions, state, found.num_outer, found.num_inner)


_APPLY: Any = vars(torch.autograd.Function)["apply"]


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """``Function.apply`` as torch has it, which is a function of Python or of C."""
    return _APPLY.__get__(None, cls)(*args, **kwargs)


def _applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """``Function.apply``, which does not ask tensor subclasses."""
    if cls is CHECKPOINT_INPUTS or not any(isinstance(each, CutTensor) for each in args):
        return _apply(cls, *args, **kwargs)
    if cls.__name__ in {"CheckpointFunction", "CheckpointFunctionAttribute"}:
        raise UnsupportedError(
            "Reentrant activation checkpointing hides what a block does from the context axis. "
            "Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), "
            "gradient_checkpointing_enable({'use_reentrant': False}) of Hugging Face's models, or "
            "activation_checkpointing='full' of the strategy."
        )
    if cls is Collective:  # along another dim than the sequence, see ``SequenceParts`` for that
        first, *others = args
        return first.like(_apply(cls, first.local, *others))
    return run_by_answer(_function_of(cls), args, kwargs)


def _function_of(cls: Any) -> Any:
    known = _functions.get(cls)
    if known is None:

        def known(*args: Any, **kwargs: Any) -> Any:
            return _apply(cls, *args, **kwargs)

        known.__name__ = cls.__name__
        known.has_own_backward = True  # type: ignore[attr-defined]
        _functions[cls] = known
    return known


_functions: dict[Any, Any] = {}


@contextmanager
def functions_watched() -> Iterator[None]:
    """Context in which ``autograd.Function`` of the user's takes cut tensors."""
    before = torch.autograd.Function.__dict__.get("apply")
    torch.autograd.Function.apply = classmethod(_applied)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        if before is None:
            del torch.autograd.Function.apply
        else:
            torch.autograd.Function.apply = before  # type: ignore[method-assign]
