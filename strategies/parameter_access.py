"""Access to parameters and gradients outside of the forward pass, where a rank holds parts of them.

``gathered_parameters`` gathers full parameters for the duration of a ``with`` block, to read them,
to average them or to set them, in the dtype that the optimizer keeps them in (fp32 also under
``bf16-mixed``). The axes register what they hold: units (ZeRO), shards in plain tensors (tensor
axis), stages (pipeline).

``GradientReads`` follows each read of ``.grad`` through the operations of a hook. The hook may
compute Python numbers from gradients, such as a norm of its own:

- A number computed from a shard (a DTensor of ZeRO) is reduced over the ranks that share the
  parameter: ``item()`` would return that of this rank's shard.
- A number computed from the gradient of a parameter that a tensor axis divides is refused.
- With stages of a pipeline a number from one parameter is right while it stays a tensor, as to
  scale that gradient. It is refused if it is read, or combined with those of other parameters.

Elsewhere a Python number computed from a shard is refused, also from that of a weight.

``WholeShapes`` makes parts return the shape of the full parameter.
"""

import difflib
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from boltmesh.errors import ConfigError, UnsupportedError
from boltmesh.strategies.checkpoint.chunks import DimDivision
from boltmesh.strategies.grad_norm import HeldShare, NormShare, PartShare
from boltmesh.strategies.offload.shard_tensor import OffloadedShard
from boltmesh.strategies.owner_exchange import JoinedPart
from boltmesh.strategies.patch import members_replaced
from boltmesh.strategies.pytree import tensors_in
from boltmesh.strategies.source_line import line_outside
from boltmesh.strategies.torch_compat.fsdp import is_gathered, unit_parameter_names, unit_parameters
from boltmesh.strategies.torch_compat.gathered_writes import GatheredParameter
from boltmesh.strategies.torch_compat.tensors import (
    check_number_reads,
    dtensor_like,
    functions_unwatched,
    is_equal,
    local_tensor,
    times_written,
)

_units: "WeakSet[FSDPModule]" = WeakSet()
"""Units of every sharded model of this process. A unit may hold parameters of a module of which it
is no part."""


_parts: MutableMapping[Tensor, JoinedPart] = WeakTensorKeyDictionary()
"""Entries of every model of this process, by parameter."""


class StageOwned(Protocol):
    """Sends a parameter that some stages of a pipeline hold to the ranks of the other stages."""

    @property
    def is_held(self) -> bool:
        """Whether this rank has the values of the parameter."""

    def broadcast_value(self, value: Tensor) -> Tensor:
        """Return a copy of the value that the holders have. Collective over the pipeline.

        Args:
            value: This rank's tensor, of which only holders' values count; same shape and dtype on
                all ranks.
        """


_stages: MutableMapping[Tensor, StageOwned] = WeakTensorKeyDictionary()
"""Entries of every model of this process that is on a pipeline, by parameter."""


class _ParamSite(NamedTuple):
    """The place where a parameter is registered."""

    name: str
    module: nn.Module
    key: str

    @property
    def parameter(self) -> Parameter:
        """The parameter that is registered there now."""
        found = getattr(self.module, self.key)
        assert isinstance(found, Parameter)
        return found


def register_units(units: Iterable[FSDPModule]) -> None:
    """Register the units of a model, so that their parameters can be read while one is gathered.

    From now on, reading a Python number of a sharded DTensor is refused: it would be this rank's.
    """
    _units.update(units)
    check_number_reads(_refuse_number_of_shard)


def _refuse_number_of_shard(tensor: DTensor) -> None:
    mesh = tensor.device_mesh
    if all(each.is_replicate() or mesh.size(at) == 1 for at, each in enumerate(tensor.placements)):
        return
    raise UnsupportedError(
        f"A number of a tensor is read ({line_outside()}) of which each rank has a "
        f"shard, so that ranks would get different ones. The norm of gradients is "
        f"trainer.strategy.gradient_norm(optimizer) on all ranks; other numbers of gradients can "
        f"be made in on_after_backward and on_before_optimizer_step, on all ranks, and numbers of "
        f"weights within boltmesh.strategies.gathered_parameters(module)."
    )


def register_shards(parts: Mapping[Parameter, JoinedPart]) -> None:
    """Register parameters of which this rank holds parts in plain tensors."""
    for parameter, part in parts.items():
        _parts[parameter] = part


def is_part(parameter: Parameter) -> bool:
    """Whether this rank holds only a part of a parameter, in a plain tensor."""
    return parameter in _parts


def forget_parts(parameters: Iterable[Parameter]) -> None:
    """Forget that parameters were parts: they are full again."""
    for each in parameters:
        _parts.pop(each, None)


def register_stages(stages: Mapping[Parameter, StageOwned]) -> None:
    """Register parameters of a pipeline, which only some of its ranks hold."""
    for parameter, stage in stages.items():
        _stages[parameter] = stage


