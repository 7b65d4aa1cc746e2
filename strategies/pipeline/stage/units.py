"""Units: modules whose calls a stage runs or replaces as a whole.

``ReplacedForwards`` replaces units' forward for one run of the step. Parameters of other stages are
absent: they keep their places and shapes and have no memory.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch.nn import Module, Parameter
from typing_extensions import Self

from boltmesh.errors import ConfigError, UnsupportedError
from boltmesh.strategies.blocks import find_blocks, has_forward, is_torch_class
from boltmesh.strategies.torch_compat.modules import has_full_backward_hooks, is_compiled


def find_stage_units(root: Module) -> dict[str, Module]:
    """Return the units of a model by dotted name; no unit is within another one.

    Units are the repeated blocks, and every outermost other module with parameters that contains
    no block: embeddings, a final norm, a head. If that is one module, which has all layers, its
    layers are units. Modules without parameters are code between units, as is the step itself,
    except for layers with running statistics.
    """
    blocks = set(find_blocks(root).values())
    units = dict(_within(root, "", blocks, set()))
    while len(units) == 1:
        ((name, only),) = units.items()
        inner = dict(_within(only, f"{name}.", blocks, set()))
        if only in blocks or is_torch_class(only) or not inner:
            break
        units = inner
    return units


def unit_parameters(root: Module, units: dict[str, Module]) -> dict[str, frozenset[str]]:
    """Return the parameters of each unit, by their first names in ``root``."""
    names = {parameter: name for name, parameter in root.named_parameters()}
    return {
        unit: frozenset(names[parameter] for parameter in module.parameters())
        for unit, module in units.items()
    }


def _within(
    module: Module, prefix: str, blocks: set[Module], seen: set[Module]
) -> Iterator[tuple[str, Module]]:
    for name, child in module.named_children():
        if child in seen:
            continue
        seen.add(child)
        path = f"{prefix}{name}"
        holds_blocks = child not in blocks and any(each in blocks for each in child.modules())
        if holds_blocks or not has_forward(child):
            yield from _within(child, f"{path}.", blocks, seen)
        elif next(child.parameters(), None) is not None or _keeps_statistics(child):
            yield path, child


def _keeps_statistics(module: Module) -> bool:
    """Whether calls change its buffers: as code between units it would see placeholders."""
    return any(
        getattr(each, "track_running_stats", False) and next(each.buffers(), None) is not None
        for each in module.modules()
    )


def refuse_wrapped_calls(root: Module, units: Mapping[str, Module]) -> None:
    """Refuse modules whose calls do more than hooks around their forward.

    Raises:
        UnsupportedError: Naming the module.
    """
    inside = {each for unit in units.values() for each in unit.modules()} - set(units.values())
    for path, module in root.named_modules():
        name = path or type(root).__name__
        if is_compiled(module):
            raise UnsupportedError(
                f"{name!r} was compiled by its method compile(), and a pipeline runs layers on "
                f"tensors without data first, and on stages of its own. Leave compile() out, and "
                f"set compile_blocks=True instead."
            )
        if module not in inside and has_full_backward_hooks(module):
            raise UnsupportedError(
                f"{name!r} has a full backward hook, which changes what its stage is given. Put "
                f"the hook on a layer inside of it, or call register_hook on a tensor there."
            )


Forward = Callable[..., Any]
MISSING = object()


class Recorded(NamedTuple):
    """Output of a unit, with values that hooks of transformers within it record for the model."""

    output: Any
    lists: dict[str, list[Any]]
    """Recorded values, by kind such as ``router_logits``."""


def _records() -> dict[str, list[Any]]:
    """Return the lists to which hooks of transformers append, if a model records anything."""
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    records = None if collector is None else collector.get()
    return {} if records is None else {k: v for k, v in records.items() if isinstance(v, list)}


def with_records(forward: Forward) -> Forward:
    """Return a unit's forward that returns ``Recorded`` if hooks within it have recorded."""

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        lists = _records()
        before = {name: len(each) for name, each in lists.items()}
        output = forward(*args, **kwargs)
        made = {name: each[before[name] :] for name, each in lists.items()}
        for name, each in lists.items():
            del each[before[name] :]
        return Recorded(output, made) if any(made.values()) else output

    return call


