"""Tries a user's optimizer on small parameters, to find what the step of an element depends on.

The optimizer itself, its state and the run's random states do not change.

Each function compares trials of some steps with the same values and gradients:

``mixes_elements``: steps of the two halves of a parameter are not the halves of its step. Muon
and Shampoo need full matrices, LARS and LAMB norms of full parameters, Adafactor rows and columns;
optimizers that mix parameters mix halves too. Tensor ranks and offload then step whole parameters.

``mixes_parameters``: the step of one parameter depends on another one: Prodigy, D-Adaptation, SAM,
an Adam that clips by its own norm. A pipeline refuses them: a rank has only its stages.

``matrix_use``: the step multiplies or factors matrices. torch would gather shards for that, in an
order and precision that depend on the number of ranks. ZeRO then steps whole parameters.

``shard_mismatch``: steps of DTensor shards fail, or are not the shards of the step. Norms and sums
of DTensors are those of the whole; flat views, items and rows often are not. ZeRO then steps whole
parameters.

``needs_all_ranks``: the step calls collectives itself, or draws random numbers. Refused where
each rank steps whole parameters that only it owns.

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
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn import Parameter
from torch.optim import Optimizer

from boltmesh.errors import UnsupportedError
from boltmesh.strategies.random_state import random_state_unchanged
from boltmesh.strategies.torch_compat.optimizers import bare_copy, step_without_hooks
from boltmesh.strategies.torch_compat.tensors import OperatorsSeen

_SHAPES = ((4, 6), (6, 4), (8,))
_STEPS = 64
"""Enough for estimates that start low, and for what is done in every tenth step."""

_WIDE, _FEW_STEPS = (130, 132), 3
"""Shape and steps for optimizers that only factor large matrices, as some forms of Adafactor."""

_SIZES = (1.0,) * 56 + (1e3, 1e-3) * 4
"""Factor of the gradients, for each step."""

_RATE = 1e-2
_ROUNDING = 1e-7
"""Tolerance of steps in double precision, relative to the largest element."""

_OTHER = 1000.0
"""Factor of the gradients of other parameters, to find whether a step depends on them."""


_MIX_PARAMETERS = {"LBFGS": "takes products of whole gradients"}
"""Optimizers of torch, which need no trial, and what they do."""

_MIX_ELEMENTS = _MIX_PARAMETERS | {
    "Adafactor": "squares norms of rows in place",
    "Muon": "makes whole matrices orthogonal",
}


def find_mixing(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return the optimizers that step parts of parameters differently from the whole.

    Raises:
        UnsupportedError: Naming an optimizer that cannot step whole parameters one by one.
    """
    mixing = [each for each in optimizers if mixes_elements(each)]
    for optimizer in mixing:
        why = needs_all_ranks(optimizer)
        if why is None and mixes_parameters(optimizer):
            why = "steps by all gradients at once, of which a tensor rank has parts"
        if why is not None:
            raise UnsupportedError(
                f"{type(optimizer).__name__} {why}. Use bolt_ddp, or an optimizer that works on "
                f"each element by itself, such as AdamW."
            )
    return mixing


def mixes_elements(optimizer: Optimizer) -> bool:
    """Whether steps of two halves of a parameter differ from the halves of its step.

    True if it cannot be tried, since it does not work on small matrices: then whole parameters are
    stepped, which is always right. One that steps another optimizer is then judged by that one.
    """

    def differs_in(group: _Group, leaves: list[_Leaf], steps: int = _STEPS) -> bool:
        whole = _run(group, leaves, steps)
        halves = [_run(group, [leaf.half(at) for leaf in leaves], steps) for at in range(2)]
        return not all(
            _is_near(torch.cat(parts, leaf.dim + 1), change)
            for leaf, change, *parts in zip(leaves, whole, *halves, strict=True)
        )

    def differs(group: _Group) -> bool:
        wide = _leaves([_WIDE], group.is_matrices)
        return differs_in(group, group.leaves) or differs_in(group, wide, _FEW_STEPS)

    return _is_any(optimizer, differs, mixes_elements, _MIX_ELEMENTS, untried=True)


def mixes_parameters(optimizer: Optimizer) -> bool:
    """Whether a parameter's step depends on the gradient or the value of another one.

    False if it cannot be tried, as with ``mixes_elements``.
    """

    def differs(group: _Group) -> bool:
        first, *others = group.leaves
        changed = [each.otherwise() for each in others]
        return not _is_near(_run(group, [first, *changed])[0], _run(group, group.leaves)[0])

    return _is_any(optimizer, differs, mixes_parameters, _MIX_PARAMETERS)