def whole_value(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return the full tensor of a parameter, its gradient or a state of its optimizer.

    Collective if ranks hold parts of it. Returns the tensor itself if every rank holds all of it,
    or if it belongs to a parameter of other pipeline stages and has no values.

    Args:
        tensor: This rank's tensor; it is in parts if it has the shape of ``parameter``.
        parameter: The parameter that it belongs to, this rank's shard or part.
    """
    is_alike = tensor.shape == parameter.shape
    value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    part = _parts.get(parameter)
    return value if part is None or not is_alike else part.join(value)


@contextmanager
def gathered_parameters(
    module: nn.Module, names: Sequence[str] | None = None, *, writes: bool = False
) -> Iterator[dict[str, Parameter]]:
    """Gather the parameters of a module on every rank for the duration of the block.

    ::

        with gathered_parameters(model.head) as whole:
            print(whole["weight"].norm(), model.head.weight.shape)

        with gathered_parameters(model, ["blocks.0.*"], writes=True):
            nn.init.zeros_(model.blocks[0].out.weight)

    Collective: every rank of the model enters and leaves together. With a pipeline call it outside
    of steps, on the ranks of all stages. Inside, the module's own attributes and ``parameters()``
    are the full ones, plain tensors without gradients; offloaded and tiled shards are included.
    Each rank needs memory for all named parameters: name only those you need.

    Args:
        module: The model or a part of it.
        names: Dotted names within the module, or shell patterns; None: all.
        writes: Write changes back: every rank's shard is set from the values of the first rank,
            wherever it is kept. After an error in the block nothing is written.

    Yields:
        The full parameters by dotted name.

    Raises:
        ConfigError: If a name matches nothing, or if a parameter is changed in place and ``writes``
            is not set.
    """
    places = _choose(module, names)
    gathered = _gathered_units(module, {place.parameter for place in places})
    for unit in gathered:
        unit.reshard()
    shards = {place: place.parameter for place in places}
    with torch.inference_mode(mode=False):  # inference tensors count no writes
        whole = {shard: _gather(shard) for shard in dict.fromkeys(shards.values())}
    versions = {shard: times_written(each) for shard, each in whole.items()}
    try:
        values = [(place.module, place.key, whole[shard]) for place, shard in shards.items()]
        with members_replaced(values):
            yield {place.name: whole[shard] for place, shard in shards.items()}
        if writes:
            for shard, each in whole.items():
                _scatter(each.detach(), shard)
    finally:
        for unit in gathered:
            unit.unshard()  # it was gathered for a computation
    for place, shard in shards.items():
        if not writes and _is_written(whole[shard], shard, versions[shard]):
            raise ConfigError(
                f"{place.name!r} was changed inside of gathered_parameters(...), and the change is "
                f"lost. Write gathered_parameters(..., writes=True)."
            )


def shard_value(parameter: Tensor) -> Tensor:
    """Return the values of this rank's shard, wherever it is kept; may be the shard itself."""
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
    """Return the units whose gathered copies replace some parameters' shards at the moment."""
    below = [each for each in module.modules() if isinstance(each, FSDPModule)]
    # The same order on every rank: gathering them again is collective.
    candidates = sorted({*below, *_units}, key=unit_parameter_names)
    return [
        unit
        for unit in candidates
        if is_gathered(unit) and any(whole in parameters for _, whole in unit_parameters(unit))
    ]


@torch.no_grad()
def _gather(shard: Parameter) -> Parameter:
    """Return the full parameter; itself if every rank holds all of it. Collective."""
    if not isinstance(shard, DTensor) and shard not in _parts and shard not in _stages:
        return shard
    value = _gather_shards(shard) if isinstance(shard, DTensor) else shard.detach()
    if shard in _stages:
        value = _stages[shard].broadcast_value(value)
    if shard in _parts:
        value = _parts[shard].join(value)
    return GatheredParameter(value, requires_grad=shard.requires_grad)


def _gather_shards(shard: DTensor) -> Tensor:
    """Return the full tensor of a parameter sharded over the data axis, in its own memory."""
    local = shard_value(shard)
    value = dtensor_like(local.to(shard.device_mesh.device_type), shard).full_tensor()
    if value.data_ptr() == local.data_ptr():
        value = value.clone()  # a single rank's shard is the full tensor
    return value


@torch.no_grad()
def _scatter(whole: Tensor, shard: Parameter) -> None:
    """Set every rank's shard from the full parameter of the first rank. Collective."""
    stage, part = _stages.get(shard), _parts.get(shard)
    is_of_all = stage is None and part is None and isinstance(shard, DTensor)
    if dist.is_initialized() and not is_of_all:
        # The first rank of those that hold these shards may not be rank 0.
        dist.broadcast(whole, src=0)
    if stage is not None and not stage.is_held:
        return
    value = whole if part is None else part.cut(whole)
    if not isinstance(shard, DTensor):
        if value is not whole or stage is not None:
            shard.copy_(value)
        return
    value = distribute_tensor(value, shard.device_mesh, shard.placements, src_data_rank=0)
    local_tensor(shard.detach()).copy_(local_tensor(value))


@torch.no_grad()
def _is_written(whole: Parameter, shard: Parameter, version: int) -> bool:
    """Whether a gathered parameter was written to; by value where it may have been by ``.data``."""
    if times_written(whole) != version:
        return True
    stage, part = _stages.get(shard), _parts.get(shard)
    is_absent = stage is not None and not stage.is_held
    if is_absent or not getattr(whole, "was_data_used", False):
        return False
    value = whole.detach() if part is None else part.cut(whole.detach())
    if isinstance(shard, DTensor):
        mesh, placements = shard.device_mesh, shard.placements
        value = local_tensor(distribute_tensor(value, mesh, placements, src_data_rank=None))
    return value.shape != shard_value(shard).shape or not is_equal(value, shard_value(shard))


_GRAD: Any = Tensor.grad  # torch declares its descriptor as a plain attribute

_READERS = {"item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__format__"}
"""Methods that turn a tensor into Python or NumPy values."""


@dataclass(frozen=True)
class _GradientSource:
    """The gradients that a tensor was computed from."""

    parameters: frozenset[int]
    """The parameters of these gradients, by ``id``."""
    is_number: bool


class GradientReads(TorchFunctionMode):
    """Reduces or refuses Python numbers computed from gradients, see the module's docstring.

    Where a hook computes a number from a gradient, that is collective over the ranks that shard the
    parameter.
    """

    def __init__(self, shares: Iterable[NormShare]) -> None:
        super().__init__()
        divided = [each for each in shares if each.group.size() > 1]
        self._has_stages = any(isinstance(each, HeldShare) for each in divided)
        self._parts = {
            id(parameter)
            for each in divided
            if isinstance(each, PartShare)
            for parameter in each.parts()
        }
        self._origins: Any = WeakTensorKeyDictionary()

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__self__", None) is _GRAD:
            if isinstance(result, Tensor):
                self._origins[result] = _GradientSource(frozenset([id(args[0])]), is_number=False)
            return result
        given = [each for each in tensors_in((args, kwargs)) if each in self._origins]
        if not given:
            return result
        with functions_unwatched():
            return self._follow(func, given, result)

    def _follow(self, func: Callable[..., Any], given: Sequence[Tensor], result: Any) -> Any:
        origins = [self._origins[each] for each in given]
        parameters = frozenset().union(*(each.parameters for each in origins))
        has_number = any(each.is_number for each in origins)
        if has_number and (self._is_joint(parameters) or func.__name__ in _READERS):
            self._refuse(parameters)
        largest = max(each.numel() for each in given)
        if isinstance(result, (list, tuple)):
            made = [self._note(each, parameters, largest, has_number) for each in result]
            return type(result)(made) if type(result) in {list, tuple} else result
        return self._note(result, parameters, largest, has_number)

    def _note(self, result: Any, parameters: frozenset[int], largest: int, has_number: bool) -> Any:
        if not isinstance(result, Tensor) or result in self._origins:
            return result
        is_number = result.numel() == 1 and (has_number or largest > 1)
        if result.numel() == 1 < largest:
            if self._is_joint(parameters) or parameters & self._parts:
                self._refuse(parameters)
            result = _reduced(result)
        self._origins[result] = _GradientSource(parameters, is_number)
        return result

    def _is_joint(self, parameters: Collection[int]) -> bool:
        return self._has_stages and len(parameters) > 1

    def _refuse(self, parameters: frozenset[int]) -> None:
        if not self._has_stages and not parameters & self._parts:
            return
        has = "a part of these" if parameters & self._parts else "those of its stages alone"
        raise UnsupportedError(
            f"A hook ({line_outside()}) makes a number of gradients, and a rank has "
            f"{has}. Take trainer.strategy.gradient_norm(optimizer), the norm over all ranks of "
            f"the model, which is finite if all gradients are, and clip by self.clip_gradients or "
            f"torch.nn.utils.clip_grad_norm_."
        )


def _reduced(number: Tensor) -> Tensor:
    if not isinstance(number, DTensor) or not any(each.is_partial() for each in number.placements):
        return number
    return number.redistribute(placements=[Replicate()] * number.device_mesh.ndim)


_SHAPE_READS = (Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__)  # type: ignore[attr-defined]


class WholeShapes(TorchFunctionMode):
    """Makes parameters return their full shapes, for learning rates and groups that depend on them.

    Args:
        module: The module with the parameters.
        division: Returns by name how a parameter is divided of which this rank has a part in a
            plain tensor, else None.
    """

    def __init__(
        self, module: nn.Module | None, division: Callable[[str], DimDivision | None]
    ) -> None:
        super().__init__()
        self._whole: dict[int, Tensor] = {}
        for name, parameter in () if module is None else module.named_parameters():
            if (found := division(name)) is not None:
                self._whole[id(parameter)] = torch.empty(found.shape, device="meta")

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _SHAPE_READS and id(args[0]) in self._whole:
            args = (self._whole[id(args[0])], *args[1:])
        return func(*args, **(kwargs or {}))