def _without_records(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Call the replacement of a unit's forward, and record the values of its hooks."""
    result = forward(*args, **kwargs)
    if not isinstance(result, Recorded):
        return result
    lists = _records()
    for name, each in result.lists.items():
        lists[name].extend(each)
    return result.output


class ReplacedForwards:
    """A context in which ``forwards[name]`` replaces the forward of each unit.

    Values in a ``Recorded`` result are recorded for the model. Hooks run as usual. Replacements are
    attributes of the instances and are removed at the end, so copies, checkpoints and recomputation
    in the backward pass see the original modules. It may be entered repeatedly, for every
    microbatch, but not within itself.

    Args:
        units: Units by name.
        forwards: Replacements by name of the unit, called with the unit's arguments.
    """

    def __init__(self, units: Mapping[str, Module], forwards: Mapping[str, Forward]) -> None:
        self._units = units
        self._places = [
            (name, vars(units[name]), partial(_without_records, each))
            for name, each in forwards.items()
        ]
        self._before: dict[str, Any] = {}

    def own(self, name: str) -> Forward:
        """Return a unit's original forward, ``with_records``; to be called within the context."""
        before: Any = self._before[name]
        if before is not MISSING:
            return with_records(before)
        unit = self._units[name]
        attributes = vars(unit)
        replaced = attributes.pop("forward")
        try:
            return with_records(unit.forward)
        finally:
            attributes["forward"] = replaced

    def on_instances(self) -> dict[str, Any]:
        """Return forwards that units have as attributes of the instance, by name."""
        return {name: each for name, each in self._before.items() if each is not MISSING}

    def __enter__(self) -> Self:
        before = self._before
        for name, attributes, forward in self._places:
            before[name] = attributes.get("forward", MISSING)
            attributes["forward"] = forward
        return self

    def __exit__(self, *_: object) -> None:
        for name, attributes, _forward in self._places:
            before = self._before.pop(name)
            if before is MISSING:
                del attributes["forward"]
            else:
                attributes["forward"] = before


class AbsentError(ConfigError):
    """A step needs values that another rank holds. Not every rank of the pipeline raises it."""


def refuse_calls_outside(units: Mapping[str, Module]) -> None:
    """Make units of other ranks raise if they are called outside of a step.

    Within a step another function replaces their ``forward``.

    Args:
        units: Units by name.

    Raises:
        AbsentError: One is called, for example in a hook of the user; raised by that call.
    """
    for name, unit in units.items():
        if any(map(is_absent, unit.parameters())):
            unit.register_forward_pre_hook(_CallRefusal(name))


class _CallRefusal:
    """Forward pre-hook of a unit of another rank."""

    def __init__(self, name: str) -> None:
        self._name = name

    def of_its_kind(self) -> dict[str, Any]:
        """Return the state that matters when it does not raise; see ``unit_outputs.py``."""
        return {}

    def __call__(self, module: Module, _: Any) -> None:
        if "forward" not in vars(module) and any(map(is_absent, module.parameters())):
            raise AbsentError(
                f"{self._name!r} is called outside of the steps that a pipeline runs, and another "
                f"rank has its parameters: it would give NaN. Call it in validation_step, "
                f"test_step or predict_step, or on all ranks within gathered_parameters(module)."
            )


def explain_write(error: BaseException) -> None:
    """Add advice to torch's error for a write to a parameter of another rank."""
    text = str(error)
    if isinstance(error, RuntimeError) and _WRITTEN in text and _SAYS not in text:
        advice = (
            f"A parameter that another rank of the pipeline has was written to, in a hook or a "
            f"step. Write to it on all ranks inside of "
            f"boltmesh.strategies.gathered_parameters(module, writes=True), or use a strategy "
            f"without a pipeline. {_SAYS} {text}"
        )
        error.args = (advice,)


_WRITTEN = "more than one element of the written-to tensor refers to a single memory location"
_SAYS = "torch says:"


def make_absent(parameters: Iterable[Parameter], device: torch.device | None = None) -> None:
    """Free the memory of parameters that another stage holds.

    They stay the same objects of the same shape and dtype, in their modules and in optimizers. All
    elements share one element of memory, NaN if the dtype has it: an unexpected use shows in the
    loss, and an optimizer finds no gradient and skips them.

    Args:
        parameters: Parameters of any shape; they may be absent already.
        device: Their new device, by default the current one. Moving them by torch would allocate
            all of their elements.
    """
    for parameter in parameters:
        parameter.data = one_element(parameter.shape, parameter.dtype, device or parameter.device)
        parameter.grad = None


def one_element(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of this shape with one element of memory: NaN if the dtype has it, or 0."""
    fill = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), fill, dtype=dtype, device=device).expand(shape)


def is_absent(parameter: torch.Tensor) -> bool:
    """Whether another stage holds a parameter, of any shape, and this one has no values of it."""
    if parameter.is_meta:  # no rank holds it yet
        return False
    if parameter.untyped_storage().nbytes() != parameter.element_size():
        return False
    return parameter.numel() > 1 or bool(parameter.isnan().all())


def outside_of(root: Module, units: Iterable[Module]) -> dict[str, Module]:
    """Return the modules outside of units, by dotted name."""
    inside = {part for unit in units for part in unit.modules()}
    return {name: each for name, each in root.named_modules() if each not in inside}
