"""Runs the experts of a module on the ranks that own them, in place of its ``forward``.

The user's own code runs there, with one expert per row: its activation, biases, clamps, weights and
choice of kernel do not change. Only its integer attributes that count experts are set to those of a
rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn import Module
from typing_extensions import override

from boltmesh.strategies.engine.data_axis import OwnedColumns, OwnedModules
from boltmesh.strategies.expert.exchange import Compute, EqualRows, ExpertExchange, with_unused
from boltmesh.strategies.expert.expected_traffic import ExchangeShape
from boltmesh.strategies.expert.find import ExpertCall, Experts, Slot, arguments
from boltmesh.strategies.object_collectives import noop
from boltmesh.strategies.patch import rewrapped, unwrapped
from boltmesh.strategies.torch_compat.modules import (
    parameters_in_place,
    set_parameter,
    swapped_state,
)
from boltmesh.strategies.torch_compat.tensors import disabled_torch_function

OnRows = Callable[[Callable[..., Tensor], tuple[Any, ...], Mapping[str, Any]], Tensor]


def _called(run: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Call a function."""
    return run(*args, **kwargs)


def by_rows(on_rows: OnRows, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a module's forward that ``on_rows`` calls with this rank's rows."""

    def run(*args: Any, **kwargs: Any) -> Tensor:
        return on_rows(forward, args, kwargs)

    return run


class DividedExperts:
    """The experts of one module, divided over a group: each rank runs its own.

    Args:
        module: The module whose ``forward`` this replaces.
        experts: Its experts.
        call: A call of it, for widths and dtypes of rows.
        group: The ranks that have all experts together.
        around: Context in which a step of the run computes, such as autocast.
    """

    def __init__(
        self,
        module: Module,
        experts: Experts,
        call: ExpertCall,
        group: ProcessGroup,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.module, self.experts, self.name = module, experts, experts.name
        self.exchange = ExpertExchange(experts.num_experts, group)
        self.note: Callable[[str], None] = noop
        """Called before each exchange with a description of it."""
        self.count: Callable[[str, Tensor, int], None] = noop
        """Called with the module's name, the chosen experts ``(N, K)``, and number of experts."""
        self.equal_rows: EqualRows | None = None
        """Ranks that have the same rows as this one; None without any."""
        self.on_rows: OnRows = _called
        """Calls a function with this rank's rows, if tensors also represent those of others."""
        self._before = vars(module).get("forward")
        self.module_forward = unwrapped(module.forward)
        self._around = around
        given = arguments(call.args, call.kwargs)
        rows: Tensor = given[experts.slots["rows"]] if call.rows is None else call.rows
        self.rows_dtype = rows.dtype
        self._is_stacked = rows.ndim > 2
        output: Tensor = call.output if call.results is None else call.results
        self.output_dtype = None if output.dtype == rows.dtype else output.dtype
        weights = given.get(experts.slots.get("weights", ""))
        self.weights_dtype = rows.dtype if weights is None else weights.dtype
        self.shape = ExchangeShape.of(experts, call)
        self._shapes = {name: p.shape for name, p in module.named_parameters()}
        self.owned: OwnedModules | OwnedColumns | None = None
        """Parameters that are sent to this rank for each batch."""
        if experts.columns:
            names = [each.removeprefix(f"{experts.name}.") for each in experts.columns]
            owners = [module.get_submodule(each.rpartition(".")[0]) for each in names]
            places = zip(owners, (each.rpartition(".")[2] for each in names), strict=True)
            self.owned = OwnedColumns(list(places), experts.num_experts)

    def set_capacity(self, capacity: int) -> None:
        """Limit the rows of each rank's batch for an expert in training."""
        self.exchange.capacity = capacity
        self.shape = replace(self.shape, capacity=capacity)

    def put_on(self) -> None:
        """Replace the module's ``forward``; its parameters are this rank's part."""
        # A tensor plan sums its ranks' parts of results after all rows are back.
        self._put(self)
        self._set_counts(self.exchange.num_local)

    def take_off(self) -> None:
        """Undo ``put_on``."""
        if self.on_rows is not _called:
            self._put(by_rows(self.on_rows, self.module_forward))
        elif self._before is None:
            vars(self.module).pop("forward", None)
        else:
            vars(self.module)["forward"] = self._before
        self._set_counts(self.experts.num_experts)

    def _put(self, forward: Callable[..., Tensor]) -> None:
        vars(self.module)["forward"] = rewrapped(self._before or forward, forward)

    def _set_counts(self, number: int) -> None:
        inside = dict(self.module.named_modules())
        for path, key in self.experts.counts:
            owner = inside[path[len(self.experts.name) :].lstrip(".")]
            setattr(owner, key, number)

    def is_on(self) -> bool:
        """Whether this replaces the module's ``forward``."""
        return unwrapped(self.module.forward) is self

    def whole_shapes(self) -> AbstractContextManager[None]:
        """Return a context in which divided parameters have their whole shape, and no data."""
        device, stand_ins = self.device, {}
        for name, each in self.module.named_parameters():
            shape = self._shapes[name]
            if isinstance(each, DTensor) or each.shape != shape:
                one = torch.zeros((), dtype=each.dtype, device=device)
                stand_ins[name] = one.expand(shape).requires_grad_(each.requires_grad)
        return swapped_state(self.module, stand_ins)

    def part(self, name: str, whole: Tensor) -> Tensor | None:
        """Return this rank's part of a parameter below the module, None if it has none.

        Args:
            name: Name below the module.
            whole: Tensor of the parameter's shape; its first dim is of experts, or its columns are
                interleaved over experts.

        Returns:
            Shape ``whole.shape`` with that dim divided by the ranks of the group.
        """
        group = self.exchange.group
        if isinstance(self.owned, OwnedColumns) and f"{self.name}.{name}" in self.experts.columns:
            return self.owned.part(whole, group.rank(), group.size())
        return whole.tensor_split(group.size())[group.rank()]

    @property
    def device(self) -> torch.device:
        """Device of this rank; experts of other ranks have no values here."""
        return next(each.device for each in self.module.parameters() if not each.is_meta)

    def attend(self) -> None:
        """Run this rank's experts for the rows of others, without own ones. Collective."""
        device = self.device
        rows = torch.empty((0, self.shape.width), dtype=self.rows_dtype, device=device)
        chosen = torch.empty((0, 1), dtype=torch.long, device=device)
        weights = torch.empty((0, 1), dtype=self.weights_dtype, device=device)
        self._note_exchange()
        with torch.no_grad(), self._around():
            self.exchange.run(rows, chosen, weights, partial(self.compute, (), {}))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward with the rows of all ranks. Collective over the group."""
        return self.on_rows(self._exchange, args, kwargs)

    def _exchange(self, *args: Any, **kwargs: Any) -> Tensor:
        given, slots = arguments(args, kwargs), self.experts.slots
        rows: Tensor = given[slots["rows"]]
        flat = rows.reshape(-1, rows.shape[-1])
        self.rows_dtype = rows.dtype
        if self.experts.kind in {"sorted", "batched"}:
            sizes = torch.tensor(self._sizes(given, flat), device=rows.device)
            numbers = torch.arange(len(sizes), device=rows.device)
            chosen = numbers.repeat_interleave(sizes, output_size=flat.shape[0])[:, None]
            weights = flat.new_ones(chosen.shape)
        else:
            chosen = given[slots["experts"]].flatten(0, -2)
            weights = self._weights(given, chosen, flat)
        self.weights_dtype = weights.dtype
        result = self.run(flat, chosen.long(), weights, partial(self.compute, args, kwargs))
        return result.reshape(*rows.shape[:-1], self.shape.output_width)

    def run(self, rows: Tensor, chosen: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        """Return the results of rows, see ``ExpertExchange.run``. Collective over the group.

        Args:
            rows: Shape ``(N, E)``.
            chosen: Numbers of experts, shape ``(N, K)``, int64.
            weights: Shape ``(N, K)``.
            compute: Runs the experts of this rank.

        Returns:
            Shape ``(N, output width)``.
        """
        equal, num_rows = self.equal_rows, rows.shape[0]
        if equal is not None:
            rows, chosen, weights = map(equal.part, (rows, chosen, weights))
        self.count(self.name, chosen, self.experts.num_experts)
        self._note_exchange()
        has_places = self.exchange.capacity is not None and self.module.training
        exchange = self.exchange.run_in_places if has_places else self.exchange.run
        results = exchange(rows, chosen, weights, compute)
        return results if equal is None else equal.whole(results, num_rows)

    def _note_exchange(self) -> None:
        self.note(f"exchanged the rows of {self.name!r}")

    def _sizes(self, given: Mapping[Slot, Any], rows: Tensor) -> Sequence[int]:
        """Return the number of rows of each expert; rows are in the order of experts."""
        if self.experts.kind == "batched":
            number = self.experts.num_experts
            return [rows.shape[0] // number] * number
        sizes: Sequence[int] = given[self.experts.slots["sizes"]]
        return sizes

    def _weights(self, given: Mapping[Slot, Any], chosen: Tensor, rows: Tensor) -> Tensor:
        """Return the weight of each choice, shape ``(N, K)``."""
        slot = self.experts.slots.get("weights")
        if slot is None:
            return rows.new_ones(chosen.shape)
        weights: Tensor = given[slot]
        if not chosen.numel():
            return weights.reshape(chosen.shape)
        flat = weights.reshape(rows.shape[0], -1)
        return flat.gather(1, chosen.long()) if self._is_dense(flat, chosen) else flat

    def _is_dense(self, weights: Tensor, chosen: Tensor) -> bool:
        """Whether weights have the shape ``(N, X)``: also of experts that are not chosen."""
        return weights.shape[-1] != chosen.shape[-1]

    def compute(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        rows: Tensor,
        local: Tensor,
        weights: Tensor,
    ) -> Tensor:
        """Run the user's code on this rank's experts.

        Args:
            args: Positional arguments of the module on this rank.
            kwargs: Keyword arguments of the module on this rank.
            rows: Rows of all ranks, one per choice, shape ``(N, E)``.
            local: Number of the expert among this rank's, shape ``(N,)``.
            weights: Shape ``(N,)``.

        Returns:
            Shape ``(N, output width)``.
        """
        if not rows.shape[0]:
            if not self.experts.columns:
                return self.empty(rows)
            # Only a call shows which adapters are in use: make one with a row for each expert.
            each = torch.arange(self.exchange.num_local, device=local.device)
            made_up = rows.new_zeros((len(each), rows.shape[1]))
            results = self.compute(args, kwargs, made_up, each, weights.new_zeros(len(each)))
            return with_unused(results[:0], (rows, weights))
        slots = self.experts.slots
        given = arguments(args, kwargs)
        if self.experts.kind == "batched":
            # Every rank sends equally many rows for each of these experts.
            order = local.argsort(stable=True)
            own = rows.index_select(0, order)
            if self._is_stacked:
                own = own.view(self.exchange.num_local, -1, own.shape[-1])
            result = self._call({**given, slots["rows"]: own})
            result = result.reshape(rows.shape[0], self.shape.output_width)
            return result.index_select(0, order.argsort())
        if self.experts.kind == "sorted":
            order = local.argsort(stable=True)
            sizes = torch.bincount(local, minlength=self.exchange.num_local).tolist()
            as_given = type(given.get(slots["sizes"], []))
            given |= {slots["rows"]: rows.index_select(0, order), slots["sizes"]: as_given(sizes)}
            result = self._call(given)
            return result.index_select(0, order.argsort())
        # A rank without rows in ``attend`` has no call to copy the other arguments from.
        chosen = given.get(slots["experts"])
        kind = torch.long if chosen is None else chosen.dtype
        own_weights = self._own_weights(given, chosen, local, weights)
        given |= {slots["rows"]: rows, slots["experts"]: local[:, None].to(kind)}
        if "weights" in slots:
            given[slots["weights"]] = own_weights
        return self._call(given).reshape(rows.shape[0], self.shape.output_width)

    def _own_weights(
        self, given: Mapping[Slot, Any], chosen: Tensor | None, local: Tensor, weights: Tensor
    ) -> Tensor:
        dense = given.get(self.experts.slots.get("weights", ""))
        if chosen is None or dense is None or not self._is_dense(dense, chosen):
            return weights[:, None]
        wide = weights.new_zeros((len(weights), self.exchange.num_local))
        return wide.scatter(1, local[:, None], weights[:, None])

    def empty(self, rows: Tensor) -> Tensor:
        """Return results of no rows, zeros in the graph of all parameters that compute one.

        Args:
            rows: Shape ``(N, E)``.

        Returns:
            Shape ``(N, output width)``.
        """
        shape = rows.shape[0], self.shape.output_width
        result = rows.new_zeros(shape, dtype=self.output_dtype or rows.dtype)
        return with_unused(result, self.module.parameters())

    def _call(self, given: Mapping[Slot, Any]) -> Tensor:
        positions = sorted(slot for slot in given if isinstance(slot, int))
        with _taken_apart(self.module, self.exchange.num_local), parameters_in_place(self.module):
            result: Tensor = self.module_forward(
                *(given[each] for each in positions),
                **{slot: value for slot, value in given.items() if isinstance(slot, str)},
            )
        return result if self.owned is None else with_unused(result, self.owned.anchors)


_NUMBERS = frozenset({torch.int16, torch.int32, torch.int64})
"""Dtypes of a tensor that is an index; torch treats others as masks, or refuses them."""


class _Stack(Tensor):
    """The parameters of several experts, shape ``(X, *)``; ``stack[i]`` is that of one.

    The gradient of an indexed tensor is as large as the tensor, mostly zeros: for X experts that
    are indexed one after the other, autograd fills and sums X stacks. Here it joins X gradients.
    """

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]
    _experts: tuple[Tensor, ...] | None = None

    @override
    def __getitem__(self, index: Any) -> Tensor:
        is_number = isinstance(index, Tensor) and not index.ndim and index.dtype in _NUMBERS
        number = int(index) if is_number else index
        if type(number) is not int or not (self.requires_grad and torch.is_grad_enabled()):
            return super().__getitem__(index)
        if self._experts is None:
            self._experts = self.unbind()
        return self._experts[number]


@contextmanager
def _taken_apart(module: Module, num_experts: int) -> Iterator[None]:
    """Return a context in which a module's stacks of experts are ``_Stack``."""
    stacks = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
        if parameter.ndim > 1 and parameter.shape[0] == num_experts
    ]
    for owner, name, parameter in stacks:
        set_parameter(owner, name, parameter.as_subclass(_Stack))
    try:
        yield
    finally:
        for owner, name, parameter in stacks:
            set_parameter(owner, name, parameter)
