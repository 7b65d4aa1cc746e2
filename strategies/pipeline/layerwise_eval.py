"""Runs a step layer by layer: each unit on the rank that holds it, all other code on every rank.

Generation passes the whole model once per token, so a batch cannot go through the stages in one
pass. ``LayerwiseEvaluation`` runs the whole step on the whole batch on every rank. Each unit runs
on the rank that holds it, and its result is broadcast: code between units sees real values
everywhere, so it may loop and branch on them. Units run one after the other.

Key-value caches of Hugging Face are filled on the ranks that run the units. Each rank has the cache
object that ``generate`` made. A unit puts keys and values into its layer of the cache, on its rank
only. The other ranks get the form of that layer: its length, and meta tensors, which have a shape
and no data, in place of keys and values. So code between units reads the same lengths on all ranks,
and reorders beams there.
"""

import io
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
from boltmesh.strategies.dry_run.unsupported import refuse_derivative
from boltmesh.strategies.object_collectives import broadcast_object
from boltmesh.strategies.pipeline.partition.placement import StagePlacement
from boltmesh.strategies.pipeline.stage.rng import RandomStreams
from boltmesh.strategies.pipeline.stage.units import (
    Forward,
    ReplacedForwards,
    is_absent,
    make_absent,
    with_records,
)
from boltmesh.strategies.pipeline.stage_params import broadcast
from boltmesh.strategies.pytree import is_constant, replace_tensors, take_apart, tensors_in
from boltmesh.strategies.torch_compat.tensors import tree_map_only

Forms = dict[tuple[int, str, int], bytes]
"""Forms of layers, by number of the cache, attribute of its part, and number of the layer."""


