"""Names the shards that an author's code computed with as if they were whole parameters.

Torch says only that it met two kinds of tensor. Which parameter it was is found after the fact: in
the statement that failed, or in the graph of a loss that became a shard itself.
"""

import ast
import linecache
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from boltmesh.strategies.tiling.weight import TiledWeight

_SIGN = "mixed torch.Tensor and DTensor"
_ADDED = "torch says:"


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
    names: dict[Tensor, str] = {
        each: name for name, each in module.named_parameters() if isinstance(each, DTensor)
    }
    found = names_in_statement(error, names) or names_in_loss(error, names)
    in_tiles = [name for name in found if name in sizes]
    listed = " and ".join(map(repr, in_tiles or found))
    if in_tiles:
        advice = (
            f"{listed} is gathered in tiles, by its own layer alone, and was computed with as if "
            f"it was whole. To look at it, read it inside of "
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


def names_in_statement(error: BaseException, names: Mapping[Tensor, str]) -> list[str]:
    """Return which parameters the innermost statement names that names any, by their names.

    Args:
        error: As it was caught, with its traceback.
        names: Of the parameters in question.
    """
    for trace in reversed(list(_traces(error.__traceback__))):
        frame = trace.tb_frame
        tensors = _tensors_in(frame.f_code.co_filename, trace.tb_lineno, frame.f_locals)
        found = dict.fromkeys(names[each] for each in tensors if each in names)
        if found:
            return list(found)
    return []


def names_in_loss(error: BaseException, names: Mapping[Tensor, str]) -> list[str]:
    """Return which parameters a loss depends on that a backward pass was to start from.

    What is computed of a shard is one, so a loss that a shard was added to is one too.
    """
    for trace in _traces(error.__traceback__):
        for value in list(trace.tb_frame.f_locals.values()):
            if isinstance(value, DTensor) and value.grad_fn is not None:
                return _names_in_graph(value, names)
    return []


def _names_in_graph(loss: Tensor, names: Mapping[Tensor, str]) -> list[str]:
    """Return the parameters that a graph has as they are, and not through a gathered tile."""
    found: dict[str, None] = {}
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node.name() in _OWN_FUNCTIONS:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and leaf in names:
            found[names[leaf]] = None
        waiting += [before for before, _ in node.next_functions]
    return list(found)


_OWN_FUNCTIONS = {"LinearFunctionBackward", "EmbeddingFunctionBackward"}
"""What a tile's layer leaves in a graph."""


def _traces(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _tensors_in(file: str, line: int, variables: Mapping[str, Any]) -> Iterator[Tensor]:
    """Give what the statement at a line reads, as far as it is a variable or part of a module."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # a cell of a notebook may hold more than Python
        return
    around = [
        each
        for each in ast.walk(tree)
        if isinstance(each, ast.stmt) and each.lineno <= line <= (each.end_lineno or each.lineno)
    ]
    if not around:
        return
    statement = min(around, key=lambda each: (each.end_lineno or each.lineno) - each.lineno)
    for node in ast.walk(statement):
        if isinstance(node, (ast.Attribute, ast.Name)):
            value = _value(node, variables)
            if isinstance(value, Tensor):
                yield value


def _value(node: ast.expr, variables: Mapping[str, Any]) -> Any:
    """Look a dotted name up without running anything of the author's."""
    if isinstance(node, ast.Name):
        return variables.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, variables)
        if isinstance(owner, Module):
            for parts in (owner._parameters, owner._modules):  # noqa: SLF001 - no properties
                if node.attr in parts:
                    return parts[node.attr]
    return None
