"""Proves before the first step that experts give equal results with exchanged rows.

For the first module of each kind, its first call of the recorded step is repeated on every rank,
with all experts on the rank and with exchanged rows. The output, the gradients of rows and weights,
and those of each rank's experts (summed over the ranks that sent rows) have to be equal. Each rank
leaves out a different number of rows, so that parts of different sizes are exchanged.

A rank with an error in the user's code, in the forward or the backward pass, still takes part in
the exchange, in which the others wait.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module
from typing_extensions import override

from boltmesh.strategies.deferred_initialization.materialize import broadcast_tensors
from boltmesh.strategies.dry_run.no_side_effects import modules_unchanged
from boltmesh.strategies.dry_run.step import without_dropout
from boltmesh.strategies.expert.divided import DividedExperts
from boltmesh.strategies.expert.exchange import with_unused
from boltmesh.strategies.expert.find import ExpertCall, Experts, arguments, detached
from boltmesh.strategies.expert.module_list import DividedList, divide
from boltmesh.strategies.object_collectives import gather_objects
from boltmesh.strategies.patch import patched
from boltmesh.strategies.random_state import (
    capture_random_state,
    random_state_unchanged,
    restore_random_state,
)
from boltmesh.strategies.torch_compat.modules import swapped_state
from boltmesh.strategies.torch_compat.tensors import tree_leaves, tree_map

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
_COARSE_TOLERANCE = 5e-2
"""Tolerance for bf16 and fp16, whose sums depend on their order."""

_MOST_TEXT = 200


def kind_of(module: Module, experts: Experts) -> tuple[Any, ...]:
    """Return a key that is equal for experts covered by one proof."""
    shapes = tuple((name, each.shape) for name, each in module.named_parameters())
    slots = tuple(experts.slots.items())
    return type(module), experts.kind, experts.num_experts, slots, shapes


def prove(
    module: Module,
    experts: Experts,
    call: ExpertCall,
    group: ProcessGroup,
    *,
    around: Callable[[], AbstractContextManager[Any]],
    device: torch.device,
    is_mixed: bool,
) -> str | None:
    """Return how exchanged rows change the results of experts; None if they do not.

    Collective over ``group``; ranks may return different texts.

    Args:
        module: The module, with all experts on this rank.
        experts: Its experts.
        call: Its first call on this rank.
        group: The ranks that would have all experts together.
        around: Context in which a step computes.
        device: Device of the run.
        is_mixed: Whether matrices are multiplied in a lower precision than that of the rows.
    """
    call = detached(_shortened(call, experts, group.rank()), device)
    whole = {name: p.detach().to(device, copy=True) for name, p in module.named_parameters()}
    buffers = {name: each.to(device, copy=True) for name, each in module.named_buffers()}
    # Ranks may have drawn different values, and train with those of the first one.
    broadcast_tensors([*whole.values(), *buffers.values()], group)
    names = list(whole)
    apart = partial(_apart, module, around, device)
    first, fault = _run_whole(module, experts, call, {**whole, **buffers}, device, apart)
    faults = gather_objects(fault, group)
    if any(faults):
        return fault or next(each for each in faults if each)
    divided = divide(module, experts, call, group)
    raised = _guard(divided)
    parts = {name: divided.part(name, each) for name, each in whole.items()}
    local = {
        name: whole[name].to("meta") if part is None else part.clone()
        for name, part in parts.items()
    }
    if isinstance(divided, DividedList):
        # The user's code around the experts runs before the exchange and after it.
        with apart():
            fault = _raised_alone(divided, experts, call, {**local, **buffers}, names)
        faults = gather_objects(fault, group)
        if any(faults):
            return fault or next(each for each in faults if each)
    got: dict[str, Tensor] = {}
    with apart():
        divided.put_on()
        try:
            got = _outcome(module, module.forward, experts, call, {**local, **buffers}, names)
        except RuntimeError as error:
            raised.append(_raised(error))
        finally:
            divided.take_off()
    prefix = f"{experts.name}."
    for name in names:
        if prefix + name in (*experts.parameters, *experts.columns):
            dist.all_reduce(first[name], group=group)
        part = divided.part(name, first.pop(name))
        if part is not None:
            first[name] = part
    if raised:
        return raised[0]
    tolerance = _TOLERANCES.get(first["output"].dtype, _COARSE_TOLERANCE)
    tolerance = _COARSE_TOLERANCE if is_mixed else tolerance
    for what, expected in first.items():
        gap = _difference(expected, got[what])
        if not gap <= tolerance:
            return f"gives another {_what(what)} when rows are exchanged ({gap:.1e} off)"
    return None


@contextmanager
def _apart(
    module: Module, around: Callable[[], AbstractContextManager[Any]], device: torch.device
) -> Iterator[None]:
    """Return a context for a run without dropout that restores the module and random states."""
    with (
        random_state_unchanged(device),
        modules_unchanged(module.modules()),
        without_dropout(module.modules()),
        around(),
    ):
        yield


def _run_whole(
    module: Module,
    experts: Experts,
    call: ExpertCall,
    state: Mapping[str, Tensor],
    device: torch.device,
    apart: Callable[[], AbstractContextManager[None]],
) -> tuple[dict[str, Tensor], str | None]:
    """Return the outcome of the module with all experts, and a reason against it, or None."""
    names = [name for name, _ in module.named_parameters()]
    random_state = capture_random_state(device)
    try:
        with apart():
            first = _outcome(module, module.forward, experts, call, state, names)
            if experts.kind == "list":  # whose router may draw
                restore_random_state(random_state, device)
            again = _outcome(module, module.forward, experts, call, state, names, trains=False)
    except Exception as error:  # noqa: BLE001 - the user's code, called by itself
        return {}, _raised(error)
    is_same = _difference(first["output"], again["output"]) <= _COARSE_TOLERANCE
    return first, None if is_same else "draws random numbers"


def _shortened(call: ExpertCall, experts: Experts, rank: int) -> ExpertCall:
    """Leave out ``rank`` rows, if rows have no order."""
    if experts.kind != "routed":
        return call
    given = arguments(call.args, call.kwargs)
    rows: Tensor = given[experts.slots["rows"]]
    if rows.ndim != 2 or rows.shape[0] <= rank + 1:
        return call
    count = rows.shape[0]

    def cut(value: Any) -> Any:
        is_by_row = isinstance(value, Tensor) and value.ndim and value.shape[0] == count
        return value[rank:] if is_by_row else value

    return ExpertCall(tree_map(cut, call.args), tree_map(cut, dict(call.kwargs)), cut(call.output))


def _outcome(
    module: Module,
    forward: Callable[..., Any],
    experts: Experts,
    call: ExpertCall,
    state: Mapping[str, Tensor],
    names: list[str],
    *,
    trains: bool = True,
) -> dict[str, Tensor]:
    """Return the output, shape ``(N,)``, and the gradients of a call, of parameters by name.

    Without ``trains`` there is no backward pass.
    """
    given = arguments(call.args, call.kwargs)
    leaves = {}
    slots = {what: s for what, s in experts.slots.items() if what in {"rows", "weights"}}
    if experts.kind == "list":
        floats = (s for s, v in given.items() if isinstance(v, Tensor) and v.is_floating_point())
        slots = {f"input {slot}": slot for slot in floats}
    for what, slot in slots.items():
        leaves[what] = given[slot] = given[slot].clone().requires_grad_()
    tensors = dict(state)
    for name in names:
        leaves[name] = tensors[name] = state[name].clone().requires_grad_()
    positions = sorted(slot for slot in given if isinstance(slot, int))
    keywords = {slot: value for slot, value in given.items() if isinstance(slot, str)}
    with torch.enable_grad(), swapped_state(module, tensors):
        # Copies: the user's code may write to its inputs.
        copies = {id(each): each.view_as(each) for each in leaves.values()}
        output = forward(
            *(copies.get(id(given[each]), given[each]) for each in positions),
            **{slot: copies.get(id(value), value) for slot, value in keywords.items()},
        )
        made = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
        flat = torch.cat([each.reshape(-1) for each in made if each.is_floating_point()])
        if not trains:
            return {"output": flat.detach()}
        direction = torch.arange(flat.numel(), device=flat.device).cos().to(flat.dtype)
        gradients = torch.autograd.grad(
            (flat * direction).sum(),
            list(leaves.values()),
            allow_unused=True,
            materialize_grads=True,
        )
    return {"output": flat.detach(), **dict(zip(leaves, gradients, strict=True))}


def _raised_alone(
    divided: DividedList,
    experts: Experts,
    call: ExpertCall,
    state: Mapping[str, Tensor],
    names: list[str],
) -> str | None:
    """Return the error of this rank's code around experts that return zeros, without exchanges."""

    def answer(rows: Tensor, *_: Any) -> Tensor:
        return with_unused(divided.empty(rows), (rows,))

    divided.put_on()
    try:
        with patched(divided.exchange, run=answer):
            _outcome(divided.module, divided, experts, call, state, names)
    except Exception as error:  # noqa: BLE001 - the user's code
        return _raised(error)
    finally:
        divided.take_off()
    return None


