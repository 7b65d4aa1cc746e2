"""Whole parameters outside of the forward pass: to look at weights, to average them, to set them.

Between steps a rank holds its shards only. Here they are put together, for as long as a ``with``
block lasts, in the type that the optimizer keeps them in (fp32 also under ``bf16-mixed``).
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from boltmesh.errors import ConfigError
from boltmesh.strategies.offload.shard_tensor import OffloadedShard
from boltmesh.strategies.torch_compat.fsdp import is_gathered, unit_parameter_names, unit_parameters
from boltmesh.strategies.torch_compat.tensors import local_tensor, times_written

_units: "WeakSet[FSDPModule]" = WeakSet()
"""Units of every sharded model of this process, also those that hold a module's parameters without
being part of it."""


class ShardOfParameter(Protocol):
    """What joins a parameter of which each rank of a group has a part in a plain tensor."""

    def join(self, part: Tensor) -> Tensor:
        """Return the whole, of the parameter or of what has its shape. Collective."""

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part."""


_parts: MutableMapping[Tensor, ShardOfParameter] = WeakTensorKeyDictionary()
"""By parameter, of every model of this process."""


class StageOwned(Protocol):
    """What tells a parameter of some stages of a pipeline to the ranks of the others."""

    @property
    def is_held(self) -> bool:
        """Whether this rank has values of it."""

    def told(self, value: Tensor) -> Tensor:
        """Return what a holder has, in memory of its own. Collective over the pipeline.

        Args:
            value: Of this rank, which counts on holders; its shape and type are alike on all.
        """


_stages: MutableMapping[Tensor, StageOwned] = WeakTensorKeyDictionary()
"""By parameter, of every model of this process that a pipeline has."""


class _ParamSite(NamedTuple):
    """Where a parameter is registered."""

    name: str
    module: nn.Module
    key: str

    @property
    def parameter(self) -> Parameter:
        """What is there at the moment."""
        found = getattr(self.module, self.key)
        assert isinstance(found, Parameter)
        return found


def register_units(units: Iterable[FSDPModule]) -> None:
    """Note the units of a model, for parameters that are wanted while one of them is gathered."""
    _units.update(units)


def register_shards(parts: Mapping[Parameter, ShardOfParameter]) -> None:
    """Note parameters of which this rank has parts in plain tensors."""
    for parameter, part in parts.items():
        _parts[parameter] = part


def forget_parts(parameters: Iterable[Parameter]) -> None:
    """Forget parameters that are whole again."""
    for each in parameters:
        _parts.pop(each, None)


def register_stages(stages: Mapping[Parameter, StageOwned]) -> None:
    """Note parameters of a pipeline, of which only some of its ranks have values."""
    for parameter, stage in stages.items():
        _stages[parameter] = stage