class _TensorForm:
    """Placeholder of a tensor, without its data."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


class _SmallTensor:
    """Placeholder of a small tensor whose values code between units reads, such as a length."""

    def __init__(self, tensor: Tensor) -> None:
        self.values, self.dtype = tensor.tolist(), tensor.dtype


def caches_in(value: Any) -> list[Any]:
    """Return the caches among the leaves of a nested value."""
    return [leaf for leaf in take_apart(value)[0] if _is_cache(leaf)]


def forms_of(caches: Sequence[Any], unit: Module) -> Forms:
    """Return the forms of the layers that a unit may change.

    Raises:
        PipelineError: A cache contains other objects than tensors and constants.
    """
    numbers = {
        each.layer_idx
        for each in unit.modules()
        if isinstance(getattr(each, "layer_idx", 0), int) and hasattr(each, "layer_idx")
    }
    return {
        (at, name, number): _form(layer)
        for at, cache in enumerate(caches)
        for name, part in _parts(cache).items()
        for number, layer in enumerate(part.layers)
        if number in numbers or not numbers
    } | {
        (at, "is_updated", -1): pickle.dumps(cache.is_updated)
        for at, cache in enumerate(caches)
        if hasattr(cache, "is_updated")
    }


def changed(before: Forms, after: Forms) -> Forms:
    """Return the forms that a unit has changed."""
    return {key: form for key, form in after.items() if before.get(key) != form}


def put_forms(caches: Sequence[Any], forms: Mapping[tuple[int, str, int], bytes]) -> None:
    """Set layers of caches to the forms on the rank of their unit."""
    for (at, name, number), form in forms.items():
        made = pickle.loads(form)  # noqa: S301 - from a rank of this job
        if name == "is_updated":
            caches[at].is_updated = made
            continue
        layers = _parts(caches[at])[name].layers
        kind, state = made
        while len(layers) <= number:
            layers.append(kind.__new__(kind))
        vars(layers[number]).update(_opened(state))


def _is_cache(value: Any) -> bool:
    return any(
        kind.__name__ == "Cache" and kind.__module__.startswith("transformers.")
        for kind in type(value).__mro__
    )


def _parts(cache: Any) -> dict[str, Any]:
    """Return the parts of a cache with layers: itself, or those of encoder and decoder."""
    names = ("self_attention_cache", "cross_attention_cache")
    parts = {name: getattr(cache, name) for name in names if hasattr(cache, name)}
    return parts or {"": cache}


def _form(layer: Any) -> bytes:
    state = dict(vars(layer))
    leaves, _ = take_apart(state)
    strange = [leaf for leaf in leaves if not (isinstance(leaf, Tensor) or is_constant(leaf))]
    if strange:
        raise PipelineError(
            f"A key-value cache keeps a {type(strange[0]).__name__}, and the other ranks of the "
            f"pipeline cannot follow what becomes of it. Leave cache_implementation out."
        )
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream)
    pickler.fast = True  # equal values give equal bytes
    pickler.dump((type(layer), replace_tensors(state, _closed)))
    return stream.getvalue()


def _closed(tensor: Tensor) -> _TensorForm | _SmallTensor:
    return _TensorForm(tensor) if tensor.is_floating_point() else _SmallTensor(tensor)


def _opened(state: Mapping[str, Any]) -> dict[str, Any]:
    device = state.get("device")
    made = {}
    for name, value in state.items():
        leaves, build = take_apart(value)
        made[name] = build([_open(leaf, device) for leaf in leaves])
    return made


def _open(leaf: Any, device: torch.device | None) -> Any:
    if isinstance(leaf, _TensorForm):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    if isinstance(leaf, _SmallTensor):
        return torch.tensor(leaf.values, dtype=leaf.dtype, device=device)
    return leaf


class LayerwiseEvaluation:
    """Runs each unit of a model on the rank that holds it, for steps without gradients.

    Args:
        units: All units of the model, by name.
        rank_of_unit: The rank in ``group`` that holds each.
        between: Parameters that code between units may use, each with a rank that holds it.
        group: The ranks of the pipeline.
        device: The device of the model.
    """

    def __init__(
        self,
        units: Mapping[str, Module],
        rank_of_unit: Mapping[str, int],
        between: Mapping[Parameter, int],
        group: ProcessGroup,
        device: torch.device,
    ) -> None:
        self._units = units
        self._rank_of_unit = rank_of_unit
        self._between = between
        self._group = group
        self._device = device

    @torch.no_grad()
    def run(self, function: Callable[[], Any], seed: int, *, seeds: bool = True) -> Any:
        """Run a function of the model and return its result, on every rank. Collective.

        Args:
            function: A step on a batch, for example; the same on all ranks.
            seed: Seed of random numbers in units.
            seeds: Whether code between units is seeded, too, and generators are restored
                afterwards. Otherwise they continue from their states, the same on all ranks.

        Raises:
            PipelineError: Ranks call a unit with different values.
        """
        streams = RandomStreams(seed, self._group.rank(), self._device, is_mixed=True)
        forwards: dict[str, Forward] = {
            name: partial(self._call, name, with_records(unit.forward), streams)
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
        given = tensors_in((args, kwargs))
        if torch.is_grad_enabled() and any(each.requires_grad for each in given):
            refuse_derivative(f"The code that calls {name!r} in evaluation, with gradients on,")
        digest = _digest((args, kwargs))
        caches, unit = caches_in((args, kwargs)), self._units[name]
        if holder != self._group.rank():
            return self._receive(name, holder, digest, caches)
        before = forms_of(caches, unit)
        with streams.around_unit():
            result = forward(*args, **kwargs)
        forms = changed(before, forms_of(caches, unit))
        tensors = [each.contiguous() for each in tensors_in(result)]
        blank = tree_map_only(Tensor, _TensorForm, result)
        if self._group.size() > 1:
            broadcast_object((digest, blank, forms), self._global_rank(holder), self._group)
        for each in tensors:
            self._broadcast(each, holder)
        return result

    def _receive(
        self, name: str, holder: int, digest: tuple[Any, ...], caches: Sequence[Any]
    ) -> Any:
        nothing: Any = None
        awaited, blank, forms = broadcast_object(nothing, self._global_rank(holder), self._group)
        if awaited != digest:
            raise PipelineError(
                f"The ranks of the pipeline came to call '{name}' with different values, so what "
                f"it gives would be wrong. Layers that leave something behind for code outside of "
                f"them, such as a key-value cache, leave it on their own rank: set use_cache="
                f"False. A hook that writes to weights, such as a moving average, has those of all "
                f"stages inside of boltmesh.strategies.gathered_parameters(module, writes=True)."
            )
        put_forms(caches, forms)
        return tree_map_only(_TensorForm, lambda each: self._filled(each, holder), blank)

    def _filled(self, blank: _TensorForm, holder: int) -> Tensor:
        made = torch.empty(blank.shape, dtype=blank.dtype, device=self._device)
        self._broadcast(made, holder)
        return made

    def _global_rank(self, holder: int) -> int:
        return dist.get_global_rank(self._group, holder)

    def _broadcast(self, tensor: Tensor, holder: int) -> None:
        broadcast(tensor, holder, self._group)

    @contextmanager
    def _whole_parameters(self) -> Iterator[None]:
        """Return a context with the parameters used between units on every rank. Collective."""
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


def layerwise_evaluation(
    root: Module, placement: StagePlacement, group: ProcessGroup, device: torch.device
) -> LayerwiseEvaluation:
    """Return the evaluation of a model that is divided into stages."""
    plans, division = placement.plans, placement.division
    rank_of_stage = division.rank_of_stage
    rank_of_unit = {unit: rank_of_stage[stage] for unit, stage in plans.stage_of_unit.items()}
    called_on: dict[str, set[int]] = {}
    for unit, names in plans.parameters_of_unit.items():
        for name in names:
            called_on.setdefault(name, set()).add(rank_of_unit[unit])
    # A parameter on more ranks than those of its units, or in none of them, is used between units.
    between = {
        root.get_parameter(name): ranks[0]
        for name, ranks in division.ranks_of_parameter.items()
        if called_on.get(name) != set(ranks) and len(ranks) < group.size()
    }
    return LayerwiseEvaluation(plans.units, rank_of_unit, between, group, device)


def _digest(value: Any) -> tuple[Any, ...]:
    """Return a digest of arguments, which have to be equal on all ranks."""
    return tuple(
        (tuple(each.shape), str(each.dtype), each.detach().double().sum().item())
        for each in tensors_in(value)
        if not each.is_complex()
    )
