"""Runs a step on fake tensors, and records the axes of the model's dims.

``AnalysisMode`` sees every operator of the step and applies the rule for it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, MultiheadAttention, Parameter
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from boltmesh.strategies.dry_run.no_side_effects import leaves_of, name_of, writes_to_first
from boltmesh.strategies.dry_run.step import rare_garbage_collection
from boltmesh.strategies.tensor.analysis import arithmetic_rules, movement_rules
from boltmesh.strategies.tensor.analysis.symbolic_dims import Dim
from boltmesh.strategies.tensor.analysis.trace import (
    RULES,
    DimTrace,
    OperatorCall,
    OperatorRecord,
    of_parameters,
)
from boltmesh.strategies.torch_compat.autograd import is_in_backward
from boltmesh.strategies.torch_compat.modules import needless_conversions_skipped, swapped_state
from boltmesh.strategies.torch_compat.tensors import (
    GROUPED_PRODUCT,
    NEEDS_DATA,
    DispatchMode,
    FakePackedSequences,
    FakeTensorMode,
    OpOverload,
    fake_tensors,
    is_fake,
    make_fake,
    schema_of,
    tree_leaves,
    tree_map_only,
    with_fitting_sizes,
    written_or_viewed,
)

_FAMILIES = (arithmetic_rules, movement_rules)
"""Importing them registers their rules."""

_VIEWS = frozenset({
    "_reshape_alias", "_unsafe_view", "alias", "detach", "expand", "permute", "select", "slice",
    "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
})  # fmt: skip
"""Operators whose output is written through to their input."""


_READ_NUMBER = "aten._local_scalar_dense.default"
_MOST_NUMBERS = 1_000
"""Limit of numbers that a step may read from fake tensors. A solver that iterates until its error
is small (of a neural ODE) always gets the same number."""


def _refuse_endless(num_reads: int) -> None:
    """Raise an error if a step has read too many numbers from fake tensors."""
    if num_reads > _MOST_NUMBERS:
        raise RuntimeError(f"it read {_MOST_NUMBERS:,} numbers of tensors and did not end")


class AnalysisMode(DispatchMode):
    """Applies rules to operators on tensors that depend on parameters.

    Tensors that do not, such as a mask made from the batch, have values and are computed: the code
    may branch on them. Each rank has all of them, so a plan does not concern them.
    """

    def __init__(self, trace: DimTrace, persistent: set[int], guess: int = 1) -> None:
        """Record in ``trace``; ``persistent`` holds the ids of parameters and buffers."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace
        self.persistent = persistent
        self.guess = guess

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
        call = OperatorCall(self.trace, name, _named(func, args, kwargs), inputs, _tensors(result))
        taken = tuple(self.trace.operand(each) for each in inputs)
        self._apply(func, call)
        for value, is_write in written_or_viewed(func, args, kwargs):
            if is_write and id(value) in self.persistent:
                self.trace.keep_whole(value, name)
        self._note(call, taken)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is GROUPED_PRODUCT:
            left, right = args[:2]
            if (left.ndim, right.ndim) == (2, 3):
                return left.new_empty(left.shape[0], right.shape[-1])
            # For fake tensors, torch requires a dtype that its kernels do not require.
            given, named = tree_map_only(Tensor, _in_half, (args, kwargs))
            return func(*given, **named).to(args[0].dtype)
        try:
            return func(*args, **kwargs)
        except NEEDS_DATA:
            self.trace.guessed[str(func)] += 1
            _refuse_endless(self.trace.guessed[_READ_NUMBER])
            given, named = tree_map_only(Tensor, self._guessed, (args, kwargs))
            return func(*given, **named)

    def _guessed(self, tensor: Tensor) -> Tensor:
        """Return a tensor with data in the place of a fake one."""
        if not is_fake(tensor):
            return tensor
        return torch.full(tensor.shape, self.guess, dtype=tensor.dtype)

    def _apply(self, func: OpOverload, call: OperatorCall) -> None:
        rule = RULES.get(call.name)
        if rule is None and torch.Tag.pointwise in func.tags and call.outputs:
            rule = arithmetic_rules.pointwise
        if rule is None:
            self.trace.unknown[str(func)] += 1
            call.forget()
            return
        try:
            rule(call)
        except (IndexError, KeyError, TypeError, ValueError, AssertionError):
            # An overload that the rule does not support.
            self.trace.unknown[str(func)] += 1
            call.forget()

    def _note(self, call: OperatorCall, taken: tuple[Any, ...]) -> None:
        given = tuple(self.trace.operand(each) for each in call.outputs)
        step = OperatorRecord(call.name, taken, given, tuple(self.trace.stack), tuple(call.needed))
        self.trace.steps.append(step)
        if call.name in _VIEWS:
            self.trace.bases.update({each.key: taken[0].key for each in given})


