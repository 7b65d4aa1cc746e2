"""Finds the experts of a model by what its modules do in one step.

Nothing is known by name. While a step runs, ``WidthMode`` notes among how many something was chosen
(``topk``, ``argmax``), and hooks look at what each module is given and gives. Experts are a module
of one of these kinds:

- *routed*: given rows, whole numbers ``[T, k]`` below the number of experts, and perhaps a weight
  for each; all its parameters begin with a dim that the experts share. So are the experts of
  transformers 5.
- *sorted*: given rows in the order of their experts, and a list of how many each expert has.

``find_experts`` also says of what looks like experts why it is none of these.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from boltmesh.strategies.torch_compat.tensors import tree_map

Kind = Literal["routed", "sorted"]
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
    """Their names within the model."""
    slots: Mapping[str, Slot]
    """Where ``rows``, ``experts``, ``weights`` and ``sizes`` are among the arguments."""
    counts: tuple[tuple[str, str], ...] = ()
    """Attributes that are the number of experts: names of the module and of the attribute."""


@dataclass(frozen=True)
class ExpertCall:
    """One call of experts: what the proof repeats."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any


def arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[Slot, Any]:
    """Return arguments by position or keyword."""
    given: dict[Slot, Any] = dict(enumerate(args))
    given.update(kwargs.items())
    return given


@dataclass
class Findings:
    """Results of watching a step."""

    experts: list[Experts] = field(default_factory=list)
    calls: dict[str, ExpertCall] = field(default_factory=dict)
    """The first call of each, by name."""
    whole: dict[str, str] = field(default_factory=dict)
    """Why modules that choose among parameters stay whole, by name."""
    widths: set[int] = field(default_factory=set)
    """Among how many something was chosen."""


class WidthMode(TorchFunctionMode):
    """Notes the width of what is chosen from."""

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
    """Watch one step of a model.

    Args:
        model: Whose modules are looked at.
        step: Runs it.
    """
    seen: dict[str, ExpertCall] = {}
    names = {module: name for name, module in model.named_modules()}
    mode = WidthMode()
    with ExitStack() as stack:
        for module, name in names.items():
            if name and next(module.parameters(), None) is not None:
                hook = partial(_keep_call, seen, name)
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        stack.enter_context(mode)
        step()
    found = Findings(widths=mode.widths)
    for name in names.values():  # in the order of the model
        if name not in seen:
            continue
        experts = _sorted(model, name, seen[name]) or _routed(model, name, seen[name], mode.widths)
        if isinstance(experts, str):
            found.whole[name] = experts
        elif experts is not None:
            found.experts.append(experts)
            found.calls[name] = seen[name]
    for name, module in model.named_modules():
        if isinstance(module, ModuleList | ModuleDict) and _are_experts(module, seen, name, found):
            found.whole[name] = (
                "its experts are modules of a list, which the module around it calls one by one"
            )
    _leave_nested(found)
    return found


def detached(call: ExpertCall, device: torch.device | None = None) -> ExpertCall:
    """Return a call without its graph, on a device if one is given."""

    def changed(value: Any) -> Any:
        return value.detach().to(device) if isinstance(value, Tensor) else value

    return ExpertCall(
        tree_map(changed, call.args), tree_map(changed, dict(call.kwargs)), changed(call.output)
    )


def _keep_call(
    seen: dict[str, ExpertCall], name: str, module: Module, args: Any, kwargs: Any, output: Any
) -> None:
    values = [*args, *kwargs.values()]
    has_experts = any(_are_choices(each) or _are_sizes(each) for each in values)
    is_first = name not in seen
    if isinstance(output, Tensor) and is_first and has_experts:
        seen[name] = detached(ExpertCall(args, dict(kwargs), output))
    elif is_first:
        seen.setdefault(name, ExpertCall((), {}, None))


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
    own = dict(module.named_parameters())
    shared = ""
    for number in sorted((each for each in widths if each > max(1, highest)), reverse=True):
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
        return _checked(model, "routed", name, number, slots)
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
    if any(not each.ndim or each.shape[0] % number for each in module.parameters()):
        return None
    return _checked(model, "sorted", name, number, {"rows": rows[0], "sizes": sizes[0]})


def _checked(
    model: Module, kind: Kind, name: str, number: int, slots: Mapping[str, Slot]
) -> "Experts | str":
    """Return the experts, or why they cannot be divided."""
    module = model.get_submodule(name)
    inside = {id(each) for each in module.parameters()}
    prefix = f"{name}."
    for other, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in inside and not other.startswith(prefix):
            return f"its parameters are also {other!r}"
    for buffer_name, buffer in module.named_buffers():
        if buffer.ndim and buffer.shape[0] % number == 0:
            return f"the buffer {prefix + buffer_name!r} is as long as its experts are many"
    parameters = tuple(prefix + each for each, _ in module.named_parameters())
    counts = tuple(
        (f"{prefix}{path}".rstrip("."), key)
        for path, part in module.named_modules()
        for key, value in vars(part).items()
        if type(value) is int and value == number
    )
    return Experts(kind, name, number, parameters, slots, counts)


def _are_experts(
    module: Module, seen: Mapping[str, ExpertCall], name: str, found: Findings
) -> bool:
    """Whether a list holds as many equal modules as something was chosen from.

    Not blocks that are experts' neighbours: those of a list are leaves of what was found.
    """
    inside = [each for each in module.children() if next(each.parameters(), None) is not None]
    kinds = {(type(each), tuple(p.shape for p in each.parameters())) for each in inside}
    if len(inside) < 2 or len(kinds) > 1 or len(inside) not in found.widths:
        return False
    prefix = f"{name}."
    holds_others = any(
        each.startswith(prefix) for each in (*found.whole, *(e.name for e in found.experts))
    )
    return not holds_others


def _leave_nested(found: Findings) -> None:
    """Keep of modules that hold each other the inner one."""
    names = [each.name for each in found.experts]
    found.experts = [
        each for each in found.experts if not any(n.startswith(f"{each.name}.") for n in names)
    ]
    for name in list(found.whole):
        if any(each.startswith(f"{name}.") for each in names):
            del found.whole[name]
