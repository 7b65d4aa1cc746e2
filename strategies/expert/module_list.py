"""Runs experts in a list of modules on the ranks that own them.

The user's code calls one expert after the other and uses each result at once, so rows cannot be
exchanged at the call of an expert. Instead, the module around them runs twice:

1. Experts keep their input rows, and return zeros.
2. All of these rows are sent to the owners in one exchange, where each expert runs once, on the
   rows of all ranks.
3. The module runs again, and experts return the results.

Gradients of rows go through the first pass, those of results through the second. Random numbers are
the same in both, changes of buffers and attributes by the first are undone, and hooks do not see
its results. ``data_parallel/all_to_all_params`` sends the parameters of each expert to its owner
for the forward pass.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies.dry_run.no_side_effects import modules_unchanged
from boltmesh.strategies.engine.data_axis import OwnedModules
from boltmesh.strategies.expert.divided import DividedExperts
from boltmesh.strategies.expert.exchange import with_unused
from boltmesh.strategies.expert.find import ExpertCall, Experts
from boltmesh.strategies.patch import patched
from boltmesh.strategies.random_state import random_state_unchanged
from boltmesh.strategies.torch_compat.modules import results_unwatched
from boltmesh.strategies.torch_compat.tensors import tree_leaves, tree_map


@dataclass
class _Pass:
    """One run of the module's code."""

    calls: list[tuple[int, Tensor]]
    """Number of the expert and its input, in order."""
    results: list[Tensor] | None = None
    """Outputs to return; None in the first run."""
    place: int = 0


