"""Trials of a user's optimizer on small parameters, without a change of it, its state or others.

A ``Group`` is one of its groups; ``run_trial`` returns how small parameters change in some steps.

[Note: Gradients of a trial]
Gradients are the sum of a constant and a changing part, whose signs and sizes differ by
element. If all gradients had the same sign, Prodigy's estimates would be the same for every part;
without a constant part they would not change at all. Later steps have gradients a thousand times
larger and smaller, for limits that apply above or below a norm.
"""

import copy
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.strategies.pytree import CONSTANTS
from boltmesh.strategies.random_state import random_state_unchanged
from boltmesh.strategies.torch_compat.optimizers import (
    bare_copy,
    own_attributes,
    plain_settings,
    restore_plain_settings,
    step_without_hooks,
)

_SHAPES = ((4, 6), (6, 4), (8,))
STEPS = 64
"""Enough for estimates that start low, and for what is done in every tenth step."""

WIDE, FEW_STEPS = (130, 132), 3
"""Shape and steps for optimizers that only factor large matrices, as some forms of Adafactor."""

_SIZES = (1.0,) * 56 + (1e3, 1e-3) * 4
"""Factor of the gradients, for each step."""

_RATE = 1e-2
_ROUNDING = 1e-7
"""Tolerance of steps in double precision, relative to the largest element."""

_OTHER = 1000.0
"""Factor of the gradients of other parameters, to find whether a step depends on them."""


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that another one has as attributes, or in lists or dicts."""
    found = (each for value in vars(optimizer).values() for each in (value, *_held(value)))
    return [each for each in found if isinstance(each, Optimizer)]


def _held(value: Any) -> Iterable[Any]:
    """Return the members of a list, tuple, set or dict; nothing for other values."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple, set)) else ()


def initial_state(like: Mapping[str, Any], parameter: Tensor) -> dict[str, Any] | None:
    """Return the state that an optimizer such as Adagrad creates in its constructor.

    Args:
        like: State of another parameter, of any shape; may be empty.
        parameter: The parameter that the state is for.

    Returns:
        Tensors with the shape and dtype of ``parameter``, filled with the first element of those in
        ``like``; other values are copied. None if ``like`` is empty.
    """
    if not like:
        return None
    made = {}
    for name, value in like.items():
        # A parameter without dimensions may be the first; its state is a DTensor as it is itself.
        if isinstance(value, Tensor) and (value.dim() > 0 or isinstance(value, DTensor)):
            first = value.to_local() if isinstance(value, DTensor) else value
            fill = first.flatten()[0].item() if first.numel() else 0.0
            made[name] = torch.full_like(parameter, fill)
        else:
            made[name] = copy.deepcopy(value)
    return made


@dataclass(frozen=True)
class Leaf:
    """A small parameter: its value, and the constant and the changing part of its gradients."""

    value: Tensor
    lasting: Tensor
    changing: Tensor
    """``(steps, ...)``: one for each step."""

    @property
    def dim(self) -> int:
        """The dim that is halved: the first of a wide matrix, the second of a tall one."""
        shape = self.value.shape
        return 0 if len(shape) == 1 or shape[0] < shape[1] else 1

    def gradient(self, step: int, at: Tensor) -> Tensor:
        """Return the gradient of a step at a value, which pulls it back a little."""
        return _SIZES[step] * (self.lasting + self.changing[step] + 0.1 * (at - self.value))

    def half(self, which: int) -> "Leaf":
        """Return one of its two halves."""

        def cut(value: Tensor, dim: int) -> Tensor:
            return value.chunk(2, dim)[which].contiguous()

        dim = self.dim
        return Leaf(cut(self.value, dim), cut(self.lasting, dim), cut(self.changing, dim + 1))

    def shard(self, mesh: DeviceMesh, placements: Sequence[Placement]) -> "Leaf":
        """Return this rank's shard. Collective over the mesh."""

        def cut(value: Tensor) -> Tensor:
            return distribute_tensor(value, mesh, placements, src_data_rank=None)

        rows = [cut(each) for each in self.changing]
        return Leaf(cut(self.value), cut(self.lasting), rows)  # type: ignore[arg-type]

    def otherwise(self) -> "Leaf":
        """Return a parameter of the same shape with other values and gradients."""
        changing = _OTHER * self.changing.roll(1, 0)
        return Leaf(2 * self.value.flip(0), -_OTHER * self.lasting.flip(0), changing)


def draw_leaves(
    shapes: Iterable[Sequence[int]], is_matrices: bool, device: torch.device | str = "cpu"
) -> list[Leaf]:
    """Return small parameters of some shapes, those with fewer dims only if not ``is_matrices``."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.to(device)

    return [
        Leaf(
            draw(*shape),
            draw(*shape) * (2 * draw(*shape)).exp(),
            draw(STEPS, *shape) * draw(*shape).exp(),
        )
        for shape in shapes
        if len(shape) > 1 or not is_matrices
    ]


@dataclass(frozen=True)
class Group:
    """One of an optimizer's groups, to be tried on small parameters."""

    optimizer: Optimizer
    settings: Mapping[str, Any]
    is_matrices: bool
    """Some optimizers accept only matrices."""
    starts: Mapping[str, Any] | None = None
    """State of one of its parameters at the beginning."""

    @property
    def leaves(self) -> list[Leaf]:
        """A wide and a tall matrix and, unless it accepts only matrices, a vector."""
        return draw_leaves(_SHAPES, self.is_matrices)


