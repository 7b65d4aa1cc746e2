"""Finds the experts of a model from the calls of its modules in one step.

Names matter for adapters of peft only. During a step, ``ChoiceWidths`` records the widths of
choices (``topk``, ``argmax``), and hooks record inputs and outputs of each module. Experts are a
module of one of these kinds:

- *routed*: gets rows, integers ``(N, K)`` below the number of experts, and possibly a weight for
  each; the first dim of all its parameters is divided over experts. The experts of transformers 5
  are of this kind.
- *sorted*: gets rows in the order of their experts, and a list of the number of rows per expert.
- *batched*: gets equally many rows for each expert, ``(X, N, E)`` or ``(X * N, E)``, and nothing
  else, and has stacked parameters of its own that are multiplied in one call.
- *list*: calls equal modules of a list, as many as the width of a choice, with different numbers of
  rows, or not all of them.

``find_experts`` also returns the reasons why similar modules are none of these.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from boltmesh.strategies.expert.adapters import (
    adapter_type,
    adapters_by_columns,
    fault_of_adapters,
    without_adapters,
)
from boltmesh.strategies.torch_compat.modules import has_hooks
from boltmesh.strategies.torch_compat.tensors import tree_map

Kind = Literal["routed", "sorted", "batched", "list"]
Slot = int | str
"""A positional argument's index, or a keyword."""


@dataclass(frozen=True)
class Experts:
    """The experts of one module."""

    kind: Kind
    name: str
    """Name of the module, within the model."""
    num_experts: int
    parameters: tuple[str, ...]
    """Names of their parameters within the model."""
    slots: Mapping[str, Slot]
    """Slots of ``rows``, ``experts``, ``weights`` and ``sizes`` among the arguments."""
    counts: tuple[tuple[str, str], ...] = ()
    """Attributes with the number of experts: names of the module and of the attribute."""
    columns: tuple[str, ...] = ()
    """Parameters with columns interleaved over experts, as adapters of stacks have them."""
    members: tuple[str, ...] = ()
    """Names of the experts in a list, in its order; empty for other kinds."""


@dataclass(frozen=True)
class ExpertCall:
    """One call of experts, which the proof repeats."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    rows: Tensor | None = None
    """All input rows of experts in a list, shape ``(N, E)``, without values."""
    results: Tensor | None = None
    """Outputs for these rows, shape ``(N, output width)``, without values."""
    has_gradients: bool = True
    """Whether a module before it is trained, so that rows may need gradients."""
    is_parametrized: bool = False
    """Whether parameters of the module were computed from others in the call."""


def arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[Slot, Any]:
    """Return arguments by position or keyword."""
    given: dict[Slot, Any] = dict(enumerate(args))
    given.update(kwargs.items())
    return given


@dataclass
class Findings:
    """Experts of a step."""

    experts: list[Experts] = field(default_factory=list)
    calls: dict[str, ExpertCall] = field(default_factory=dict)
    """The first call of each module, by name."""
    whole: dict[str, str] = field(default_factory=dict)
    """Reasons why modules that choose among parameters stay whole, by name."""
    even: list[tuple[Experts, ExpertCall]] = field(default_factory=list)
    """Lists called with equal numbers of rows: they are experts if another rank finds so."""


class ChoiceWidths(TorchFunctionMode):
    """Records the widths of choices, the last dims of tensors ``(*, width)`` chosen from."""

    _CHOICES = frozenset({"topk", "argmax", "sort", "argsort", "max"})

    def __init__(self) -> None:
        super().__init__()
        self.widths: set[int] = set()

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        chosen = args[0] if args else None
        is_choice = getattr(func, "__name__", "") in self._CHOICES
        if is_choice and isinstance(chosen, Tensor) and chosen.ndim >= 2:
            self.widths.add(chosen.shape[-1])
        return func(*args, **(kwargs or {}))


def find_experts(model: Module, step: Callable[[], object]) -> Findings:
    """Find the experts of a model; ``step`` runs a step of it."""
    seen: dict[str, ExpertCall] = {}
    lists = _lists_of(model)
    names = {module: name for name, module in model.named_modules()}
    mode, trained = ChoiceWidths(), _TrainedBefore(model)
    with ExitStack() as stack:
        for module, name in names.items():
            if name and next(module.parameters(), None) is not None:
                hook = partial(_keep_call, seen, name)
                stack.enter_context(module.register_forward_hook(hook, with_kwargs=True))
                stack.enter_context(module.register_forward_pre_hook(trained.note))
                stack.enter_context(module.register_forward_hook(trained.note))
        for each in lists.values():
            each.watch(stack)
        stack.enter_context(mode)
        step()
    findings = Findings()
    for each in lists.values():
        if each.num_experts not in mode.widths or not each.is_called:
            continue
        reason = each.why_whole(model)
        if reason is None and each.call is not None:
            members = tuple(each.experts)
            own = tuple(n for n, _ in model.named_parameters() if n.startswith(_below(members)))
            of_list = Experts("list", each.name, each.num_experts, own, {}, members=members)
            if each.are_called_as_experts:
                findings.experts.append(of_list)
                findings.calls[each.name] = each.call
            else:
                findings.even.append((of_list, each.call))
        elif each.are_called_as_experts:
            findings.whole[each.list_name] = reason or "its experts are called in no module"
    adapted = tuple(f"{n}." for m, n in names.items() if isinstance(m, adapter_type()))
    for name in names.values():  # in the order of the model
        if name not in seen or name in findings.calls or name.startswith(adapted):
            continue
        call = seen[name]
        experts = (
            _sorted(model, name, call)
            or _routed(model, name, call, mode.widths)
            or _batched(model, name, call, mode.widths)
        )
        if isinstance(experts, str):
            findings.whole[name] = experts
        elif experts is not None:
            findings.experts.append(experts)
            is_trained = trained.before[model.get_submodule(name)]
            findings.calls[name] = replace(call, has_gradients=is_trained)
    _leave_nested(findings)
    return findings


def detached(call: ExpertCall, device: torch.device | None = None) -> ExpertCall:
    """Return a call without its graph, on a device if one is given."""

    def changed(value: Any) -> Any:
        return value.detach().to(device) if isinstance(value, Tensor) else value

    return replace(
        call,
        args=tree_map(changed, call.args),
        kwargs=tree_map(changed, dict(call.kwargs)),
        output=tree_map(changed, call.output),
    )


class _TrainedBefore:
    """Records for each module whether modules called before it have trained parameters."""

    def __init__(self, model: Module) -> None:
        self.before: dict[Module, bool] = {}
        self._is_any = any(each.requires_grad for each in model.parameters(recurse=False))

    def note(self, module: Module, *_: object) -> None:
        """Record the beginning or end of a module's call."""
        is_new = module not in self.before
        self.before.setdefault(module, self._is_any)
        own = module.parameters(recurse=not is_new)
        self._is_any = self._is_any or any(each.requires_grad for each in own)