_ARRAYS = frozenset({Tensor.__array__, Tensor.numpy, Tensor.tolist})


class _FunctionsOnFakes(TorchFunctionMode):
    """Lets code read fake tensors as arrays or lists, and write them into tensors with values.

    Metrics of scikit-learn read arrays. States of recurrent networks are often written into a
    tensor of zeros (``states[:, step] = state``), which has no values from then on. Writes through
    a view that the code has kept are not followed.
    """

    def __init__(self, trace: DimTrace, persistent: set[int], guess: int) -> None:
        super().__init__()
        self.trace, self.persistent, self.guess = trace, persistent, guess

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _ARRAYS and is_fake(args[0]):
            read, name = args[0], f"Tensor.{func.__name__}"
            self.trace.guessed[name] += 1
            _refuse_endless(self.trace.guessed[name])
            self.trace.keep_whole(read, func.__name__)
            args = torch.full((), self.guess, dtype=read.dtype).expand(read.shape), *args[1:]
        elif args and writes_to_first(name_of(func)):
            self._lose_values(args[0], (args[1:], kwargs))
        args, kwargs = with_fitting_sizes(name_of(func), args, kwargs or {})
        return func(*args, **kwargs)

    def _lose_values(self, written: object, given: Any) -> None:
        """Make a tensor with values a fake one if a fake one is written into it."""
        if type(written) is not Tensor or is_fake(written) or id(written) in self.persistent:
            return
        fake = next((each for each in _tensors(given) if is_fake(each)), None)
        if fake is not None:
            empty = fake.new_empty(written.shape, dtype=written.dtype)
            with suppress(RuntimeError):  # another object refers to its memory
                torch.utils.swap_tensors(written, empty)  # type: ignore[no-untyped-call]


