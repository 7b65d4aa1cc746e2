"""One training step of a module without data: saved tensors, operators, casts.

Fake tensors of the model are replaced by real ones of almost no memory: ``put_stand_ins``.
"""

import contextlib
import copy
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module, Parameter, functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from boltmesh.configs.advice import one_line
from boltmesh.plan.equal_blocks import EqualBlocks, continued, equal_blocks
from boltmesh.strategies.cost_model.model import Bytes, StepWork
from boltmesh.strategies.expert.find import ChoiceWidths
from boltmesh.strategies.torch_compat.tensors import (
    CAST,
    COSTLY_OPERATORS,
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    DispatchMode,
    is_fake,
    storage_key,
    tree_leaves,
)

PRODUCTS = (
    torch.ops.aten.mm,
    torch.ops.aten.addmm,
    torch.ops.aten.bmm,
    torch.ops.aten.baddbmm,
)
"""Operators that multiply their last two tensors."""
STEP = "training_step"
"""The method that plans are made of."""


NO_WORK = StepWork(0, 0, 0)


@dataclass(frozen=True)
class StepCounts:
    """Bytes, operators and casts of one forward and backward pass."""

    saved_bytes: int = 0
    transient_bytes: int = 0
    flops: int = 0
    """Floating point operations of the forward pass."""
    work: StepWork = NO_WORK
    chosen_widths: frozenset[int] = frozenset()
    cast_names: frozenset[str] = frozenset()
    """Names of parameters that are cast."""
    saved_by: Mapping[str, int] = field(default_factory=dict)
    """By module of ``attributing``, the bytes of ``saved_bytes`` that it was the first to save;
    what is saved outside of them has no name."""
    elsewhere: Bytes = field(default_factory=Bytes)
    """Kept beside ``saved_bytes`` in other memory than the device's."""

    @property
    def growing(self) -> tuple[int, int, StepWork]:
        """The part that grows with the number of equal blocks."""
        return self.saved_bytes, self.flops, self.work


