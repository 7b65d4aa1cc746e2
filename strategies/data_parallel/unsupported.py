"""Refuses parts of a model that ZeRO would run wrongly without an error.

``explain_direct_use`` names the shards that a module computed with as if they were full parameters,
and the module that was called without its block. torch's error only says that it met two kinds of
tensor. Both are found afterwards in the local variables of the functions in its traceback.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from boltmesh.errors import ConfigError, UnsupportedError
from boltmesh.strategies.data_parallel.options import ZeroOptions
from boltmesh.strategies.dry_run.unsupported import refuse_undividable
from boltmesh.strategies.optimizer_probe import (
    matrix_use,
    mixes_elements,
    mixes_parameters,
    needs_all_ranks,
    shard_mismatch,
)
from boltmesh.strategies.owner_exchange import is_shard_of
from boltmesh.strategies.source_line import line_outside
from boltmesh.strategies.torch_compat.autograd import has_accumulation_hooks
from boltmesh.strategies.torch_compat.optimizers import lacks_shard_rules

if TYPE_CHECKING:
    from boltmesh.strategies.data_parallel.fully_shard import ShardedModel


def find_whole_optimizers(
    optimizers: Iterable[Optimizer],
    model: Module,
    options: ZeroOptions,
    group: ProcessGroup,
    *,
    has_parts: bool,
) -> list[Optimizer]:
    """Return the optimizers that must step whole parameters, one at a time, instead of shards.

    Collective over the ranks of the model's shards; with ``has_parts`` these are of a tensor part.

    Raises:
        UnsupportedError: Naming an optimizer whose step of a parameter needs other parameters,
            that communicates itself, whose state would go to a disk, or that steps experts whose
            rows are on other ranks.
    """
    kinds = {
        (each.device_mesh, each.placements): None
        for each in model.parameters()
        if isinstance(each, DTensor) and each.placements[-1].is_shard()
    }
    needs_elements = has_parts or options.has_offload
    found = []
    for optimizer in optimizers:
        why = matrix_use(optimizer)
        if why is None and needs_elements and mixes_elements(optimizer):
            why = "looks at more than one element at a time"
        if why is None and not options.has_offload and lacks_shard_rules(optimizer):
            why = "calls what torch has no rules for on shards"
        for mesh, placements in kinds:
            why = why or shard_mismatch(optimizer, mesh, placements)
        if why is None:
            continue
        if mixes_parameters(optimizer):
            raise _refused(optimizer, f"{why}, and with ZeROStrategy a rank has its shards alone")
        apart = needs_all_ranks(optimizer)
        if apart is not None:
            raise _refused(optimizer, apart)
        if options.offload_optimizer == "nvme":
            raise UnsupportedError(
                f"{type(optimizer).__name__} {why}: its state is kept whole in host memory, and "
                f"offload_optimizer='nvme' is to keep it on a disk. Use offload_optimizer='cpu', "
                f"or an optimizer that works on each element by itself, such as AdamW."
            )
        given = {id(each) for some in optimizer.param_groups for each in some["params"]}
        for name, each in model.named_parameters():
            is_shard = isinstance(each, DTensor) and each.placements[-1].is_shard()
            if id(each) in given and is_shard and not is_shard_of(each, group):
                raise UnsupportedError(
                    f"{type(optimizer).__name__} {why}, and {name!r} is divided over other ranks "
                    f"than the rest of the model, as experts may be. Give experts an optimizer "
                    f"that works on each element by itself, such as AdamW."
                )
        found.append(optimizer)
    return found


def _refused(optimizer: Optimizer, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{type(optimizer).__name__} {why}. Use bolt_ddp, or an optimizer that works on each "
        f"element by itself, such as AdamW."
    )


def refuse_empty_share(dataloader: object, group: ProcessGroup, device: torch.device) -> None:
    """Refuse a loader that has batches for some ranks and none for others.

    A rank without any batch runs no loop, and gathers need all ranks. Collective over ``group``.

    Raises:
        ConfigError: On every rank, with the numbers of batches.
    """
    length = sized_len(dataloader)
    lengths = torch.zeros(group.size(), dtype=torch.int64, device=device)
    lengths[group.rank()] = 1 if length is None else length
    dist.all_reduce(lengths, group=group)
    counts: list[int] = lengths.tolist()
    if min(counts) == 0 < max(counts):
        raise ConfigError(
            f"Ranks {[rank for rank, count in enumerate(counts) if not count]} of the data axis "
            f"would get no batch of {type(dataloader).__name__}, others up to {max(counts)}, and "
            f"gathering parameters needs every rank. Use a smaller batch_size, or fewer ranks."
        )


def refuse_parameters(module: LightningModule) -> None:
    """Refuse parameters that cannot be sharded.

    Raises:
        UnsupportedError: Naming the parameter.
    """
    refuse_undividable(
        module,
        instead="Use the Trainer that did it for this run too, or build a new module and load a "
        "checkpoint.",
        sparse="which cannot be sharded by rows",
    )
    for name, each in module.named_modules():
        if isinstance(each, (nn.Embedding, nn.EmbeddingBag)) and each.max_norm is not None:
            raise UnsupportedError(
                f"{name!r} of {type(module).__name__} has max_norm={each.max_norm}, and would "
                f"shorten rows of a gathered copy, which its shards know nothing of. Leave "
                f"max_norm out, or use bolt_ddp."
            )
    for name, parameter in module.named_parameters():
        if has_accumulation_hooks(parameter):
            raise UnsupportedError(
                f"{name!r} of {type(module).__name__} has a post-accumulate-grad hook, and its "
                f"gradient is made in whole parameters and kept in shards. Do it in "
                f"on_after_backward, or use bolt_ddp."
            )


def refuse_unsharded(optimizer: Optimizer, sharded: "ShardedModel") -> None:
    """Refuse parameters that were added to a module after it was sharded.

    Raises:
        UnsupportedError: Naming one that the optimizer is about to step.
    """
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        is_known = isinstance(parameter, DTensor) or parameter in sharded.absent
        if parameter.requires_grad and not is_known:
            names = {id(each): name for name, each in sharded.module.named_parameters()}
            raise UnsupportedError(
                f"{names.get(id(parameter), 'A parameter')!r} came into "
                f"{type(sharded.module).__name__} after ZeRO had sharded it in its first run, and "
                f"no gradients of it would be averaged. Make it before, and freeze it until it is "
                f"trained, or begin with a new module and Trainer."
            )


def refuse_lost_write(name: str) -> None:
    """Refuse a write to either a parameter's shard or its gathered copy, but not to both.

    Raises:
        UnsupportedError: Naming the parameter.
    """
    raise UnsupportedError(
        f"{name.removeprefix('module.')!r} was changed while it was gathered, in a step or in a "
        f"hook, and its shard cannot follow: the shard was changed too, or is of higher precision, "
        f"or of another shape or type. Change it inside of "
        f"boltmesh.strategies.gathered_parameters(module, writes=True)."
    )


def refuse_write_to_copy() -> None:
    """Refuse a write to a gathered part of a shard, such as some of its rows.

    Raises:
        UnsupportedError: Naming the line of the write.
    """
    raise UnsupportedError(
        f"A part of a tensor is written to ({line_outside()}), such as some of its rows, "
        f"and each rank has a shard of the tensor: the part is a copy, and the write would be "
        f"lost. Write to weights inside of boltmesh.strategies.gathered_parameters(module, "
        f"writes=True), and multiply a gradient by a mask in a hook of its parameter: "
        f"weight.register_hook(lambda gradient: gradient * mask)."
    )


def refuse_mixed_types(unit_name: str, unit: Module) -> None:
    """Refuse a unit whose trained parameters have several dtypes: a collective has one.

    Raises:
        UnsupportedError: Naming a parameter of each dtype.
    """
    examples: dict[torch.dtype, str] = {}
    for name, parameter in unit.named_parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            examples.setdefault(parameter.dtype, f"{unit_name}.{name}" if unit_name else name)
    if len(examples) > 1:
        listed = " and ".join(f"{name!r} is {dtype}" for dtype, name in examples.items())
        advice = (
            "Convert them to one type, freeze one of them, or set blocks so that they are in "
            "different units."
        )
        for dtype, name in examples.items():
            if dtype.is_complex:
                advice = (
                    f"Make torch.view_as_real of {name!r} the parameter, and "
                    f"torch.view_as_complex of it in the layer, or use bolt_ddp."
                )
        raise UnsupportedError(
            f"{listed}, and gradients of one unit are reduced together, in one type. {advice}"
        )


_SIGNS = ("mixed torch.Tensor and DTensor", "is offloaded and cannot be viewed")
_ADDED = "The error was:"
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_CALLS = {"_wrapped_call_impl", "_call_impl", "inner"}
"""Functions in which torch runs a module's hooks and its forward."""
_TILE_FUNCTIONS = {"LinearFunctionBackward", "EmbeddingFunctionBackward"}