def kinds_of_groups(optimizer: Optimizer) -> Iterator[Group]:
    """Yield each group whose settings differ by more than the values of floats."""
    seen = set()
    for group in optimizer.param_groups:
        is_matrices = min((each.dim() for each in group["params"]), default=1) > 1
        settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        kind = {k: bool(v) if isinstance(v, float) else v for k, v in settings.items()}
        key = repr((is_matrices, kind))
        if key not in seen:
            seen.add(key)
            trial = Group(optimizer, settings, is_matrices)
            yield from [trial] if _runs(trial) else _with_states(trial, group["params"])


def _runs(group: Group) -> bool:
    try:
        run_trial(group, group.leaves)
    except Exception:  # noqa: BLE001 - it may need the state that it has made with itself
        return False
    return True


def _with_states(group: Group, parameters: Iterable[Parameter]) -> Iterator[Group]:
    """Yield the group once for each kind of state that its parameters have at the beginning."""
    kinds: dict[str, tuple[Mapping[str, Any], list[int]]] = {}
    for each in parameters:
        starts = group.optimizer.state.get(each, {})
        plain = {k: v for k, v in starts.items() if isinstance(v, (bool, int, str))}
        kinds.setdefault(repr(plain), (starts, []))[1].append(each.dim())
    for starts, dims in kinds.values():
        yield replace(group, is_matrices=min(dims) > 1, starts=starts)


def run_trial(group: Group, leaves: Sequence[Leaf], steps: int = STEPS) -> list[Tensor]:
    """Return the change of each parameter since the beginning, after each step: ``(steps, ...)``.

    Raises:
        Exception: Whatever the optimizer's step raises.
    """
    return _run(group, leaves, steps, _step_at_once)[0]


def steps_one_by_one(group: Group) -> bool:
    """Whether steps of one parameter after the other are one step of all.

    Plain settings of the group are restored between them. Attributes are compared, too: a counter
    of steps may show after more of them than are tried.

    Raises:
        Exception: Whatever the optimizer's step raises, also without parameters.
    """
    at_once, attributes_at_once = _run(group, group.leaves, STEPS, _step_at_once)
    apart, attributes_apart = _run(group, group.leaves, STEPS, _step_one_by_one)
    is_counted_once = _is_equal(*map(_comparable, (attributes_at_once, attributes_apart)))
    return is_counted_once and all(map(is_near, apart, at_once))


def calls_evenly(optimizer: Optimizer) -> bool:
    """Whether each call of a step calls the same inner optimizers, and counts nothing.

    Inner optimizers are replaced by some that only note the call. False if that fails, or if it
    has attributes that it may change, such as schedulers.
    """
    called: list[Optimizer] = []

    def replaced(value: Any) -> Any:
        if isinstance(value, Optimizer):
            return _Noting(value, called)
        if isinstance(value, dict):
            return {key: replaced(each) for key, each in value.items()}
        return type(value)(map(replaced, value)) if type(value) in {list, tuple} else value

    step: Any = step_without_hooks(optimizer)
    try:
        before = _comparable(own_attributes(optimizer))
        runner = _copied(optimizer)
        vars(runner).update({k: replaced(each) for k, each in own_attributes(optimizer).items()})
        runner.param_groups, runner.state = _emptied(optimizer), defaultdict(dict)
        calls = []
        with random_state_unchanged():
            for _ in range(STEPS):
                called.clear()
                step(runner)
                calls.append(list(map(id, called)))
        after = _comparable(own_attributes(runner))
    except Exception:  # noqa: BLE001 - whatever its step raises without parameters
        return False
    return all(each == calls[0] for each in calls) and _is_equal(after, before)


class _Noting(Optimizer):
    """Notes each step instead of an inner optimizer, of which it has the groups, empty."""

    def __init__(self, inner: Optimizer, called: list[Optimizer]) -> None:
        self.param_groups, self.state = _emptied(inner), defaultdict(dict)
        self.inner, self._called = inner, called

    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._called.append(self.inner)


def _emptied(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{**group, "params": []} for group in optimizer.param_groups]


def _comparable(value: Any) -> list[Any]:
    """Return the values in an optimizer's attributes, and in those of inner ones, in order.

    Raises:
        TypeError: An attribute is neither a value nor holds values: it may count on its own.
    """
    if isinstance(value, (dict, list, tuple)):
        members = value.values() if isinstance(value, dict) else value
        return [each for member in members for each in _comparable(member)]
    if isinstance(value, Optimizer):
        return _comparable(own_attributes(value.inner if isinstance(value, _Noting) else value))
    if isinstance(value, Tensor) and not isinstance(value, Parameter):
        return [value.detach().clone()]
    if isinstance(value, (*CONSTANTS, np.generic)):
        return [value]
    raise TypeError(f"{type(value).__name__} may change in a step")


