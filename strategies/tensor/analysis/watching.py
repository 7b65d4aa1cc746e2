"""Sees every operator of a step and applies the rule for it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from boltmesh.strategies.tensor.analysis.operators import (
    attention,
    cutting,
    indexing,
    making,
    pointwise,
    products,
    reductions,
    views,
)
from boltmesh.strategies.tensor.analysis.operators.rule import RULES, Call
from boltmesh.strategies.tensor.analysis.records import Step
from boltmesh.strategies.tensor.analysis.trace import Trace
from boltmesh.strategies.torch_compat import (
    GROUPED_PRODUCT,
    NEEDS_DATA,
    DispatchMode,
    OpOverload,
    is_fake,
    is_in_backward,
    schema_of,
    tree_leaves,
    tree_map_only,
    written_or_viewed,
)

_FAMILIES = (attention, cutting, indexing, making, pointwise, products, reductions, views)
"""Loaded, they have put their rules into the table."""

_VIEWS = frozenset({
    "_reshape_alias", "_unsafe_view", "alias", "detach", "expand", "permute", "select", "slice",
    "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
})  # fmt: skip
"""What is written to their outputs is written to their input."""


class Watch(DispatchMode):
    """Applies rules to operators on tensors that depend on parameters.

    What does not depend on a parameter, such as a mask made of the batch, has values and is
    computed: the code may branch on it. Each rank has all of it, so it is no business of a plan.
    """

    def __init__(self, trace: Trace, persistent: set[int]) -> None:
        """Watch for a trace; ``persistent`` are the ids of parameters and buffers."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace
        self.persistent = persistent

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        if is_in_backward() or not any(map(is_fake, inputs)):
            return func(*args, **kwargs)
        result = self._run(func, args, kwargs)
        if func.namespace == "prim":
            return result
        name = schema_of(func).name.split("::")[1]
        call = Call(self.trace, name, _named(func, args, kwargs), inputs, _tensors(result))
        taken = tuple(self.trace.operand(each) for each in inputs)
        self._apply(func, call)
        for value, is_write in written_or_viewed(func, args, kwargs):
            if is_write and id(value) in self.persistent:
                self.trace.keep_whole(value, name)
        self._note(call, taken)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is GROUPED_PRODUCT:
            # For shapes alone, torch insists on a type that its kernels do not insist on.
            given, named = tree_map_only(Tensor, _in_half, (args, kwargs))
            return func(*given, **named).to(args[0].dtype)
        try:
            return func(*args, **kwargs)
        except NEEDS_DATA:
            self.trace.guessed[str(func)] += 1
            given, named = tree_map_only(Tensor, _ones, (args, kwargs))
            return func(*given, **named)

    def _apply(self, func: OpOverload, call: Call) -> None:
        rule = RULES.get(call.name)
        if rule is None and torch.Tag.pointwise in func.tags and call.outputs:
            rule = pointwise.pointwise
        if rule is None:
            self.trace.unknown[str(func)] += 1
            call.forget()
            return
        try:
            rule(call)
        except (IndexError, KeyError, TypeError, ValueError, AssertionError):
            # An overload that the rule was not written for.
            self.trace.unknown[str(func)] += 1
            call.forget()

    def _note(self, call: Call, taken: tuple[Any, ...]) -> None:
        given = tuple(self.trace.operand(each) for each in call.outputs)
        step = Step(call.name, taken, given, tuple(self.trace.stack), tuple(call.needed))
        self.trace.steps.append(step)
        if call.name in _VIEWS:
            self.trace.bases.update({each.key: taken[0].key for each in given})


def _in_half(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def _ones(tensor: Tensor) -> Tensor:
    """A tensor with data in the place of one without."""
    return torch.ones(tensor.shape, dtype=tensor.dtype) if is_fake(tensor) else tensor


def _places(output: Any) -> list[tuple[int | str | None, Any]]:
    """What a module gave, taken apart by one level."""
    if isinstance(output, Mapping):
        return list(output.items())
    if isinstance(output, list | tuple):
        return list(enumerate(output))
    return [(None, output)]


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def _named(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, with the defaults of those that were not given."""
    schema = schema_of(func).arguments
    named = {each.name: each.default_value for each in schema if each.has_default_value()}
    named.update({each.name: value for each, value in zip(schema, args, strict=False)})
    return {**named, **kwargs}


@contextmanager
def modules_watched(root: Module, trace: Trace) -> Iterator[None]:
    """Within it, a trace knows in which modules' forward an operator runs."""
    handles = []
    for name, module in root.named_modules():
        before, after = _hooks(name, trace)
        handles += [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, always_call=True),
        ]
    try:
        yield
    finally:
        trace.stack.clear()
        for each in handles:
            each.remove()


def _hooks(name: str, trace: Trace) -> tuple[Any, Any]:
    def before(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trace.stack.append(name)
        taken = trace.module_inputs.setdefault(name, {})
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        for place, value in given:
            if isinstance(value, Tensor) and value.is_floating_point():
                taken.setdefault(place, trace.operand(value))

    def after(module: Module, args: tuple[Any, ...], output: Any) -> None:
        if trace.stack:
            trace.stack.pop()
        if name in trace.attentions and isinstance(output, tuple) and output[1] is not None:
            trace.keep_whole(output[1], "weights of each head")
        for each in _tensors(output):
            if each.is_floating_point():
                trace.producers.setdefault(trace.label(each).key, name)
        if name not in trace.module_outputs:
            trace.module_outputs[name] = {
                place: trace.operand(value)
                for place, value in _places(output)
                if isinstance(value, Tensor) and value.is_floating_point()
            }

    return before, after