def explain_direct_use(error: BaseException, sharded: "ShardedModel") -> None:
    """Name the parameters in an error of computing with a shard; leave any other error alone."""
    if _ADDED in str(error) or not any(sign in str(error) for sign in _SIGNS):
        return
    weights = {each.name: each.parameter for each in sharded.tiled}
    sizes = {name: each.numel() * each.element_size() for name, each in weights.items()}
    shards = _find_shards(error, sharded.module)
    in_tiles = [name for name in shards if name in sizes]
    listed = " and ".join(map(repr, in_tiles or shards))
    if in_tiles:
        advice = (
            f"{listed} is gathered in tiles, by its own layer alone, and was computed with as if "
            f"it was full. To look at it, read it inside of "
            f"boltmesh.strategies.gathered_parameters(...); to train through it, set "
            f"tile_linear_bytes to {max(sizes[name] for name in in_tiles)} or more"
        )
    else:
        blocks = [name for name in sharded.units if name]
        called = _find_called(error, sharded.module, blocks)
        ways = _ways_to_gather(shards, blocks, called)
        advice = (
            f"{listed or 'A parameter'} {'were' if len(shards) > 1 else 'was'} computed with while "
            f"sharded: the module ran without the forward of the block that gathers it, for "
            f"example by another method, or outside of a step. {ways}"
        )
    error.args = (f"{advice}. {_ADDED} {error}",)


