"""Units: modules whose calls a stage runs or leaves out as a whole, and what replaces the others.

``ReplacedForwards`` takes the place of units' forward for as long as one run of the step lasts.
Parameters of other stages are absent: in their places, of their shapes, without their memory.
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
from boltmesh.strategies.blocks import find_blocks, has_forward
from boltmesh.strategies.torch_compat.modules import has_full_backward_hooks, is_compiled


def find_stage_units(root: Module) -> dict[str, Module]:
    """Return what may be given to stages, by dotted name: no unit lies within another one.

    Units are the repeated blocks, and every outermost other module with parameters that holds no
    block: embeddings, a final norm, a head. What has no parameters is code between units, as the
    step itself is, but for layers that keep running statistics.
    """
    blocks = set(find_blocks(root).values())
    return dict(_within(root, "", blocks, set()))


def unit_parameters(root: Module, units: dict[str, Module]) -> dict[str, frozenset[str]]:
    """Return which parameters each unit holds, by their first names in ``root``."""
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
    """Whether calls change its buffers: left to every stage, it would see what none computed."""
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
    """By what was asked for, such as ``router_logits``."""


def _records() -> dict[str, list[Any]]:
    """Return the lists to which hooks of transformers append, if a model records anything."""
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    found = None if collector is None else collector.get()
    return {} if found is None else {k: v for k, v in found.items() if isinstance(v, list)}


def with_records(forward: Forward) -> Forward:
    """Return a unit's forward that gives ``Recorded`` where hooks within it have recorded."""

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
    """Call what replaces a unit's forward, and record what its hooks would have."""
    result = forward(*args, **kwargs)
    if not isinstance(result, Recorded):
        return result
    lists = _records()
    for name, each in result.lists.items():
        lists[name].extend(each)
    return result.output


class ReplacedForwards:
    """Within it, ``forwards[name]`` is called instead of the forward of each unit.

    What it gives as ``Recorded`` is recorded for the model. Hooks run as ever. They stand on the
    instances and are taken back at the end, so copies, checkpoints and recomputation in the
    backward pass meet the modules as they are. It may be entered again and again, for every
    microbatch, but not within itself.

    Args:
        units: By name.
        forwards: By names of units; called with what the unit is called with.
    """

    def __init__(self, units: Mapping[str, Module], forwards: Mapping[str, Forward]) -> None:
        self._units = units
        self._places = [
            (name, vars(units[name]), partial(_without_records, each))
            for name, each in forwards.items()
        ]
        self._before: dict[str, Any] = {}

    def own(self, name: str) -> Forward:
        """Return the forward that a unit has by itself, ``with_records``; to be called within."""
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
        """Return what units have as a forward of their own, not their class's, by name."""
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
    """A step asks for values that another rank holds. Not every rank of the pipeline raises it."""


def refuse_calls_outside(units: Mapping[str, Module]) -> None:
    """Let units whose values another rank has raise where no step calls them.

    Within a step another function stands in the place of their ``forward``.

    Args:
        units: By name.

    Raises:
        AbsentError: When one is called, in a hook of the user's say.
    """
    for name, unit in units.items():
        if any(map(is_absent, unit.parameters())):
            unit.register_forward_pre_hook(_CallRefusal(name))


class _CallRefusal:
    """A hook of a unit whose values another rank has."""

    def __init__(self, name: str) -> None:
        self._name = name

    def of_its_kind(self) -> dict[str, Any]:
        """Return what decides what it does where it raises nothing."""
        return {}

    def __call__(self, module: Module, _: Any) -> None:
        if "forward" not in vars(module) and any(map(is_absent, module.parameters())):
            raise AbsentError(
                f"{self._name!r} is called outside of the steps that a pipeline runs, and another "
                f"rank has its parameters: it would give NaN. Call it in validation_step, "
                f"test_step or predict_step, or on all ranks within gathered_parameters(module)."
            )


def explain_write(error: BaseException) -> None:
    """Say what to do where torch refuses to write to a parameter that another rank has."""
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

    They stay the same objects of the same shape and type, in their modules and in optimizers. All
    elements are one element in memory, NaN where the type has it: an unforeseen use is seen
    in the loss, and an optimizer finds no gradient and leaves them alone.

    Args:
        parameters: They may be absent already.
        device: Where they are to seem to be, by default where they are. Moving them as torch does
            would give them the memory of all their elements.
    """
    for parameter in parameters:
        parameter.data = one_element(parameter.shape, parameter.dtype, device or parameter.device)
        parameter.grad = None


def one_element(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor whose elements are one element in memory: NaN where the type has it."""
    fill = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), fill, dtype=dtype, device=device).expand(shape)


def is_absent(parameter: torch.Tensor) -> bool:
    """Whether another stage holds the parameter, and this one only its shape."""
    if parameter.is_meta:  # no rank holds it yet
        return False
    if parameter.untyped_storage().nbytes() != parameter.element_size():
        return False
    return parameter.numel() > 1 or bool(parameter.isnan().all())


def outside_of(root: Module, units: Iterable[Module]) -> dict[str, Module]:
    """Return the modules that lie in no unit, by dotted name."""
    inside = {part for unit in units for part in unit.modules()}
    return {name: each for name, each in root.named_modules() if each not in inside}