def _is_equal(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether values are equal, those of floats up to rounding."""
    return len(some) == len(others) and all(map(_is_same_value, some, others))


def _is_same_value(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.allclose(one, other)
    if isinstance(one, (float, np.floating)) and isinstance(other, (float, np.floating)):
        return math.isclose(one, other, rel_tol=_ROUNDING)
    return bool(one == other)


def _run(
    group: Group,
    leaves: Sequence[Leaf],
    steps: int,
    make_step: Callable[[Optimizer, Callable[..., Any], Callable[[], Tensor]], None],
) -> tuple[list[Tensor], dict[str, Any]]:
    """Return changes as ``run_trial`` does, and the optimizer's attributes after the steps."""
    torch.default_generator.manual_seed(0)  # some optimizers draw random numbers
    np.random.seed(0)
    random.seed(0)
    parameters = [Parameter(each.value.clone()) for each in leaves]
    runner = _small(group.optimizer, group.settings, parameters)
    if callable(start := getattr(runner, "train", None)):
        start()  # schedule-free optimizers step in this mode alone
    if group.starts:
        runner.state.update({p: initial_state(group.starts, p.detach()) for p in parameters})
    step: Any = step_without_hooks(group.optimizer)
    changes: list[list[Tensor]] = [[] for _ in leaves]
    for number in range(steps):
        at = [torch.full_like(each, torch.nan) for each in parameters]

        def evaluate(number: int = number, at: list[Tensor] = at) -> Tensor:
            """As Lightning's closure: set gradients at the current values, if those changed."""
            for leaf, parameter, last in zip(leaves, parameters, at, strict=True):
                now = parameter.detach()
                if not _is_same(now, last):
                    parameter.grad = leaf.gradient(number, now)
                    last.copy_(now)
            return torch.ones((), dtype=torch.float64)

        evaluate()
        make_step(runner, step, evaluate)
        for change, leaf, parameter in zip(changes, leaves, parameters, strict=True):
            change.append(_full(parameter.detach() - leaf.value))
    return [torch.stack(change) for change in changes], own_attributes(runner)


def _step_at_once(
    runner: Optimizer, step: Callable[..., Any], closure: Callable[[], Tensor]
) -> None:
    step(runner, closure=closure)


def _step_one_by_one(
    runner: Optimizer, step: Callable[..., Any], closure: Callable[[], Tensor]
) -> None:
    """Step parameters one after the other, between steps without parameters."""
    (group,) = runner.param_groups
    parameters, before = group["params"], plain_settings(group)
    for each in parameters:
        for own in ([], [each]):
            restore_plain_settings(group, before)
            group["params"] = own
            step(runner, closure=closure)
    group["params"] = parameters


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _is_same(one: Tensor, other: Tensor) -> bool:
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        return torch.equal(one.to_local(), other.to_local())
    return torch.equal(one, other)


def _small(
    optimizer: Optimizer, settings: Mapping[str, Any], parameters: Sequence[Parameter]
) -> Optimizer:
    """Return an optimizer of the same kind for other parameters, with those it steps inside."""
    for name, value in vars(optimizer).items():
        if any(isinstance(each, (Parameter, Optimizer)) for each in _held(value)):
            raise ValueError(f"{name} holds what a trial must not change")
    runner = _copied(optimizer)
    own = copy.deepcopy(dict(settings))
    if not own.get("lr", 1):
        own["lr"] = _RATE  # a schedule may begin with 0
    runner.param_groups = [{**own, "params": list(parameters)}]
    runner.state = defaultdict(dict)
    for name, value in list(vars(runner).items()):
        if isinstance(value, Optimizer):
            vars(runner)[name] = _small_inner(optimizer, value, runner)
        elif name.startswith("_optimizer_") and name.endswith("_hooks"):
            value.clear()
    return runner


def _copied(optimizer: Optimizer) -> Optimizer:
    """Return a copy whose tensors, lists and dicts may change."""
    made = bare_copy(optimizer)
    tensors = {k: v.detach().clone() for k, v in vars(made).items() if isinstance(v, Tensor)}
    vars(made).update(tensors)
    return made


def _small_inner(outer: Optimizer, inner: Optimizer, runner: Optimizer) -> Optimizer:
    """Return a small copy of an inner optimizer, over the groups and state of ``runner``."""
    (group,) = runner.param_groups
    own = {k: v for k, v in inner.param_groups[0].items() if k not in ("params", "param_names")}
    made = _small(inner, own, group["params"])
    if inner.param_groups is outer.param_groups:
        made.param_groups = runner.param_groups
    if inner.state is outer.state:
        made.state = runner.state
    return made


def is_near(one: Tensor, other: Tensor) -> bool:
    """Whether changes agree after each step, relative to their size, until one is not finite."""
    sizes = other.abs().flatten(1).amax(1)
    for here, there, size in zip(one, other, sizes.tolist(), strict=True):
        if not math.isfinite(size):
            break
        if not torch.allclose(here, there, rtol=0, atol=_ROUNDING * size):
            return False
    return True
