"""Names the shards that a module computed with as if they were full parameters.

torch's error says only that it met two kinds of tensor. The parameters are looked up after it: in
the variables of the functions that it passed, innermost first.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from boltmesh.strategies.tiling.weight import TiledWeight

_SIGN = "mixed torch.Tensor and DTensor"
_ADDED = "torch says:"
_TILE_FUNCTIONS = {"LinearFunctionBackward", "EmbeddingFunctionBackward"}


def explain_direct_use(error: BaseException, module: Module, tiled: Iterable[TiledWeight]) -> None:
    """Put the parameters into torch's error about two kinds of tensor; leave any other one alone.

    Args:
        error: As it was caught, with its traceback. May have been explained already.
        module: The sharded model.
        tiled: Its weights that are gathered in tiles.
    """
    if _SIGN not in str(error) or _ADDED in str(error):
        return
    sizes = {each.name: each.parameter.numel() * each.parameter.element_size() for each in tiled}
    found = _find_shards(error, module)
    in_tiles = [name for name in found if name in sizes]
    listed = " and ".join(map(repr, in_tiles or found))
    if in_tiles:
        advice = (
            f"{listed} is gathered in tiles, by its own layer alone, and was computed with as if "
            f"it was full. To look at it, read it inside of "
            f"boltmesh.strategies.gathered_parameters(...); to train through it, set "
            f"tile_linear_bytes to {max(sizes[name] for name in in_tiles)} or more"
        )
    else:
        advice = (
            f"{listed or 'A parameter'} was computed with while it was a shard: its module ran "
            f"without the forward of the block that gathers it, for example by another method, or "
            f"outside of a step. Call the block itself, name other blocks (blocks=[...]), or wrap "
            f"the use in boltmesh.strategies.gathered_parameters"
        )
    error.args = (f"{advice}. {_ADDED} {error}",)


def _find_shards(error: BaseException, module: Module) -> list[str]:
    names: dict[Tensor, str] = {
        param: name for name, param in module.named_parameters() if isinstance(param, DTensor)
    }
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in reversed(frames):
        if found := dict.fromkeys(_shards_in(frame, names)):
            return list(found)
    return []


def _shards_in(frame: FrameType, names: Mapping[Tensor, str]) -> Iterator[str]:
    """Return the parameters that a function holds, names by attributes, or has computed with."""
    for value in list(frame.f_locals.values()):
        if isinstance(value, DTensor):
            yield from [names[value]] if value in names else _leaves(value, names)
        elif isinstance(value, Module):
            for name, param in value.named_parameters():
                parts = {part for part in name.split(".") if not part.isdigit()}
                if param in names and parts <= set(frame.f_code.co_names):
                    yield names[param]


def _leaves(tensor: Tensor, names: Mapping[Tensor, str]) -> Iterator[str]:
    """Return the parameters that a tensor was computed from, but for those through their tiles."""
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