def _ways_to_gather(shards: Sequence[str], blocks: Sequence[str], called: str) -> str:
    """Return advice on how to have the shards gathered before they are used.

    ``called`` is the module within a unit that was called without it; "" if none was found.
    """
    patterns = {name: _NUMBER.sub("*", name) for name in blocks}
    of_shards = {
        pattern
        for name, pattern in patterns.items()
        if any(each.startswith(f"{name}.") for each in shards)
    }
    others = dict.fromkeys(each for each in patterns.values() if each not in of_shards)
    ways = "call the block itself, or wrap the use in boltmesh.strategies.gathered_parameters"
    if called:
        named = [*dict.fromkeys([*patterns.values(), _NUMBER.sub("*", called)])]
        return f"Let it be gathered by itself, with blocks={named}, {ways}"
    if of_shards and others:
        return f"Let it be gathered with what is around it, with blocks={[*others]}, {ways}"
    if of_shards:
        return f"Use stage 2 if the block has run before in the step, {ways}"
    own = "Behind a backward pass of training_step's own, set self.automatic_optimization=False"
    return f"{own}, else {ways}"


def explain_transform(error: BaseException) -> None:
    """Name the alternative in an error of a transform of ``torch.func`` through layers."""
    places = [frame.f_code.co_filename for frame in _frames(error)]
    functorch = [Path(each).stem for each in places if f"{os.sep}_functorch{os.sep}" in each]
    is_transform = bool({*functorch} - {"functional_call"})  # which transforms nothing
    if _ADDED in str(error) or not (is_transform and any("fsdp" in each for each in places)):
        return
    advice = (
        "A transform of torch.func, such as grad or vmap, goes through layers whose parameters are "
        "sharded, and gathers cannot be transformed. Compute derivatives by torch.autograd.grad("
        "..., create_graph=True), or use bolt_ddp"
    )
    error.args = (f"{advice}. {_ADDED} {error}",)


def _find_called(error: BaseException, module: Module, units: Sequence[str]) -> str:
    """Return the module within a unit that was called without the unit, "" if none is found."""
    names = {each: name for name, each in module.named_modules()}
    for frame in _frames(error):
        caller = frame.f_locals.get("self")
        is_call = frame.f_code.co_name in _CALLS
        name = names.get(caller, "") if isinstance(caller, Module) and is_call else ""
        if name in units:
            return ""
        if name.startswith(tuple(f"{unit}." for unit in units)):
            return name
    return ""


def _frames(error: BaseException) -> list[FrameType]:
    """Return the frames of an error's traceback, the outermost first."""
    return [frame for frame, _ in walk_tb(error.__traceback__)]


def _find_shards(error: BaseException, module: Module) -> list[str]:
    names: dict[Tensor, str] = {
        param: name for name, param in module.named_parameters() if isinstance(param, DTensor)
    }
    for frame in reversed(_frames(error)):
        if shards := dict.fromkeys(_shards_in(frame, names)):
            return list(shards)
    return []


def _shards_in(frame: FrameType, names: Mapping[Tensor, str]) -> Iterator[str]:
    """Yield parameters that a function holds, whose attributes it names, or that it used."""
    for value in list(frame.f_locals.values()):
        if isinstance(value, DTensor):
            yield from [names[value]] if value in names else _leaves(value, names)
        elif isinstance(value, Module):
            for name, param in value.named_parameters():
                parts = {part for part in name.split(".") if not part.isdigit()}
                if param in names and parts <= set(frame.f_code.co_names):
                    yield names[param]


def _leaves(tensor: Tensor, names: Mapping[Tensor, str]) -> Iterator[str]:
    """Yield the parameters that a tensor was computed from, except through their tiles."""
    seen: set[Any] = {None}
    pending: list[Any] = [tensor.grad_fn]
    while pending:
        node = pending.pop()
        if node in seen or node.name() in _TILE_FUNCTIONS:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and leaf in names:
            yield names[leaf]
        pending += [before for before, _ in node.next_functions]
