"""Suppresses logging and metric updates during a dry run of a step, and restores what it changes.

Restored are attributes, buffers and parameters of modules, attributes of their Trainer, values of
its optimizers and schedulers, and random states.
"""

import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from itertools import chain
from operator import is_
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from boltmesh.lightning_import import ROOTS
from boltmesh.strategies.dry_run.metrics import (
    MetricCall,
    MetricKind,
    answer,
    find_metrics,
    metrics_replaced,
)
from boltmesh.strategies.lightning_compat.trainer import attributes_of_run, trainer_of
from boltmesh.strategies.object_collectives import noop
from boltmesh.strategies.patch import patched
from boltmesh.strategies.random_state import (
    generators_unchanged,
    held_generators,
    random_state_unchanged,
)
from boltmesh.strategies.torch_compat.tensors import (
    is_equal,
    local_tensor,
    storage_key,
    times_written,
    tree_leaves,
)

CONTAINERS = (dict, list, set, OrderedDict, defaultdict, Counter, deque)
_CONTAINERS = frozenset(CONTAINERS)
_NESTED = (*CONTAINERS, tuple)
_PLAIN = frozenset({bool, int, float, str, type(None)})

MOST_MEMBERS = 256
"""Larger containers are not searched: lists for several loaders are small, datasets are not."""

_FRAMEWORKS = ROOTS | {"torch"}
"""Packages whose classes keep no state of a step."""


@contextmanager
def modules_unchanged(modules: Iterable[Module]) -> Iterator[None]:
    """Undo changes to attributes and buffers of modules, not of their children.

    Attributes are restored to the same objects, and lists, sets and dictionaries to the same
    members, nested ones too, such as a list for each of several loaders, and attributes of classes.
    Buffers get their values back if they were written, also through ``.data``, which no version
    counts, and by kernels of batch norms. Generators of random numbers get their states back. The
    same is done for the Trainer that a LightningModule is attached to: its attributes
    (``should_stop``), its loops, the groups of its optimizers.
    """
    modules = list(modules)
    run, groups = _run_of(modules)
    attributes = [(each, dict(each)) for each in (*map(vars, modules), *run)]
    containers: dict[int, tuple[Any, Any]] = {}
    empty: list[Any] = []
    for each in (*(now for now, _ in attributes), *map(vars, _classes_of(modules))):
        _add_containers(each.values(), containers, empty, depth=2)
    _add_containers(groups, containers, empty, depth=2)
    tensors = [buffer for each in modules for buffer in each.buffers(recurse=False)]
    tensors += [
        value for each in chain(*groups) for value in each.values() if torch.is_tensor(value)
    ]
    buffers = [
        (buffer, times_written(buffer), buffer.data, buffer.detach().clone())
        for buffer in tensors
        if not (buffer.is_inference() or buffer.is_meta or _is_expanded(buffer))
    ]
    try:
        with generators_unchanged(held_generators(modules)):
            yield
    finally:
        for now, before in attributes:
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)
        for container, members in containers.values():
            if not holds(container, members):  # another thread may be reading it
                refill(container, members)
        for container in empty:
            if container:
                container.clear()
        with torch.no_grad():
            for buffer, written, memory, value in buffers:
                if buffer.data_ptr() != memory.data_ptr():
                    buffer.data = memory
                if times_written(buffer) != written:
                    buffer.copy_(value)
                elif not is_equal(buffer, value):
                    buffer.data.copy_(value)  # in the same way, so that no saved tensor is invalid


_IN_PLACE = re.compile(
    r"data\.__set__|__setitem__|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor)__"
    r"|(?!requires_grad_|detach_|share_memory_)[a-z][a-z0-9_]*[a-z0-9]_"
)


@cache
def writes_to_first(name: str) -> bool:
    """Whether a function of that name writes to its first argument, and gives it or nothing."""
    return bool(_IN_PLACE.fullmatch(name))


def name_of(function: Callable[..., Any]) -> str:
    """Return the Python name of a function of torch; a property has its own name."""
    name = getattr(function, "__name__", "")
    if name in {"__get__", "__set__", "__delete__"}:
        return f"{getattr(function.__self__, '__name__', name)}.{name}"  # type: ignore[attr-defined]
    return name or type(function).__name__