def _keep_call(
    seen: dict[str, ExpertCall], name: str, module: Module, args: Any, kwargs: Any, output: Any
) -> None:
    if name in seen:
        return
    values = [*args, *kwargs.values()]
    # Parameters of adapted and parametrized modules are in a child module.
    is_around = isinstance(module, adapter_type()) or is_parametrized(module)
    has_experts = any(_are_choices(each) or _are_sizes(each) for each in values) or any(
        each.ndim == _STACKED for each in module.parameters(recurse=is_around)
    )
    seen[name] = ExpertCall((), {}, None)
    if isinstance(output, Tensor) and has_experts:
        made = any(map(is_parametrized, module.modules()))
        call = ExpertCall(args, dict(kwargs), output, is_parametrized=made)
        seen[name] = detached(call)


def _are_choices(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.ndim < 2:
        return False
    return not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 1 and all(type(n) is int for n in value)


def _routed(model: Module, name: str, call: ExpertCall, widths: set[int]) -> "Experts | str | None":
    given = arguments(call.args, call.kwargs)
    output = call.output
    if not isinstance(output, Tensor) or not output.ndim:
        return None
    tensors = {slot: value for slot, value in given.items() if isinstance(value, Tensor)}
    chosen = [slot for slot, value in tensors.items() if _are_choices(value)]
    floats = {slot: value for slot, value in tensors.items() if value.is_floating_point()}
    rows = [
        slot for slot, value in floats.items() if value.ndim > 1 and value.shape == output.shape
    ]
    if len(chosen) != 1 or not rows:
        return None
    experts = tensors[chosen[0]]
    num_rows, num_choices = math.prod(output.shape[:-1]), experts.shape[-1]
    if experts.numel() != num_rows * num_choices or not experts.numel():
        return None
    module = model.get_submodule(name)
    highest = int(experts.max())
    shared = ""
    own = without_adapters(module)
    # A router may have one more choice, of no expert.
    leading = {p.shape[0] for p in own.values() if p.ndim}
    are_equal = len(leading) == 1 and max(leading) < max(widths, default=0)
    numbers = widths | leading if are_equal else widths
    for number in sorted((each for each in numbers if each > max(1, highest)), reverse=True):
        others = [each for each, p in own.items() if not p.ndim or p.shape[0] % number]
        if len(others) == len(own):
            continue
        if others:
            shared = f"{name}.{others[0]}"
            continue
        weights = [
            slot
            for slot, value in floats.items()
            if slot != rows[0] and value.numel() in {num_rows * num_choices, num_rows * number}
        ]
        slots: dict[str, Slot] = {"rows": rows[0], "experts": chosen[0]}
        if weights:
            slots["weights"] = weights[0]
        return _checked(model, "routed", name, number, slots, call)
    if shared:
        return f"its experts share {shared!r}"
    return None


def _sorted(model: Module, name: str, call: ExpertCall) -> "Experts | str | None":
    given = arguments(call.args, call.kwargs)
    rows = [s for s, v in given.items() if isinstance(v, Tensor) and v.is_floating_point()]
    sizes = [slot for slot, value in given.items() if _are_sizes(value)]
    if len(rows) != 1 or len(sizes) != 1 or not isinstance(call.output, Tensor):
        return None
    number, num_rows = len(given[sizes[0]]), given[rows[0]].shape[0]
    if sum(given[sizes[0]]) != num_rows or call.output.shape[:1] != given[rows[0]].shape[:1]:
        return None
    module = model.get_submodule(name)
    own = without_adapters(module).values()
    if any(not each.ndim or each.shape[0] % number for each in own):
        return None
    return _checked(model, "sorted", name, number, {"rows": rows[0], "sizes": sizes[0]}, call)


_STACKED = 3
"""Number of dims of a stack of matrices."""


def _batched(
    model: Module, name: str, call: ExpertCall, widths: set[int]
) -> "Experts | str | None":
    given = arguments(call.args, call.kwargs)
    tensors = [slot for slot, value in given.items() if isinstance(value, Tensor)]
    own = list(without_adapters(model.get_submodule(name)).values())
    number = own[0].shape[0] if own and own[0].ndim else 0
    if len(tensors) != 1 or number not in widths or number < 2:
        return None
    if not any(p.ndim == _STACKED for p in own) or any(p.shape[:1] != (number,) for p in own):
        return None
    rows, output = given[tensors[0]], call.output
    is_stacked = rows.ndim == _STACKED and rows.shape[0] == number
    is_flat = rows.ndim == 2 and rows.shape[0] % number == 0
    if not (is_stacked or is_flat) or not rows.is_floating_point():
        return None
    if not isinstance(output, Tensor) or output.shape[:-1] != rows.shape[:-1]:
        return None
    return _checked(model, "batched", name, number, {"rows": tensors[0]}, call)


def _checked(
    model: Module,
    kind: Kind,
    name: str,
    number: int,
    slots: Mapping[str, Slot],
    call: ExpertCall,
) -> "Experts | str":
    """Return the experts, or why they cannot be divided."""
    module = model.get_submodule(name)
    if call.is_parametrized and not any(map(is_parametrized, module.modules())):
        return "its parameters are made of others when it is called"
    if (fault := fault_of_adapters(module, name, number)) is not None:
        return fault
    inside = {id(each) for each in module.parameters()}
    prefix = f"{name}."
    for other, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in inside and not other.startswith(prefix):
            return f"its parameters are also {other!r}"
    for buffer_name, buffer in module.named_buffers():
        if buffer.ndim and buffer.shape[0] % number == 0:
            return f"the buffer {prefix + buffer_name!r} has an element for each expert"
    own = tuple(prefix + each for each, _ in module.named_parameters())
    columns = tuple(prefix + each for each in adapters_by_columns(module))
    parameters = tuple(each for each in own if each not in columns)
    counts = tuple(
        (f"{prefix}{path}".rstrip("."), key)
        for path, part in module.named_modules()
        for key, value in vars(part).items()
        if type(value) is int and value == number
        if key == "num_experts" or not isinstance(part, adapter_type())
    )
    return Experts(kind, name, number, parameters, slots, counts, columns)


@dataclass
class _List:
    """Equal modules in a list, and their calls in a step."""

    list_name: str
    name: str
    """Name of the module that calls them."""
    caller: Module
    experts: dict[str, Module]
    """The modules by name within the model."""
    call: ExpertCall | None = None
    """The first call of the caller that calls them as experts; if there is none, its first call
    that calls them."""
    is_called: bool = False
    _calls: list[tuple[Module, tuple[Any, ...], Any]] = field(default_factory=list)
    """Calls of experts since the caller was called, with inputs and output."""
    are_called_as_experts: bool = False
    fault: str | None = None
    """Why they cannot be called with other ranks' rows."""
    _is_sure: bool = False
    """Whether ``call`` and ``fault`` come from a call as experts."""

    @property
    def num_experts(self) -> int:
        """Number of the modules."""
        return len(self.experts)

    def watch(self, stack: ExitStack) -> None:
        """Record calls until the stack is closed."""
        for each in self.experts.values():
            stack.enter_context(each.register_forward_hook(self._keep, with_kwargs=True))
        if self.name:
            stack.enter_context(self.caller.register_forward_hook(self._end, with_kwargs=True))

    def _keep(self, expert: Module, args: Any, kwargs: Any, output: Any) -> None:
        given = (*args, *kwargs.values())
        self.is_called = True
        self._calls.append((expert, tuple(map(_without_values, given)), _without_values(output)))
        self.are_called_as_experts = self.are_called_as_experts or self._looks_like_experts()

    def _looks_like_experts(self) -> bool:
        """Whether calls have different numbers of rows, or a caller has left some experts out."""
        rows = [given[0].numel() for _, given, _ in self._calls if _is_rows(given)]
        return len(set(rows)) > 1

    def _end(self, _: Module, args: Any, kwargs: Any, output: Any) -> None:
        calls = self._calls
        left_out = bool(calls) and len({expert for expert, _, _ in calls}) < self.num_experts
        self.are_called_as_experts = self.are_called_as_experts or left_out
        is_first = self.call is None and self.fault is None
        if calls and (is_first or self.are_called_as_experts != self._is_sure):
            self._is_sure = self.are_called_as_experts
            self.fault, self.call = self._fault(calls), None
        if calls and self.call is None and self.fault is None:
            rows = [given[0].flatten(0, -2) for _, given, _ in calls]
            results = [result.flatten(0, -2) for _, _, result in calls]
            call = ExpertCall(args, dict(kwargs), output, torch.cat(rows), torch.cat(results))
            self.call = detached(call)
        calls.clear()

    def _fault(self, calls: Any) -> str | None:
        for _, given, result in calls:
            if not _is_rows(given):
                return "one of its experts is given something else than rows"
            if not isinstance(result, Tensor) or result.shape[:-1] != given[0].shape[:-1]:
                return "one of its experts does not give a row for each row"
        kinds = {(given[0].shape[-1], given[0].dtype) for _, given, _ in calls}
        made = {(result.shape[-1], result.dtype) for _, _, result in calls}
        if len(kinds) > 1 or len(made) > 1:
            return "its experts are given rows of several widths or types"
        return None

    def why_whole(self, model: Module) -> str | None:
        """Return why they cannot be divided; None if they can."""
        if not self.name:
            return "its experts are called by the LightningModule itself: put them into a module"
        if self.fault:
            return self.fault
        below = _below(self.experts)
        inside = {
            id(p) for n, p in model.named_parameters(remove_duplicate=False) if n.startswith(below)
        }
        for name, each in model.named_parameters(remove_duplicate=False):
            if id(each) in inside and not name.startswith(below):
                return f"its parameters are also {name!r}"
        for expert, module in self.experts.items():
            for name, each in module.named_parameters():
                if not each.ndim:
                    return f"{expert}.{name!r} is a number, which has no rows to be sharded by"
            for name, _ in module.named_buffers():
                return f"its experts have buffers, such as {expert + '.' + name!r}"
            for part in module.modules():
                if part is not module and has_hooks(part):
                    return "its experts have hooks, which would see rows of other ranks"
        return None


def _lists_of(model: Module) -> dict[str, _List]:
    """Return lists of equal modules with parameters, by name."""
    named = dict(model.named_modules())
    lists = {}
    for name, module in named.items():
        if not name or not isinstance(module, ModuleList | ModuleDict):
            continue
        inside = {
            f"{name}.{key}": each
            for key, each in module.named_children()
            if next(each.parameters(), None) is not None
        }
        kinds = {(type(e), tuple(p.shape for p in e.parameters())) for e in inside.values()}
        if len(inside) < 2 or len(kinds) > 1:
            continue
        caller = name
        # A list of torch cannot be called; a user's subclass can.
        while caller and type(named[caller]).forward in _NOT_CALLED:
            caller = caller.rpartition(".")[0]
        lists[name] = _List(name, caller, named[caller], inside)
    return lists


_NOT_CALLED = (Module.forward, ModuleList.forward, ModuleDict.forward)


def _below(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{name}." for name in names)


def _without_values(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value


def _is_rows(given: tuple[Any, ...]) -> bool:
    if len(given) != 1 or not isinstance(given[0], Tensor):
        return False
    return given[0].ndim > 1 and given[0].is_floating_point()


def _leave_nested(findings: Findings) -> None:
    """Keep the innermost of nested modules."""
    names = [each.name for each in findings.experts]
    findings.experts = [
        each for each in findings.experts if not any(n.startswith(f"{each.name}.") for n in names)
    ]
    for name in list(findings.whole):
        if any(each.startswith(f"{name}.") for each in names):
            del findings.whole[name]