class DryStep:
    """Counts one forward and backward pass of a module without data.

    [Note: Equal blocks]
    Of many equal blocks in a list a step runs one, then two, then three. If the third adds what the
    second has added, the others are counted as it; else the step runs with all of them.

    Args:
        selective: Which modules of ``attributing`` are recomputed selectively, so that results of
            ``COSTLY_OPERATORS`` in them are kept beside what autograd saves.
        equal: Blocks of the module that were equal before anything was put on them; None: none
            were looked for.
    """

    def __init__(
        self, *, selective: Collection[str] = (), equal: EqualBlocks | None = None
    ) -> None:
        self._selective = selective
        self._equal = equal
        self.counts = StepCounts()
        self._inside: list[str] = []
        self._attributed: Mapping[str, Module] = {}

    @contextlib.contextmanager
    def attributing(self, modules: Mapping[str, Module]) -> Iterator[None]:
        """Within, attribute saved bytes to these modules; none of them contains another one."""
        self._attributed = modules
        with contextlib.ExitStack() as stack:
            for name, module in modules.items():
                before = module.register_forward_pre_hook(
                    lambda *_, name=name: self._inside.append(name)
                )
                stack.enter_context(before)
                stack.enter_context(module.register_forward_hook(lambda *_: self._leave()))
            yield

    def _leave(self) -> None:
        self._inside.pop()

    def run(self, module: LightningModule, batch: Any, autocast: torch.dtype | None) -> str | None:
        """Run one training step; return why that is not possible, or None."""
        module.train()
        found = self._equal or equal_blocks(module)
        if found is not None and self._run_fewer(found, module, batch, autocast):
            return None
        return self._run_once(module, batch, autocast)

    def _run_fewer(
        self, blocks: EqualBlocks, module: LightningModule, batch: Any, autocast: torch.dtype | None
    ) -> bool:
        """Count a step from steps with one to three of its equal blocks; return whether it can."""
        several = []
        for count in (1, 2, 3):
            with blocks.first(count):
                complaint = self._run_once(module, batch, autocast)
                for each in module.parameters():
                    each.grad = None  # that the next one would add to
            if complaint is not None:
                self._inside.clear()
                return False
            several.append(self.counts)
        one, two, three = several
        # Alone, a block whose input needs no gradient has fewer kinds of products.
        products: dict[Any, float] = {**dict.fromkeys(two.work.products, 0), **one.work.products}
        if products.keys() != two.work.products.keys():
            return False
        one = replace(one, work=replace(one.work, products=products))
        if continued(one.growing, two.growing, 2) != three.growing:
            return False
        if two.transient_bytes != three.transient_bytes:
            return False
        saved_bytes, flops, work = continued(one.growing, two.growing, blocks.count - 1)
        names = {each: name for name, each in self._attributed.items()}
        saved_by = dict(three.saved_by)
        for other, like in blocks.others(2):
            if other in names and names.get(like) in saved_by:
                saved_by[names[other]] = saved_by[names[like]]
        casts = blocks.names_in_all(three.cast_names)
        self.counts = replace(
            three,
            saved_bytes=saved_bytes,
            flops=flops,
            work=work,
            saved_by=saved_by,
            cast_names=casts,
        )
        return True

    def _run_once(
        self, module: LightningModule, batch: Any, autocast: torch.dtype | None
    ) -> str | None:
        names = {storage_key(each): name for name, each in module.named_parameters()}
        known = set(names) | {storage_key(each) for each in module.buffers()}
        shapes = {tuple(each.shape) for each in module.parameters()}
        watch = _Temporaries(names, known, shapes, self._inside, self._selective)
        saved: dict[int, Tensor] = {}
        saved_by: dict[str, int] = {}
        widths = ChoiceWidths()

        def attribute(owner: str, tensor: Tensor) -> None:
            saved_by[owner] = saved_by.get(owner, 0) + tensor.untyped_storage().nbytes()

        def keep(tensor: Tensor) -> Tensor:
            at = storage_key(tensor)
            if at not in known and at not in watch.casts:
                if at not in saved and self._inside:
                    attribute(self._inside[-1], tensor)
                saved.setdefault(at, tensor)
            return tensor

        try:
            with computing_in(autocast), watch, widths:
                with saved_tensors_hooks(keep, lambda each: each):
                    output = module.training_step(batch, 0)
                forward_flops = watch.flops
                loss: Any = output["loss"] if isinstance(output, Mapping) else output
                for at, (owner, tensor) in watch.kept.items():
                    if at not in saved:
                        attribute(owner, tensor)
                        saved[at] = tensor
                watch.begin_backward(saved)
                loss.backward()
        except Exception as error:  # noqa: BLE001 - the rest of the plan needs no activations
            return f"training_step cannot run without a Trainer and data: {short_error(error)}"
        self.counts = StepCounts(
            saved_bytes=sum(each.untyped_storage().nbytes() for each in saved.values()),
            transient_bytes=watch.most_bytes,
            flops=forward_flops,
            work=StepWork(
                watch.flops,
                watch.moved_bytes,
                watch.operators,
                dict(watch.products),
                watch.product_bytes,
            ),
            chosen_widths=frozenset(widths.widths),
            cast_names=frozenset(watch.casts.values()),
            saved_by=saved_by,
        )
        return None