class DividedList(DividedExperts):
    """The experts of one list, divided over a group: each rank runs its own.

    Arguments are those of ``DividedExperts``, with the module that calls the experts.
    """

    def __init__(
        self,
        module: Module,
        experts: Experts,
        call: ExpertCall,
        group: ProcessGroup,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__(module, experts, call, group, around)
        prefix = f"{experts.name}."
        self._members = [module.get_submodule(n.removeprefix(prefix)) for n in experts.members]
        self._forwards = [each.forward for each in self._members]
        self.owned: OwnedModules = OwnedModules(self._members)
        inside = {part for each in self._members for part in each.modules()}
        self._around_experts = [each for each in module.modules() if each not in inside]
        self._pass = _Pass([])

    @override
    def put_on(self) -> None:
        super().put_on()
        for number, each in enumerate(self._members):
            vars(each)["forward"] = partial(self.answer, number)

    @override
    def take_off(self) -> None:
        super().take_off()
        for each in self._members:
            vars(each).pop("forward", None)

    @override
    def part(self, name: str, whole: Tensor) -> Tensor | None:
        member = next(
            (m for m in self.experts.members if f"{self.name}.{name}".startswith(f"{m}.")), None
        )
        if member is None:
            return whole
        owner = self.experts.members.index(member) // self.exchange.num_local
        return whole if owner == self.exchange.group.rank() else None

    @override
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward with the rows of all ranks. Collective over the group."""
        noted = _Pass([])
        with (
            patched(self, _pass=noted),
            random_state_unchanged(self.device),
            modules_unchanged(self._around_experts),
            results_unwatched(self.module.modules()),
        ):
            copies = tree_map(_copy, (args, kwargs))
            self.module_forward(*copies[0], **copies[1])
        results = self._exchanged(noted.calls)
        parts = results.split_with_sizes([rows[..., 0].numel() for _, rows in noted.calls])
        answers = [
            part.view(*rows.shape[:-1], part.shape[-1])
            for part, (_, rows) in zip(parts, noted.calls, strict=True)
        ]
        answering = _Pass(noted.calls, answers)
        with patched(self, _pass=answering):
            output = self.module_forward(*args, **kwargs)
        if answering.place != len(answers):
            raise self._differs()
        return _connected(output, results)

    def answer(self, number: int, /, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of an expert in this pass of the module.

        Args:
            number: Number of the expert.
            *args: Positional arguments of the user's call; the rows ``(*, E)`` come first.
            **kwargs: Keyword arguments of the user's call.

        Returns:
            Shape ``(*, output width)``.

        Raises:
            ConfigError: The second pass calls other experts than the first.
        """
        rows: Tensor = (*args, *kwargs.values())[0]
        now = self._pass
        if now.results is None:
            now.calls.append((number, rows))
            if not rows.numel():
                self.owned.called.add(number)
            width, kind = self.shape.output_width, self.output_dtype or rows.dtype
            return rows.new_zeros((*rows.shape[:-1], width), dtype=kind)
        if now.place >= len(now.calls):
            raise self._differs()
        expected, noted = now.calls[now.place]
        if expected != number or noted.shape != rows.shape:
            raise self._differs()
        now.place += 1
        return now.results[now.place - 1]

    def _differs(self) -> ConfigError:
        return ConfigError(
            f"{self.name!r} calls other experts when it runs a second time on the same input, and "
            f"expert= runs it twice. Leave expert out for this model."
        )

    def _exchanged(self, calls: list[tuple[int, Tensor]]) -> Tensor:
        """Return the results of all calls, concatenated along rows. Collective."""
        device = self.device
        flat = [rows.reshape(-1, rows.shape[-1]) for _, rows in calls]
        if not flat:
            flat = [torch.empty((0, self.shape.width), dtype=self.rows_dtype, device=device)]
        rows = torch.cat(flat)
        sizes = torch.tensor([each.shape[0] for each in flat], device=device)
        numbers = torch.tensor([number for number, _ in calls] or [0], device=device)
        chosen = numbers.repeat_interleave(sizes, output_size=rows.shape[0])[:, None]
        if torch.is_grad_enabled():
            # Also if no row needs a gradient here: rows of other ranks may.
            rows = with_unused(rows, [torch.zeros((), device=device, requires_grad=True)])
        weights = torch.ones(chosen.shape, dtype=self.weights_dtype, device=device)
        return self.run(rows, chosen, weights, partial(self.compute, (), {}))

    @override
    def compute(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        rows: Tensor,
        local: Tensor,
        weights: Tensor,
    ) -> Tensor:
        if not rows.shape[0]:
            return self.empty(rows)
        order = local.argsort(stable=True)
        sizes = torch.bincount(local, minlength=self.exchange.num_local).tolist()
        first = self.exchange.group.rank() * self.exchange.num_local
        results = [
            self._forwards[first + number](part)
            for number, part in enumerate(rows.index_select(0, order).split_with_sizes(sizes))
            if part.shape[0]
        ]
        together = torch.cat(results)
        together = together.index_select(0, order.argsort())
        return with_unused(together, self.owned.anchors)

    @override
    def empty(self, rows: Tensor) -> Tensor:
        shape = rows.shape[0], self.shape.output_width
        result = rows.new_zeros(shape, dtype=self.output_dtype or rows.dtype)
        return with_unused(result, self.owned.anchors)


def _copy(value: Any) -> Any:
    """Return a copy of a tensor, which the user's code may write to."""
    return value.clone() if isinstance(value, Tensor) else value


def _connected(output: Any, results: Tensor) -> Any:
    """Return an output that depends on results, also if the user's code did not use them."""
    if not results.requires_grad:
        return output
    leaves = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
    first = next((each for each in leaves if each.is_floating_point()), None)

    def connect(value: Any) -> Any:
        return with_unused(first, (results,)) if first is not None and value is first else value

    return tree_map(connect, output)


def divide(
    module: Module,
    experts: Experts,
    call: ExpertCall,
    group: ProcessGroup,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> DividedExperts:
    """Return the divided experts of any kind, see ``DividedExperts``."""
    kind = DividedList if experts.kind == "list" else DividedExperts
    return kind(module, experts, call, group, around)