class ParametersUnchanged(TorchFunctionMode):
    """Undoes writes of torch functions to parameters of a module at its end.

    A parameter is copied before the first write to it.
    """

    def __init__(self, module: Module) -> None:
        super().__init__()
        self._parameters = {storage_key(local_tensor(each)): each for each in module.parameters()}
        self._before: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if args and writes_to_first(name_of(func).removeprefix("_foreach_")):
            for each in filter(torch.is_tensor, tree_leaves(args[0])):
                try:
                    parameter = self._parameters.get(storage_key(local_tensor(each)))
                except NotImplementedError:  # a tensor of vmap has no storage
                    continue
                if parameter is not None and id(parameter) not in self._before:
                    memory = local_tensor(parameter).data
                    self._before[id(parameter)] = parameter, memory, memory.clone()
        return func(*args, **(kwargs or {}))

    def changed(self) -> dict[Tensor, Tensor]:
        """Return copies of the values of changed parameters, in their shapes, by parameter."""
        now = {each: local_tensor(each).detach() for each, _, _ in self._before.values()}
        before = {each: value for each, _, value in self._before.values()}
        return {
            each: value.clone() for each, value in now.items() if not is_equal(value, before[each])
        }

    @override
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for parameter, memory, value in self._before.values():
            memory.copy_(value)  # in place: other tensors may share it
            if local_tensor(parameter) is parameter:
                parameter.data = memory


def _is_expanded(buffer: Tensor) -> bool:
    """Whether elements share memory, as in a stand-in for a buffer that is not materialized."""
    return any(
        stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)
    )


def _run_of(modules: Iterable[Module]) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """Return attributes of the run that modules are part of, and the groups of its optimizers."""
    trainers = (trainer_of(each) for each in modules if isinstance(each, LightningModule))
    trainer = next((each for each in trainers if each is not None), None)
    if trainer is None:
        return [], []
    return attributes_of_run(trainer), [each.param_groups for each in trainer.strategy.optimizers]


def _classes_of(modules: Iterable[Module]) -> set[type]:
    """Return the classes of modules and their bases, except those of frameworks."""
    classes = {each for kind in set(map(type, modules)) for each in kind.__mro__}
    return {each for each in classes if each.__module__.partition(".")[0] not in _FRAMEWORKS}


def _add_containers(
    values: Iterable[Any],
    containers: dict[int, tuple[Any, Any]],
    empty: list[Any],
    *,
    depth: int,
) -> None:
    """Add each container among values, nested ones too, with a copy and by identity.

    Most are empty, such as a module's dictionaries of hooks: they are added to a list.
    """
    for value in values:
        kind = type(value)
        if kind in _CONTAINERS:
            if not value:
                empty.append(value)
                continue
            if id(value) not in containers:
                containers[id(value)] = value, value.copy()
        elif kind is not tuple:
            continue
        if depth > 1 and 0 < len(value) <= MOST_MEMBERS:
            members = value.values() if isinstance(value, dict) else value
            _add_containers(members, containers, empty, depth=depth - 1)


def leaves_of(attribute: Any) -> list[Any]:
    """Return what an attribute holds, nested too; nothing of a large container, which is data."""
    if type(attribute) in _PLAIN:
        return [attribute]
    if isinstance(attribute, _NESTED) and not 0 < len(attribute) <= MOST_MEMBERS:
        return []
    return tree_leaves(attribute)


def holds(container: Any, members: Any) -> bool:
    """Whether a container has the same objects as an earlier copy of it."""
    if len(container) != len(members):
        return False
    return all(map(is_, _contents(container), _contents(members)))


def _contents(container: Any) -> Iterable[Any]:
    return chain.from_iterable(container.items()) if isinstance(container, dict) else container


def refill(container: Any, members: Any) -> None:
    """Give a container the members of an earlier copy of it."""
    container.clear()
    if isinstance(container, list | deque):
        container.extend(members)
    else:
        container.update(members)


def no_side_effects(
    module: LightningModule, metrics: Mapping[str, MetricKind]
) -> AbstractContextManager[None]:
    """Context in which nothing is logged, and metrics are not updated."""
    logs = patched(module, log=noop)  # which self.log_dict calls too
    # Entered for each microbatch; most models have no metrics.
    return _with_metrics_kept(logs, metrics) if metrics else logs


@contextmanager
def _with_metrics_kept(
    logs: AbstractContextManager[None], metrics: Mapping[str, MetricKind]
) -> Iterator[None]:
    def act(call: MetricCall) -> Any:
        return answer(call.metric, call.method, call.args, call.kwargs)

    with logs, metrics_replaced(metrics, act):
        yield


@contextmanager
def untraced(module: LightningModule, device: torch.device) -> Iterator[None]:
    """Context of a run of a step that logs nothing, and changes neither modules nor generators."""
    with (
        random_state_unchanged(device),
        modules_unchanged(module.modules()),
        no_side_effects(module, find_metrics(module)),
    ):
        yield