def matrix_use(optimizer: Optimizer) -> str | None:
    """Return what a step needs whole matrices for, None if no use was found.

    The reason is part of a sentence for a message: "multiplies or factors whole matrices".
    """

    def multiplies(group: _Group) -> bool:
        seen = OperatorsSeen(_is_product)
        try:
            with seen:
                _run(group, [each for each in group.leaves if each.value.dim() > 1])
        except Exception:
            if not seen.is_any:
                raise
        return seen.is_any

    def inner(optimizer: Optimizer) -> bool:
        return matrix_use(optimizer) is not None

    if not _is_any(optimizer, multiplies, inner, _MIX_ELEMENTS):
        return None
    return _known(optimizer, _MIX_ELEMENTS) or "multiplies or factors whole matrices"


def shard_mismatch(
    optimizer: Optimizer, mesh: DeviceMesh, placements: Sequence[Placement]
) -> str | None:
    """Return why steps of shards are not the shards of the step; None if they are.

    Collective over ``mesh``; every rank returns the same. Also None if it cannot be tried on small
    matrices.
    """
    why: list[str] = []

    def fails(group: _Group) -> bool:
        ranks = mesh.size()
        rows = 3 * ranks - 1  # the last rank has fewer, and none has no row
        many = max(3, -(-_WIDE[0] // ranks)) * ranks - 1
        even = 2 * ranks  # a mean over shards of one size is another kind of sum to DTensor
        shapes = (
            (((rows, 6), (rows, 4), (rows,)), _STEPS),
            (((many, _WIDE[1]),), _FEW_STEPS),
            (((even, 6), (even,)), _FEW_STEPS),
        )
        for several, steps in shapes:
            leaves = _leaves(several, group.is_matrices, mesh.device_type)
            whole = _run(group, leaves, steps)
            try:
                parts = _run(group, [each.shard(mesh, placements) for each in leaves], steps)
                if not all(_is_near(one, other) for one, other in zip(parts, whole, strict=True)):
                    why.append("steps shards differently from whole parameters")
            except Exception:  # noqa: BLE001 - whatever its step raises
                why.append("computes with whole parameters, and fails on shards")
            if why:
                return True
        return False

    def inner(optimizer: Optimizer) -> bool:
        mismatch = shard_mismatch(optimizer, mesh, placements)
        why.extend([mismatch] if mismatch else [])
        return mismatch is not None

    _is_any(optimizer, fails, inner, {})
    return why[0] if why else None


def needs_all_ranks(optimizer: Optimizer) -> str | None:
    """Return why ranks cannot step different parameters; None if they can.

    Some forms of Muon call collectives in their step, and other optimizers draw random numbers,
    which would differ by rank.
    """
    own = set(map(id, optimizer.param_groups))
    stepped = (group for each in inner_optimizers(optimizer) for group in each.param_groups)
    if any(id(group) not in own for group in stepped):
        return "steps other optimizers, which have parameter groups of their own"
    reasons = {
        "communicates in its step, and ranks step other parameters here": _is_collective,
        "draws random numbers in its step, and ranks step other parameters here": _is_random,
    }

    def runs(is_one: Callable[[Any], bool], group: _Group) -> bool:
        seen, leaves = OperatorsSeen(is_one), group.leaves
        with seen:
            _run(group, leaves)
        return seen.is_any

    for why, is_one in reasons.items():
        of_inner: Any = needs_all_ranks
        if _is_any(optimizer, partial(runs, is_one), of_inner, {}):
            return why
    return None


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


def _is_any(
    optimizer: Optimizer,
    question: Callable[["_Group"], bool],
    of_inner: Callable[[Optimizer], bool],
    known: Mapping[str, str],
    *,
    untried: bool = False,
) -> bool:
    """Return the answer of a trial for any group; torch's own optimizers are looked up instead.

    If it cannot be tried, the optimizers that it steps inside are asked; without any the answer is
    ``untried``.
    """
    if _known(optimizer, known) is not None:
        return True
    if type(optimizer).__module__.startswith("torch.") or not hasattr(optimizer, "param_groups"):
        return False
    try:
        with random_state_unchanged():
            return any(map(question, _groups(optimizer)))
    except Exception:  # noqa: BLE001 - it needs other parameters, as a real step will show
        inner = inner_optimizers(optimizer)
        return any(map(of_inner, inner)) if inner else untried


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that another one has as attributes, or in lists or dicts."""
    found = (each for value in vars(optimizer).values() for each in (value, *_held(value)))
    return [each for each in found if isinstance(each, Optimizer)]


def _held(value: Any) -> Iterable[Any]:
    """Return the members of a list, tuple, set or dict; nothing for other values."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple, set)) else ()


def _known(optimizer: Optimizer, known: Mapping[str, str]) -> str | None:
    kinds = [each for each in type(optimizer).__mro__ if each.__module__.startswith("torch.")]
    return next((known[each.__name__] for each in kinds if each.__name__ in known), None)


@dataclass(frozen=True)
class _Leaf:
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

    def half(self, which: int) -> "_Leaf":
        def cut(value: Tensor, dim: int) -> Tensor:
            return value.chunk(2, dim)[which].contiguous()

        dim = self.dim
        return _Leaf(cut(self.value, dim), cut(self.lasting, dim), cut(self.changing, dim + 1))

    def shard(self, mesh: DeviceMesh, placements: Sequence[Placement]) -> "_Leaf":
        def cut(value: Tensor) -> Tensor:
            return distribute_tensor(value, mesh, placements, src_data_rank=None)

        rows = [cut(each) for each in self.changing]
        return _Leaf(cut(self.value), cut(self.lasting), rows)  # type: ignore[arg-type]

    def otherwise(self) -> "_Leaf":
        """Return a parameter of the same shape with other values and gradients."""
        changing = _OTHER * self.changing.roll(1, 0)
        return _Leaf(2 * self.value.flip(0), -_OTHER * self.lasting.flip(0), changing)


def _leaves(
    shapes: Iterable[Sequence[int]], is_matrices: bool, device: torch.device | str = "cpu"
) -> list[_Leaf]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.to(device)

    return [
        _Leaf(
            draw(*shape),
            draw(*shape) * (2 * draw(*shape)).exp(),
            draw(_STEPS, *shape) * draw(*shape).exp(),
        )
        for shape in shapes
        if len(shape) > 1 or not is_matrices
    ]


@dataclass(frozen=True)
class _Group:
    """One of an optimizer's groups, to be tried on small parameters."""

    optimizer: Optimizer
    settings: Mapping[str, Any]
    is_matrices: bool
    """Some optimizers accept only matrices."""
    starts: Mapping[str, Any] | None = None
    """State of one of its parameters at the beginning."""

    @property
    def leaves(self) -> list[_Leaf]:
        return _leaves(_SHAPES, self.is_matrices)


def _groups(optimizer: Optimizer) -> Iterator[_Group]:
    """Yield each group whose settings differ by more than the values of floats."""
    seen = set()
    for group in optimizer.param_groups:
        is_matrices = min((each.dim() for each in group["params"]), default=1) > 1
        settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        kind = {k: bool(v) if isinstance(v, float) else v for k, v in settings.items()}
        key = repr((is_matrices, kind))
        if key not in seen:
            seen.add(key)
            trial = _Group(optimizer, settings, is_matrices)
            yield from [trial] if _runs(trial) else _with_states(trial, group["params"])


def _runs(group: _Group) -> bool:
    try:
        _run(group, group.leaves)
    except Exception:  # noqa: BLE001 - it may need the state that it has made with itself
        return False
    return True


def _with_states(group: _Group, parameters: Iterable[Parameter]) -> Iterator[_Group]:
    """Yield the group once for each kind of state that its parameters have at the beginning."""
    kinds: dict[str, tuple[Mapping[str, Any], list[int]]] = {}
    for each in parameters:
        starts = group.optimizer.state.get(each, {})
        plain = {k: v for k, v in starts.items() if isinstance(v, (bool, int, str))}
        kinds.setdefault(repr(plain), (starts, []))[1].append(each.dim())
    for starts, dims in kinds.values():
        yield replace(group, is_matrices=min(dims) > 1, starts=starts)


def _run(group: _Group, leaves: Sequence[_Leaf], steps: int = _STEPS) -> list[Tensor]:
    """Return the change of each parameter since the beginning, after each step: ``(steps, ...)``.

    Raises:
        Exception: Whatever the optimizer's step raises.
    """
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
        step(runner, closure=evaluate)
        for change, leaf, parameter in zip(changes, leaves, parameters, strict=True):
            change.append(_full(parameter.detach() - leaf.value))
    return [torch.stack(change) for change in changes]


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
    runner = bare_copy(optimizer)
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


def _is_near(one: Tensor, other: Tensor) -> bool:
    """Whether changes agree after each step, relative to their size, until one is not finite."""
    sizes = other.abs().flatten(1).amax(1)
    for here, there, size in zip(one, other, sizes.tolist(), strict=True):
        if not math.isfinite(size):
            break
        if not torch.allclose(here, there, rtol=0, atol=_ROUNDING * size):
            return False
    return True


_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "cholesky", "inverse", "matrix_exp"}
_FACTORS = ("linalg_", "_linalg_")
_NORMS = {"linalg_vector_norm"}


def _is_collective(func: Any) -> bool:
    return func.namespace in {"c10d", "_c10d_functional"}


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _is_product(func: Any) -> bool:
    name: str = func.overloadpacket.__name__
    return name in _PRODUCTS or (name.startswith(_FACTORS) and name not in _NORMS)
