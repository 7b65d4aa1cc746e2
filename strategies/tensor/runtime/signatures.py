"""Runs a block divided only for arguments of the kinds that the plan was verified with.

A plan is verified on one batch, and a later batch may take another path through a block: without
padding Hugging Face passes no mask, with padding a mask, and attention then calls other operators.
So each call of a block has a signature: which arguments are tensors, None, True, ..., with which
kind of dtype, how many dims, and which of these have one element. The first call with a new
signature is verified: the block runs whole, with parameters gathered, and divided, and outputs and
gradients must agree. If they do not, the block runs whole for such arguments from then on. The
first call in evaluation mode is verified, too.

All of this happens among the ranks of the tensor group, within the block's forward, so that data
replicas and pipeline stages may meet a signature at different times.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from boltmesh.errors import UnsupportedError
from boltmesh.strategies.dry_run.comparison import ROUGH, TOLERANCE, difference
from boltmesh.strategies.dry_run.no_side_effects import modules_unchanged
from boltmesh.strategies.dry_run.step import (
    DryRunOutcome,
    full_float32,
    without_dropout,
)
from boltmesh.strategies.patch import Around, Original, originals_restored, patched
from boltmesh.strategies.random_state import random_state_unchanged
from boltmesh.strategies.tensor.plan import ExitPoint, PassedTensor, ShardedParameter
from boltmesh.strategies.tensor.runtime.collectives import (
    TensorGroup,
    all_reduce,
    gather_parts,
    take_part,
)
from boltmesh.strategies.tensor.runtime.param_swap import gather_whole, own_parameters
from boltmesh.strategies.tensor.runtime.sequence import (
    RunningStack,
    opened,
    with_argument,
    with_output,
)
from boltmesh.strategies.torch_compat.autograd import unrecorded
from boltmesh.strategies.torch_compat.tensors import is_fake, tree_leaves

Signature = tuple[tuple[str, Any], ...]
"""Path and kind of each argument of a call."""


def signature_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
    """Return the signature of a call, without sizes, values of numbers or precision."""
    found: list[tuple[str, Any]] = []
    for place, value in enumerate(args):
        _add(found, f"argument {place + 1}", value)
    for name, value in kwargs.items():
        _add(found, name, value)
    return tuple(found)


def _add(found: list[tuple[str, Any]], path: str, value: Any) -> None:
    if isinstance(value, Tensor):
        kind = "floats" if value.is_floating_point() else str(value.dtype)
        found.append((path, (kind, tuple(size == 1 for size in value.shape))))
    elif value is None or isinstance(value, bool):
        found.append((path, value))
    elif isinstance(value, str):  # also a member of an Enum, whose class others may not have
        found.append((path, str.__str__(value)))
    elif isinstance(value, Mapping):
        for key, each in value.items():
            _add(found, f"{path}[{key!r}]", each)
    elif isinstance(value, (list, tuple)):
        for place, each in enumerate(value):
            _add(found, f"{path}[{place}]", each)
    else:
        found.append((path, f"a {type(value).__module__}.{type(value).__qualname__}"))


def without_sizes(signature: Signature) -> Signature:
    """Return a signature without the sizes of one element."""
    return tuple(
        (path, (kind[0], len(kind[1])) if isinstance(kind, tuple) else kind)
        for path, kind in signature
    )


@dataclass
class Verified:
    """The signatures of one kind of block that were verified.

    Args:
        has_sizes: Whether it matters which dims have one element.
    """

    has_sizes: bool = True
    with_gradient: dict[Signature, bool] = field(default_factory=dict)
    """Whether the block may run divided, by signature of a call with a backward pass."""
    forward_only: dict[Signature, bool] = field(default_factory=dict)

    def of_call(self, signature: Signature, *, has_gradient: bool) -> bool | None:
        """Return whether a block may run divided; None if unknown."""
        if not self.has_sizes:
            signature = without_sizes(signature)
        known = self.with_gradient.get(signature)
        return known if has_gradient else self.forward_only.get(signature, known)

    def is_of_training(self, signature: Signature) -> bool:
        """Whether a signature was verified with a backward pass and not without one."""
        if not self.has_sizes:
            signature = without_sizes(signature)
        return signature in self.with_gradient and signature not in self.forward_only

    def has_like(self, signature: Signature) -> bool:
        """Whether a signature that differs in sizes of one element alone may run divided."""
        known = self.with_gradient | self.forward_only
        wanted = without_sizes(signature)
        return any(
            is_right and (without_sizes(each) if self.has_sizes else each) == wanted
            for each, is_right in known.items()
        )

    def leave_out_sizes(self) -> None:
        """Ignore from now on which dims have one element."""
        self.has_sizes = False
        for known in (self.with_gradient, self.forward_only):
            found = {without_sizes(signature): is_right for signature, is_right in known.items()}
            known.clear()
            known.update(found)

    def add(self, signature: Signature, *, has_gradient: bool, is_right: bool) -> None:
        """Store the result for a signature."""
        if not self.has_sizes:
            signature = without_sizes(signature)
        (self.with_gradient if has_gradient else self.forward_only)[signature] = is_right


class SignatureRecorder:
    """Records the signatures with which blocks are called."""

    def __init__(self) -> None:
        self.seen: dict[str, set[tuple[Signature, bool]]] = {}
        """Signatures, and whether gradients were enabled, by name of the block."""

    @contextmanager
    def watching(self, blocks: Mapping[str, Module]) -> Iterator[None]:
        """Context in which calls of blocks are recorded."""
        with ExitStack() as stack:
            for name, each in blocks.items():
                hook = each.register_forward_pre_hook(self._hook(name), with_kwargs=True)
                stack.enter_context(hook)
            yield

    def _hook(self, name: str) -> Callable[..., None]:
        def note(module: Module, args: Any, kwargs: Any) -> None:
            call = signature_of(args, kwargs), torch.is_grad_enabled()
            self.seen.setdefault(name, set()).add(call)

        return note


@dataclass
class SignatureGuard:
    """Wrapper of a block with divided parameters."""

    name: str
    block: Module
    entries: Mapping[str, ShardedParameter]
    """Divided parameters, by their names within the block."""
    group: TensorGroup
    verified: Verified
    """Shared by all blocks of a kind."""
    depends_on: str | None
    """Why the block cannot be verified alone: other modules are divided together with it."""
    stack: RunningStack | None = None
    """The stack if activations are divided along the sequence around this block."""
    passed: Sequence[PassedTensor] = ()
    """Divided tensors that the block takes and returns; any other is replicated."""
    originals: Sequence[Original] = ()
    """Attributes of the block's modules before the plan was applied."""
    is_coupled: bool = False
    """Whether ranks with other batches take part in its calls."""

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the block.

        Raises:
            UnsupportedError: If arguments are of a new kind and cannot be verified.
        """
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        signature, has_gradient = signature_of(args, kwargs), torch.is_grad_enabled()
        is_right = self.verified.of_call(signature, has_gradient=has_gradient)
        if not (has_gradient or self.block.training) and self._is_new_path(signature, args, kwargs):
            is_right = None
        if is_right is None:
            reason = self._why_unverifiable(args, kwargs)
            if any(map(is_fake, tree_leaves((args, kwargs)))):
                # Shapes are the same either way, and code that needs full sizes runs whole.
                runs_divided = reason is not None or self.verified.has_like(signature)
                return (forward if runs_divided else self._whole)(*args, **kwargs)
            if reason is not None:
                if not has_gradient:
                    return forward(*args, **kwargs)
                raise UnsupportedError(
                    f"The tensor plan was verified with a first batch for which "
                    f"{self._change_to(signature)}, and {self.name} cannot be verified again in "
                    f"the run, because {reason}. Put a batch of this kind first."
                )
            fault = _COUPLED if self.is_coupled else self._fault(forward, args, kwargs)
            is_right = fault is None
            if fault is not None and self.group.rank == 0:
                warnings.warn(
                    f"Tensor plan: {self.name} runs whole on every rank for batches unlike the "
                    f"first one, for which {self._change_to(signature)}: divided it {fault}. Put a "
                    f"batch of this kind first to have it planned for.",
                    stacklevel=2,
                )
            self.verified.add(signature, has_gradient=has_gradient, is_right=is_right)
        return forward(*args, **kwargs) if is_right else self._whole(*args, **kwargs)

    def _is_new_path(self, signature: Signature, args: Any, kwargs: Any) -> bool:
        """Whether a call in evaluation mode can be verified, and only training was."""
        return (
            self.verified.is_of_training(signature)
            and not self.is_coupled
            and not any(map(is_fake, tree_leaves((args, kwargs))))
            and self._why_unverifiable(args, kwargs) is None
        )

    def couple(self, *, divides_experts: bool) -> None:
        """Stop verifying calls: ranks that get rows of its experts would have to take part.

        Args:
            divides_experts: Whether the plan divides its experts, so that it cannot run whole.
        """
        self.is_coupled = True
        if divides_experts:
            self.depends_on = "its experts get rows of ranks that do not verify it with this one"
        if self.verified.has_sizes:
            self.verified.leave_out_sizes()

    def of_its_kind(self) -> dict[str, object]:
        """Return what determines how the block runs: everything but names in the model."""
        entries = {
            name: (entry.shape, entry.dim, entry.sections) for name, entry in self.entries.items()
        }
        return vars(self) | {"name": "", "entries": entries}

    def _why_unverifiable(self, args: Any, kwargs: Any) -> str | None:
        if self.depends_on is not None:
            return self.depends_on
        if any(isinstance(self._own(name), DTensor) for name in self.entries):
            return "its parameters are sharded over the data axis while it runs"
        divided = any(opened(each)[1] is not None for each in tree_leaves((args, kwargs)))
        if divided or (self.stack is not None and self.stack.parts.is_of_context):
            return "its sequence is divided over a context axis while it runs"
        for passed in self.passed:
            place = passed.place
            is_given = place in kwargs or (isinstance(place, int) and place < len(args))
            if not (passed.is_output or is_given):
                return "it takes a divided tensor, and not where it took one in the first batch"
        for each in (*args, *kwargs.values()):
            if callable(getattr(each, "get_seq_length", None)) and self._is_in_use(each):
                return "its cache holds divided keys and values"
        return None

    def _is_in_use(self, cache: Any) -> bool:
        """Whether a cache of transformers holds keys or a state of earlier tokens of this block."""
        indices = (getattr(each, "layer_idx", None) for each in self.block.modules())
        index = next((each for each in indices if each is not None), 0)
        try:
            return bool(cache.get_seq_length(index))
        except ValueError:  # of state spaces and linear attention, which have no length
            return bool(cache.has_previous_state(index))

    def _own(self, name: str) -> Tensor:
        owner, _, attribute = name.rpartition(".")
        return own_parameters(self.block.get_submodule(owner))[attribute]

    def _change_to(self, signature: Signature) -> str:
        """Describe the first argument that differs from all earlier calls."""
        known = [dict(each) for each in (*self.verified.with_gradient, *self.verified.forward_only)]
        if not self.verified.has_sizes:
            signature = without_sizes(signature)
        for earlier in known[:1]:
            for path, kind in signature:
                if path not in earlier or earlier[path] != kind:
                    now, before = _described(kind), _described(earlier.get(path, _MISSING))
                    return f"{path} of {self.name} was {before} and not {now}"
            missing = [path for path in earlier if path not in dict(signature)]
            if missing:
                return f"{self.name} also got {missing[0]}"
        if not self.block.training:
            return f"{self.name} was in training mode"
        return f"{self.name} was not called like this"

    # Running whole.

    def _whole(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block as one process would, on this rank. Collective over the group."""
        if self.stack is not None:
            args, kwargs = self.stack.with_whole_sequence(args, kwargs)
        for passed in self.passed:
            if not passed.is_output and passed.place is not None:
                join = self._on_tensor(gather_parts, passed.dim)
                args, kwargs = with_argument(args, kwargs, passed.place, join)
        with ExitStack() as context:
            context.enter_context(originals_restored(self.originals))
            views: dict[str, dict[str, Tensor | None]] = {}
            for name, entry in self.entries.items():
                owner, _, attribute = name.rpartition(".")
                view = gather_whole(self._own(name), entry, self.group)
                views.setdefault(owner, {})[attribute] = view
            for owner, several in views.items():
                context.enter_context(patched(self.block.get_submodule(owner), **several))
            # Checkpoints of Hugging Face within would run again after the parameters are restored.
            for each in self.block.modules():
                if vars(each).get("gradient_checkpointing"):
                    context.callback(setattr, each, "gradient_checkpointing", True)
                    vars(each)["gradient_checkpointing"] = False
            output = self.block.forward(*args, **kwargs)
        output = self._with_passed(output, take_part)
        return output if self.stack is None else self.stack.with_own_part(output)

    def _with_passed(self, output: Any, change: Callable[..., Tensor]) -> Any:
        """Return an output with the divided tensors in it joined, or with this rank's part."""
        for each in self.passed:
            if each.is_output:
                point = ExitPoint(self.name, each.place)
                output = with_output(output, point, self._on_tensor(change, each.dim))
        return output

    def _on_tensor(self, change: Callable[..., Tensor], dim: int) -> Callable[[Any], Any]:
        return lambda value: change(value, self.group, dim) if isinstance(value, Tensor) else value

    # Verification.

    def _fault(self, forward: Around, args: Any, kwargs: Any) -> str | None:
        """Return how the divided block differs from the whole one. Collective over the group."""
        modules = [*self.block.modules()]
        with (
            random_state_unchanged(self.group.device),
            modules_unchanged(modules),
            without_dropout(modules),
            unrecorded(),
            full_float32(),
        ):
            whole = self._outcome(self._whole, args, kwargs)
            try:
                planned = self._outcome(forward, args, kwargs)
                fault = difference(whole, planned, {}, tolerance=_tolerance(whole, self.group))
            except Exception as error:  # noqa: BLE001 - code that needs full sizes raises anything
                fault = f"raises {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        failed = torch.tensor(float(fault is not None), device=self.group.device)
        if all_reduce(failed, self.group, is_maximum=True) and fault is None:
            return "differs on another rank"
        return fault

    def _outcome(self, run: Around, args: Any, kwargs: Any) -> DryRunOutcome:
        """Return outputs, and gradients for random gradients of the outputs."""
        copies = _Copies()
        with copies:
            args, kwargs = copy.deepcopy((args, kwargs))
        output = self._with_passed(run(*args, **kwargs), gather_parts)
        if self.stack is not None:
            output = self.stack.with_joined_output(output)
        values = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
        outcome = DryRunOutcome(values=[each.detach() for each in values])
        roots = [each for each in values if each.requires_grad]
        if not torch.is_grad_enabled() or not roots:
            return outcome
        leaves = {f"argument {place + 1}": each for place, each in enumerate(copies.made)}
        leaves.update(
            (name, each) for name, each in self.block.named_parameters() if each.requires_grad
        )
        generator = torch.Generator().manual_seed(0)
        given = [
            torch.randn(each.shape, generator=generator).to(each.device, each.dtype)
            for each in roots
        ]
        found = cast(
            "tuple[Tensor | None, ...]",
            torch.autograd.grad(roots, [*leaves.values()], given, allow_unused=True),
        )
        outcome.gradients = {
            name: gradient
            for name, gradient in zip(leaves, found, strict=True)
            if gradient is not None
        }
        return outcome


class _Copies(TorchFunctionMode):
    """Makes ``copy.deepcopy`` copy tensors within a graph, as leaves of another graph."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []
        """Copies that get a gradient."""

    @override
    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        (tensor, memo) = args
        made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = made
        if made.requires_grad:
            self.made.append(made)
        return made


class _Missing:
    """Kind of an argument that a call does not have."""


_MISSING = _Missing()


def _described(kind: Any) -> str:
    if kind is _MISSING:
        return "missing"
    if isinstance(kind, tuple):
        name, dims = kind
        if isinstance(dims, int):
            return f"a tensor of {dims} dims ({name})"
        sizes = ", ".join("1" if each else "n" for each in dims)
        return f"a tensor of shape [{sizes}] ({name})"
    return kind if isinstance(kind, str) and kind.startswith("a ") else repr(kind)


_COUPLED = "is not verified in the run, as ranks with other batches send rows to its experts"


def _tolerance(outcome: DryRunOutcome, group: TensorGroup) -> float:
    is_rough = torch.is_autocast_enabled(group.device.type) or any(
        each.is_floating_point() and each.dtype.itemsize < 4 for each in outcome.values
    )
    return ROUGH if is_rough else TOLERANCE
