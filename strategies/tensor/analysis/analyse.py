"""Runs a step on tensors without data, and keeps what it says about the model's axes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module, MultiheadAttention, Parameter

from boltmesh.strategies.tensor.analysis.atoms import Dim
from boltmesh.strategies.tensor.analysis.trace import Trace, of_parameters
from boltmesh.strategies.tensor.analysis.watching import Watch, modules_watched
from boltmesh.strategies.torch_compat import (
    FakeTensorMode,
    fake_tensors,
    make_fake,
    swapped_state,
    tree_leaves,
)


@dataclass(frozen=True)
class ParameterFacts:
    """A parameter as far as a plan needs to know it."""

    name: str
    names: tuple[str, ...]
    """All names of a tied parameter, ``name`` first."""
    shape: tuple[int, ...]
    dims: tuple[Dim, ...]
    element_bytes: int

    @property
    def elements(self) -> int:
        """Of the whole."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Analysis:
    """What a step told about the axes of a model."""

    parameters: dict[str, ParameterFacts]
    """By first name, in the order of the model."""
    trace: Trace
    blocks: tuple[str, ...]
    """Names of the repeated blocks."""
    integers: dict[str, dict[str, int]] = field(default_factory=dict)
    """Attributes of modules that may be sizes, by name of the module."""
    classes: dict[str, type[Module]] = field(default_factory=dict)
    """Of modules, by name."""


def analyse(
    module: Module,
    run: Callable[[Module], object],
    *others: Callable[[Module], object],
    blocks: Mapping[str, Module],
) -> Analysis:
    """Find the logical axes of a model, from steps on tensors that have no data.

    Nothing is computed that depends on parameters, which may be on the meta device; what the
    steps change in Python is theirs to undo. No communication.

    Args:
        module: The model. Its parameters and buffers are swapped for others during the steps.
        run: Runs a step and returns what becomes of it, such as the loss. Given ``module``.
        others: More steps, of batches with other shapes: what any of them needs whole stays
            whole.
        blocks: The repeated blocks by dotted name.
    """
    names = _tied_names(module)
    parameters = {first: module.get_parameter(first) for first in names}
    attentions = (
        name for name, each in module.named_modules() if isinstance(each, MultiheadAttention)
    )
    trace = of_parameters(parameters, frozenset(attentions))
    for each in (run, *others):
        with _stand_ins(module, trace, list(names)) as persistent, modules_watched(module, trace):
            with torch.random.fork_rng(devices=[]), torch.enable_grad(), Watch(trace, persistent):
                result = each(module)
            for value in tree_leaves(result):
                if isinstance(value, Tensor):
                    trace.keep_whole(value, "the result of the step")
        trace.forget_labels()
    facts = {
        first: ParameterFacts(
            first,
            tuple(tied),
            tuple(parameters[first].shape),
            trace.parameters[first],
            parameters[first].element_size(),
        )
        for first, tied in names.items()
    }
    return Analysis(
        facts,
        trace,
        tuple(blocks),
        {name: _integers(each) for name, each in module.named_modules()},
        {name: type(each) for name, each in module.named_modules()},
    )


def _tied_names(module: Module) -> dict[str, list[str]]:
    """All names of each parameter by its first one."""
    firsts: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = firsts.setdefault(id(parameter), name)
        names.setdefault(first, []).append(name)
    return names


def _integers(module: Module) -> dict[str, int]:
    return {
        name: value
        for name, value in vars(module).items()
        if type(value) is int and value > 1 and not name.startswith("_")
    }


@contextmanager
def _stand_ins(module: Module, trace: Trace, names: list[str]) -> Iterator[set[int]]:
    """Give a model parameters without data and copies of its buffers; yield the ids of both."""
    mode = fake_tensors()
    swapped: dict[str, Tensor] = {}
    for name in names:
        swapped[name] = _without_data(module.get_parameter(name), mode)
        trace.set(swapped[name], trace.parameters[name], name)
    for name, buffer in module.named_buffers():
        swapped[name] = _without_data(buffer, mode) if buffer.is_meta else buffer.clone()
    with swapped_state(module, swapped):
        yield {id(each) for each in swapped.values()}


def _without_data(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A tensor of that shape; on the CPU for one on the meta device, where batches are not."""
    if not tensor.is_meta:
        return make_fake(tensor, mode)
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    if isinstance(tensor, Parameter):
        return Parameter(made, requires_grad=tensor.requires_grad)
    return made