def _guard(divided: DividedExperts) -> list[str]:
    """Let a rank continue with zeros after an error of its experts; return a list of reasons."""
    compute = divided.compute
    raised: list[str] = []

    def guarded(*given: Any) -> Tensor:
        rows: Tensor = given[2]
        try:
            own = [each for each in divided.module.parameters() if not each.is_meta]
            result: Tensor = _Apart.apply(compute, given, raised, rows, given[4], *own)  # type: ignore[no-untyped-call]
            if result.shape[0] == rows.shape[0]:
                return result
            raised.append(f"gives {result.shape[0]} rows for {rows.shape[0]}")
        except Exception as error:  # noqa: BLE001 - the user's code, called with one choice per row
            raised.append(_raised(error))
        return with_unused(divided.empty(rows), given[2::2])

    divided.compute = guarded  # type: ignore[assignment,method-assign]
    return raised


class _Apart(torch.autograd.Function):
    """Runs experts with a separate backward pass, whose gradients are zeros if it raises."""

    @staticmethod
    @override
    def forward(
        ctx: Any, compute: Any, given: tuple[Any, ...], raised: list[str], *inputs: Tensor
    ) -> Tensor:
        rows, weights = (each.detach().requires_grad_() for each in inputs[:2])
        with torch.enable_grad():
            result: Tensor = compute(*given[:2], rows, given[3], weights)
        ctx.result, ctx.raised, ctx.inputs = result, raised, (rows, weights, *inputs[2:])
        return result.detach()

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input_grads: Sequence[Tensor] = [torch.zeros_like(each) for each in ctx.inputs]
        try:
            if ctx.result.requires_grad:
                input_grads = torch.autograd.grad(
                    ctx.result, ctx.inputs, gradients, allow_unused=True, materialize_grads=True
                )
        except Exception as error:  # noqa: BLE001 - the user's code
            ctx.raised.append(_raised(error))
        return None, None, None, *input_grads


def _difference(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    gap = (one - other).double()
    if gap.numel() and gap.abs().max() <= 1e-9:
        return 0.0
    return float(gap.norm() / (one.double().norm() + 1e-12))


def _what(name: str) -> str:
    if name == "output":
        return "output"
    is_given = name in {"rows", "weights"} or name.startswith("input ")
    return f"gradient of {'its ' + name if is_given else repr(name)}"


def _raised(error: Exception) -> str:
    return f"raises {type(error).__name__}: {error}".replace("\n", " ")[:_MOST_TEXT]