def whole_value(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return the whole of a parameter, its gradient or a state of its optimizer.

    Collective where ranks have parts of it. A tensor that every rank has whole is returned itself,
    and so is one without values, of a parameter of other stages of a pipeline.

    Args:
        tensor: What this rank has.
        parameter: Whose it is.
    """
    is_alike = tensor.shape == parameter.shape
    value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    part = _parts.get(parameter)
    return value if part is None or not is_alike else part.join(value)


@contextmanager
def gathered_parameters(
    module: nn.Module, names: Sequence[str] | None = None, *, writes: bool = False
) -> Iterator[dict[str, Parameter]]:
    """Make the parameters of a module whole on every rank, for as long as the block lasts.

    ::

        with gathered_parameters(model.head) as whole:
            print(whole["weight"].norm(), model.head.weight.shape)

        with gathered_parameters(model, ["blocks.0.*"], writes=True):
            nn.init.zeros_(model.blocks[0].out.weight)

    Collective: every rank of the model enters and leaves together, or they wait for each other;
    with a pipeline that is outside of steps, and takes in those without the stage that is named.
    Inside, the module's own attributes and ``parameters()`` are the whole ones, plain tensors
    without gradients; shards that are offloaded or tiled are read like any other. Each rank needs
    memory for all that is named: name what is needed.

    Args:
        module: What holds the parameters; a part of the model, or the whole.
        names: Dotted names within the module, or patterns as in a shell; all by default.
        writes: Write back what the block leaves in them: every rank's shard is set from the values
            of the first rank, wherever it is kept. After an error in the block nothing is written.

    Yields:
        The whole parameters by dotted name.

    Raises:
        ConfigError: When a name matches nothing, or when a parameter is changed in place and
            ``writes`` is not set.
    """
    places = _choose(module, names)
    gathered = _gathered_units(module, {place.parameter for place in places})
    for unit in gathered:
        unit.reshard()
    shards = {place: place.parameter for place in places}
    with torch.inference_mode(mode=False):  # an evaluation's; its tensors count no writes
        whole = {shard: _gather(shard) for shard in dict.fromkeys(shards.values())}
    versions = {shard: times_written(each) for shard, each in whole.items()}
    try:
        try:
            for place, shard in shards.items():
                setattr(place.module, place.key, whole[shard])
            yield {place.name: whole[shard] for place, shard in shards.items()}
        finally:
            for place, shard in shards.items():
                setattr(place.module, place.key, shard)
        if writes:
            for shard, each in whole.items():
                _scatter(each.detach(), shard)
    finally:
        for unit in gathered:
            unit.unshard()  # somebody is about to compute with it
    for place, shard in shards.items():
        if not writes and times_written(whole[shard]) != versions[shard]:
            raise ConfigError(
                f"{place.name!r} was changed inside of gathered_parameters(...), and the change is "
                f"lost. Write gathered_parameters(..., writes=True)."
            )


def shard_value(parameter: Tensor) -> Tensor:
    """This rank's shard of a parameter by value, wherever it is kept: maybe the shard itself."""
    local = local_tensor(parameter.detach())
    return local.read() if isinstance(local, OffloadedShard) else local


def _choose(module: nn.Module, names: Sequence[str] | None) -> list[_ParamSite]:
    places = [
        _ParamSite(f"{path}.{key}".lstrip("."), owner, key)
        for path, owner in module.named_modules()
        for key, _ in owner.named_parameters(recurse=False, remove_duplicate=False)
    ]
    if names is None:
        return places
    wanted = [names] if isinstance(names, str) else list(names)
    known = [place.name for place in places]
    for name in wanted:
        if not any(fnmatchcase(each, name) for each in known):
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.3)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"gathered_parameters names {name!r}, which no parameter of "
                f"{type(module).__name__} is called.{hint}"
            )
    return [each for each in places if any(fnmatchcase(each.name, name) for name in wanted)]


def _gathered_units(module: nn.Module, parameters: set[Parameter]) -> list[FSDPModule]:
    """Return the units whose gathered copies stand where some parameters' shards should."""
    below = [each for each in module.modules() if isinstance(each, FSDPModule)]
    # In one order on every rank: gathering them again is collective.
    candidates = sorted({*below, *_units}, key=unit_parameter_names)
    return [
        unit
        for unit in candidates
        if is_gathered(unit) and any(whole in parameters for _, whole in unit_parameters(unit))
    ]


@torch.no_grad()
def _gather(shard: Parameter) -> Parameter:
    """Return the whole of a parameter, itself where every rank has that. Collective."""
    if not isinstance(shard, DTensor) and shard not in _parts and shard not in _stages:
        return shard
    value = _gather_shards(shard) if isinstance(shard, DTensor) else shard.detach()
    if shard in _stages:
        value = _stages[shard].told(value)
    if shard in _parts:
        value = _parts[shard].join(value)
    return Parameter(value, requires_grad=shard.requires_grad)


def _gather_shards(shard: DTensor) -> Tensor:
    """Return what ranks of the data axis have shards of, in memory of its own."""
    local = shard_value(shard)
    value = DTensor.from_local(
        local.to(shard.device),
        shard.device_mesh,
        shard.placements,
        run_check=False,
        shape=shard.shape,
        stride=shard.stride(),
    ).full_tensor()
    if value.data_ptr() == local.data_ptr():
        value = value.clone()  # a single rank's shard is the whole
    return value


@torch.no_grad()
def _scatter(whole: Tensor, shard: Parameter) -> None:
    """Set every rank's shard from the whole parameter of the first rank. Collective."""
    stage, part = _stages.get(shard), _parts.get(shard)
    is_of_all = stage is None and part is None and isinstance(shard, DTensor)
    if dist.is_initialized() and not is_of_all:
        # The first of those that share these shards may be another rank than the first of all.
        dist.broadcast(whole, src=0)
    if stage is not None and not stage.is_held:
        return
    value = whole if part is None else part.cut(whole)
    if not isinstance(shard, DTensor):
        if value is not whole or stage is not None:
            shard.copy_(value)
        return
    value = distribute_tensor(value, shard.device_mesh, shard.placements, src_data_rank=0)
    local = local_tensor(shard.detach())
    if isinstance(local, OffloadedShard):
        local.write(local_tensor(value))
    else:
        local.copy_(local_tensor(value))
