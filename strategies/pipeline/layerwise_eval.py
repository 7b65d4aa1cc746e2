"""Runs a step of evaluation whose layers are called again: on all ranks at once, layer by layer.

Text that is generated token by token goes through the whole model for each token, so there is no
order in which stages could hand a batch on. Here every rank runs the whole step on the whole batch.
Each unit runs on the rank that holds it, and its result is told to all others: code between units
sees real values everywhere, so it may loop and branch on them. No two ranks compute at once.
"""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter

from boltmesh.errors import PipelineError
from boltmesh.strategies.pipeline.kv_caches import caches_in, changed, forms_of, put_forms
from boltmesh.strategies.pipeline.partition.placement import StagePlacement
from boltmesh.strategies.pipeline.stage.absent_params import is_absent, make_absent
from boltmesh.strategies.pipeline.stage.rng import RandomStreams
from boltmesh.strategies.pipeline.stage.units import Forward, ReplacedForwards
from boltmesh.strategies.pytree import tensors_in
from boltmesh.strategies.torch_compat.tensors import tree_map_only


class LayerwiseEvaluation:
    """The units of a model on the ranks that hold them, for steps without gradients.

    Args:
        root: The whole model.
        units: All of its units, by name.
        rank_of_unit: The rank in ``group`` that holds each.
        between: Parameters that code between units may use, each with a rank that holds it.
        group: The ranks of the pipeline.
        device: Of the model.
    """

    def __init__(
        self,
        root: Module,
        units: Mapping[str, Module],
        rank_of_unit: Mapping[str, int],
        between: Mapping[Parameter, int],
        group: ProcessGroup,
        device: torch.device,
    ) -> None:
        self._root = root
        self._units = units
        self._rank_of_unit = rank_of_unit
        self._between = between
        self._group = group
        self._device = device

    @torch.no_grad()
    def run(self, function: Callable[[], Any], seed: int, *, seeds: bool = True) -> Any:
        """Return what a function of the model returns, on every rank. Collective.

        Args:
            function: A step on a batch, for example; the same on all ranks.
            seed: What random numbers of units start from.
            seeds: Whether those of code between units do so too, and generators stand afterwards
                as before. Else they go on from where they stand, the same on all ranks.

        Raises:
            PipelineError: When ranks come to call a unit with different values.
        """
        streams = RandomStreams(seed, self._group.rank(), self._device, is_mixed=True)
        forwards: dict[str, Forward] = {
            name: partial(self._call, name, unit.forward, streams)
            for name, unit in self._units.items()
            if name in self._rank_of_unit
        }
        with (
            self._whole_parameters(),
            ReplacedForwards(self._units, forwards),
            streams if seeds else nullcontext(),
        ):
            return function()

    def _call(
        self, name: str, forward: Forward, streams: RandomStreams, *args: Any, **kwargs: Any
    ) -> Any:
        holder = self._rank_of_unit[name]
        digest = _digest((args, kwargs))
        caches, unit = caches_in((args, kwargs)), self._units[name]
        if holder != self._group.rank():
            return self._receive(name, holder, digest, caches)
        before = forms_of(caches, unit)
        with streams.around_unit():
            result = forward(*args, **kwargs)
        forms = changed(before, forms_of(caches, unit))
        tensors = [each.contiguous() for each in tensors_in(result)]
        blank = tree_map_only(Tensor, _Blank, result)
        self._send(holder, pickle.dumps((digest, blank, forms)))
        for each in tensors:
            self._broadcast(each, holder)
        return result

    def _send(self, holder: int, told: bytes) -> None:
        self._broadcast(torch.tensor([len(told)], device=self._device), holder)
        self._broadcast(
            torch.frombuffer(bytearray(told), dtype=torch.uint8).to(self._device), holder
        )

    def _receive(
        self, name: str, holder: int, digest: tuple[Any, ...], caches: Sequence[Any]
    ) -> Any:
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._broadcast(size, holder)
        told = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        self._broadcast(told, holder)
        awaited, blank, forms = pickle.loads(told.cpu().numpy().tobytes())  # noqa: S301  from our own rank
        if awaited != digest:
            raise PipelineError(
                f"The ranks of the pipeline came to call '{name}' with different values, so what "
                f"it gives would be wrong. Layers that leave something behind for code outside of "
                f"them, such as a key-value cache, leave it on their own rank: set use_cache=False."
            )
        put_forms(caches, forms)
        return tree_map_only(_Blank, lambda each: self._filled(each, holder), blank)

    def _filled(self, blank: "_Blank", holder: int) -> Tensor:
        made = torch.empty(blank.shape, dtype=blank.dtype, device=self._device)
        self._broadcast(made, holder)
        return made

    def _broadcast(self, tensor: Tensor, holder: int) -> None:
        dist.broadcast(tensor, dist.get_global_rank(self._group, holder), group=self._group)

    @contextmanager
    def _whole_parameters(self) -> Iterator[None]:
        """Lend every rank the parameters that are used between units. Collective."""
        lent: list[Parameter] = []
        try:
            for parameter, holder in self._between.items():
                if is_absent(parameter):
                    lent.append(parameter)
                    parameter.data = torch.empty_like(
                        parameter.data, memory_format=torch.contiguous_format
                    )
                self._broadcast(parameter.data, holder)
            yield
        finally:
            make_absent(lent)


def relay_of(
    root: Module, placement: StagePlacement, group: ProcessGroup, device: torch.device
) -> LayerwiseEvaluation:
    """Return the relay of a model that is divided into stages."""
    plans, ranks_of_parameter = placement.plans, placement.ranks_of_parameter
    rank_of_stage = placement.division.rank_of_stage
    rank_of_unit = {unit: rank_of_stage[stage] for unit, stage in plans.stage_of_unit.items()}
    called_on: dict[str, set[int]] = {}
    for unit, names in plans.parameters_of_unit.items():
        for name in names:
            called_on.setdefault(name, set()).add(rank_of_unit[unit])
    # What is on more ranks than those of its units, or in none of them, is used between units.
    between = {
        root.get_parameter(name): ranks[0]
        for name, ranks in ranks_of_parameter.items()
        if called_on.get(name) != set(ranks) and len(ranks) < group.size()
    }
    return LayerwiseEvaluation(root, plans.units, rank_of_unit, between, group, device)


class _Blank:
    """Stands for a tensor that follows."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype


def _digest(value: Any) -> tuple[Any, ...]:
    """What has to be equal on all ranks before a unit is called."""
    return tuple(
        (tuple(each.shape), str(each.dtype), each.detach().double().sum().item())
        for each in tensors_in(value)
        if not each.is_complex()
    )