class _Temporaries(DispatchMode):  # type: ignore[no-untyped-call]
    """Notes casts of parameters, and the most that one operator of the backward pass holds.

    Counts what the operators of both passes compute and move.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        known: set[int],
        shapes: set[tuple[int, ...]],
        inside: Sequence[str],
        selective: Collection[str],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names, self.known = names, known
        self.casts: dict[int, str] = {}
        self.kept: dict[int, tuple[str, Tensor]] = {}
        """Results that selective recomputation keeps, with the module that keeps them."""
        self._inside, self._selective = inside, selective
        self.most_bytes = 0
        self.flops = self.moved_bytes = self.operators = self.product_bytes = 0
        self.products: Counter[tuple[int, int, int]] = Counter()
        # Gradients of parameters are counted elsewhere; those of weights come transposed.
        self._gradient_shapes = shapes | {each[::-1] for each in shapes}
        self._saved: set[int] | None = None
        self._alive: list[Tensor] = []

    def begin_backward(self, saved: Mapping[int, Tensor]) -> None:
        """Count temporaries from here on: tensors that are neither saved nor parameters."""
        self._saved = set(saved) | self.known

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs, made)) if isinstance(each, Tensor)]
        self._count(func, args, kwargs or {}, made, tensors)
        if func is CAST and storage_key(args[0]) in self.names:
            self.casts[storage_key(made)] = self.names[storage_key(args[0])]
            self._alive.append(made)  # its address must not be taken by another tensor
        owner = self._inside[-1] if self._inside else ""
        if self._saved is None and owner in self._selective and func in COSTLY_OPERATORS:
            results = [each for each in tree_leaves(made) if isinstance(each, Tensor)]
            self.kept |= {storage_key(each): (owner, each) for each in results}
        if self._saved is not None:
            here = {storage_key(each): each for each in tensors}
            size = sum(
                each.untyped_storage().nbytes()
                for at, each in here.items()
                if at not in self._saved
                and at not in self.casts
                and tuple(each.shape) not in self._gradient_shapes
            )
            self.most_bytes = max(self.most_bytes, size)
        return made

    def _count(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        made: Any,
        tensors: Sequence[Tensor],
    ) -> None:
        is_question = not any(isinstance(each, Tensor) for each in tree_leaves(made))
        if is_question or getattr(func, "is_view", False):
            return  # it reads a tensor's device or shape, or names a part of it
        self.operators += 1
        moved = sum(each.numel() * each.element_size() for each in tensors)
        self.moved_bytes += moved
        kind = getattr(func, "overloadpacket", func)
        if kind in PRODUCTS:
            left, right = (each for each in tensors[-3:-1])
            rows = left.numel() // left.shape[-1]
            self.products[rows, left.shape[-1], right.shape[-1]] += 1
            self.product_bytes += moved
        if kind is CPU_ATTENTION:
            query, key, value = (each.shape for each in args[:3])
            self.flops += _attention_flops(query, key, value, *args[3:], **kwargs)
        elif kind is CPU_ATTENTION_BACKWARD:  # makes the scores again: five products for two
            query, key, value = (each.shape for each in args[1:4])
            self.flops += 5 * _attention_flops(query, key, value, *args[6:8]) // 2
        elif kind in flop_registry:
            self.flops += flop_registry[kind](*args, **kwargs, out_val=made)


class _EqualExperts(TorchFunctionMode):
    """Multiplies the rows of a mixture by one product, as if each expert had equally many.

    How many it has is not known without data, and torch runs its own kernel without data in bf16
    alone.
    """

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_grouped = "grouped_mm" in getattr(func, "__name__", "")
        if not is_grouped or args[0].ndim != 2 or args[1].ndim != 3:
            return func(*args, **(kwargs or {}))
        rows, weights = args[:2]
        missing = -len(rows) % len(weights)
        padded = functional.pad(rows, (0, 0, 0, missing)) if missing else rows
        dealt = padded.view(len(weights), -1, rows.shape[-1])
        return torch.bmm(dealt, weights).view(-1, weights.shape[-1])[: len(rows)]


def _attention_flops(
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    dropout: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> int:
    """Count the kernel that torch has no formula for; a causal one does half of the products."""
    batch, heads, rows, width = query
    products = 2 * batch * heads * rows * key[-2] * (width + value[-1])
    return products // 2 if is_causal else products


@contextlib.contextmanager
def computing_in(dtype: torch.dtype | None) -> Iterator[None]:
    """Context of a step without data: autocast to ``dtype``, if one is given, and equal experts."""
    with _EqualExperts(), torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        yield


def short_error(error: BaseException) -> str:
    """Return the type and the message of an error, cut short."""
    return f"{type(error).__name__}: {one_line(error)[:200]}"


def put_stand_ins(module: Module) -> None:
    """Replace fake tensors by real ones: parameters of one number, all others of zeros."""
    made: dict[int, Tensor] = {}  # what has several names is one thing

    def stand_in(fake: Tensor) -> Tensor:
        if id(fake) not in made:
            made[id(fake)] = _stand_in(fake)
        return made[id(fake)]

    for part in module.modules():
        named: list[tuple[str, Tensor]] = []
        named += part.named_parameters(recurse=False, remove_duplicate=False)
        named += part.named_buffers(recurse=False, remove_duplicate=False)
        for name, value in [*named, *vars(part).items()]:
            if is_fake(value) or (isinstance(value, Parameter) and is_fake(value.data)):
                setattr(part, name, stand_in(value))


def _stand_in(fake: Tensor) -> Tensor:
    if not isinstance(fake, Parameter):
        return torch.zeros(fake.shape, dtype=fake.dtype)
    return Parameter(_one_number(fake.shape, fake.dtype), requires_grad=fake.requires_grad)


def copied(module: Module) -> Any:
    """Return a copy of a module of stand-ins, whose parameters are again of one number."""
    memo: dict[int, Any] = {
        id(each): Parameter(_one_number(each.shape, each.dtype), requires_grad=each.requires_grad)
        for each in module.parameters()
    }
    return copy.deepcopy(module, memo)


def reshape_stand_in(parameter: Parameter, shape: Sequence[int]) -> None:
    """Give a stand-in another shape in place, as that of a rank's part."""
    parameter.data = _one_number(shape, parameter.dtype)


def _one_number(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    # Two numbers: a storage of one number alone is how a parameter of another rank looks.
    return torch.zeros(2, dtype=dtype)[0].expand(tuple(shape))