def _in_half(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def _places(output: Any) -> list[tuple[int | str | None, Any]]:
    """Return the outputs of a module, one level of nesting resolved."""
    if isinstance(output, Mapping):
        return list(output.items())
    if isinstance(output, list | tuple):
        return list(enumerate(output))
    return [(None, output)]


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def _named(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by name, with the defaults of those that were not given."""
    schema = schema_of(func).arguments
    named = {each.name: each.default_value for each in schema if each.has_default_value()}
    named.update({each.name: value for each, value in zip(schema, args, strict=False)})
    return {**named, **kwargs}


@contextmanager
def modules_watched(root: Module, trace: DimTrace) -> Iterator[None]:
    """Context in which a trace knows the modules whose forward runs."""
    with ExitStack() as stack:
        for name, module in root.named_modules():
            before, after = _hooks(name, trace)
            stack.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            stack.enter_context(module.register_forward_hook(after, always_call=True))
        stack.callback(trace.stack.clear)
        yield


def _hooks(name: str, trace: DimTrace) -> tuple[Any, Any]:
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


@dataclass(frozen=True)
class ParameterFacts:
    """Properties of a parameter that a plan depends on."""

    name: str
    names: tuple[str, ...]
    """All names of a tied parameter, ``name`` first."""
    shape: tuple[int, ...]
    dims: tuple[Dim, ...]
    element_bytes: int

    @property
    def elements(self) -> int:
        """Number of elements of the whole parameter."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Analysis:
    """Results of the traced steps about the axes of a model."""

    parameters: dict[str, ParameterFacts]
    """By first name, in the order of the model."""
    trace: DimTrace
    blocks: tuple[str, ...]
    """Names of the repeated blocks."""
    integers: dict[str, dict[str, int]] = field(default_factory=dict)
    """Integer attributes of modules, which may be sizes, by name of the module."""
    classes: dict[str, type[Module]] = field(default_factory=dict)
    """Classes of modules by name."""


@rare_garbage_collection()
def analyse(
    module: Module,
    run: Callable[[Module], object],
    *others: Callable[[Module], object],
    blocks: Mapping[str, Module],
    dtype: torch.dtype | None = None,
    guess: int = 1,
) -> Analysis:
    """Find the logical axes of a model, from steps on fake tensors.

    Nothing that depends on parameters is computed; they may be on the meta device. The caller
    undoes what the steps change in Python. No communication.

    Args:
        module: The model. Its parameters and buffers are replaced during the steps.
        run: Runs a step with ``module`` and returns its result, such as the loss.
        others: More steps, with batches of other shapes: a dim that any of them needs whole stays
            whole.
        blocks: The repeated blocks by dotted name.
        dtype: Dtype of floating-point parameters during the steps; None keeps their own.
        guess: Value of fake tensors that a step reads.
    """
    names = _tied_names(module)
    parameters = {first: module.get_parameter(first) for first in names}
    attentions = (
        name for name, each in module.named_modules() if isinstance(each, MultiheadAttention)
    )
    trace = of_parameters(parameters, frozenset(attentions))
    for each in (run, *others):
        with (
            _stand_ins(module, trace, list(names), dtype) as persistent,
            modules_watched(module, trace),
        ):
            with (
                torch.random.fork_rng(devices=[]),
                torch.enable_grad(),
                FakePackedSequences(),
                AnalysisMode(trace, persistent, guess),
                _FunctionsOnFakes(trace, persistent, guess),
            ):
                result = each(module)
            for value in tree_leaves(result):
                if isinstance(value, Tensor):
                    trace.keep_whole(value, "the result of the step, or what it sets on a module")
        trace.forget_labels()
    facts = {
        first: ParameterFacts(
            first,
            tuple(tied),
            tuple(parameters[first].shape),
            trace.parameters[first],
            parameters[first].element_size(),
        )
        for first, tied in names.items()
    }
    return Analysis(
        facts,
        trace,
        tuple(blocks),
        {name: _integers(each) for name, each in module.named_modules()},
        {name: type(each) for name, each in module.named_modules()},
    )


def _tied_names(module: Module) -> dict[str, list[str]]:
    """Return all names of each parameter by its first one."""
    firsts: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = firsts.setdefault(id(parameter), name)
        names.setdefault(first, []).append(name)
    return names


def _integers(module: Module) -> dict[str, int]:
    return {
        name: value
        for name, value in vars(module).items()
        if type(value) is int and value > 1 and not name.startswith("_")
    }


@contextmanager
def _stand_ins(
    module: Module, trace: DimTrace, names: list[str], dtype: torch.dtype | None
) -> Iterator[set[int]]:
    """Replace parameters by fake ones and buffers by copies.

    Yields the ids of both, and of the other tensors in attributes of modules.
    """
    mode = fake_tensors()
    swapped: dict[str, Tensor] = {}
    for name in names:
        swapped[name] = _without_data(module.get_parameter(name), mode, dtype)
        trace.set(swapped[name], trace.parameters[name], name)
    for name, buffer in module.named_buffers():
        swapped[name] = _without_data(buffer, mode) if buffer.is_meta else buffer.clone()
    others = (
        each
        for owner in module.modules()
        for attribute in vars(owner).values()
        for each in leaves_of(attribute)
        if isinstance(each, Tensor)
    )
    with swapped_state(module, swapped), needless_conversions_skipped():
        yield {id(each) for each in (*swapped.values(), *others)}


def _without_data(tensor: Tensor, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> Tensor:
    """Return a fake tensor of the same shape; on the CPU, where batches are, for a meta tensor."""
    if dtype is None or not tensor.is_floating_point():
        dtype = tensor.dtype
    if not tensor.is_meta and dtype == tensor.dtype:
        return make_fake(tensor, mode)
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
    if isinstance(tensor, Parameter):
        return Parameter(made, requires_grad=tensor.requires_grad)
    return made
