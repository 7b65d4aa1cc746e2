"""Materializes the modules of one unit: on the device, with equal values on all ranks of a group.

Called for the units of a model bottom-up, each right before it is sharded, so that a rank never
holds more than one unit in addition to its shards.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from boltmesh.errors import ConfigError
from boltmesh.strategies.blocks import find_blocks
from boltmesh.strategies.deferred_initialization.deferred import is_deferred, replay
from boltmesh.strategies.deferred_initialization.recording import map_leaves, tensors_of
from boltmesh.strategies.offload.host_memory import give_back_free_memory
from boltmesh.strategies.random_state import capture_random_state, restore_random_state
from boltmesh.strategies.torch_compat.communication import broadcast_coalesced
from boltmesh.strategies.torch_compat.tensors import components_of, is_composite

_LARGE_BYTES = 1 << 20


@torch.no_grad()
def prepare_unit(
    unit: nn.Module | Sequence[nn.Module],
    *,
    device: torch.device,
    group: ProcessGroup,
    name: str = "",
) -> dict[nn.Parameter, nn.Parameter]:
    """Make a unit's parameters and buffers real, on ``device``, with the first rank's values.

    Collective over ``group``. Parameters deferred by ``deferred_init`` are replayed on the first
    rank and broadcast. Those on plain ``meta`` are set by their module's ``reset_parameters``. Real
    tensors are moved. Modules below that ``fully_shard`` has sharded, and parameters that are
    DTensors, are not touched. Parameters on ``meta`` become other objects, the same object wherever
    the unit uses it. All parameters are contiguous afterwards.

    Args:
        unit: A module, or several that are sharded as one.
        device: Target device.
        group: Ranks that get equal values.
        name: The unit's dotted name, for messages.

    Returns:
        The new parameter for each parameter that was on ``meta``.

    Raises:
        ConfigError: If a module on ``meta`` has no ``reset_parameters``.
    """
    modules = own_modules([unit] if isinstance(unit, nn.Module) else unit, name)
    made = prepare_modules(modules, device=device, group=group)
    lay_in_rows(modules)
    return made


def lay_in_rows(modules: Iterable[nn.Module]) -> None:
    """Make modules' own parameters contiguous: FSDP2 does not accept ``channels_last``."""
    for module in modules:
        for _, each in own_tensors(module):
            if isinstance(each, nn.Parameter) and not each.is_contiguous():
                each.data = each.data.contiguous()


@torch.no_grad()
def prepare_modules(
    modules: dict[nn.Module, str], *, device: torch.device, group: ProcessGroup
) -> dict[nn.Parameter, nn.Parameter]:
    """Like ``prepare_unit``, for the modules' own tensors, without those of children.

    Args:
        modules: Modules with their dotted names, parents first.
        device: Target device.
        group: Ranks that get equal values.
    """
    give_back_free_memory()  # of the previous unit, which is sharded by now
    replaced = _make_modules(modules, device, has_values=group.rank() == 0)
    made = [tensor for module in modules for _, tensor in own_tensors(module)]
    broadcast_tensors(made, group)
    return replaced


@torch.no_grad()
def materialize(module: nn.Module, device: torch.device | str = "cpu") -> None:
    """Give tensors on ``meta`` values, deferred or plain, in this process; move real ones. Local.

    For a model that was built under ``deferred_init`` and is used without a strategy. Strategies
    whose ranks keep full models call it on every rank, and then broadcast the values of the first
    one.

    Raises:
        ConfigError: If a module on ``meta`` has no ``reset_parameters``.
    """
    _make_modules(own_modules([module], ""), torch.device(device), has_values=True)


def broadcast_tensors(tensors: Sequence[Tensor], group: ProcessGroup) -> None:
    """Broadcast tensors of any shape from the group's first rank, in place. Collective."""
    if group.size() == 1:
        return
    different = [
        each for tensor in dict.fromkeys(tensors) for each in components_of(tensor.detach())
    ]
    # Small tensors are sent together; for large ones that would double the memory.
    if small := [each for each in different if each.nbytes < _LARGE_BYTES]:
        broadcast_coalesced(small, group)
    for tensor in different:
        if tensor.nbytes >= _LARGE_BYTES:
            flat = tensor.contiguous().view(-1)
            dist.broadcast(flat, group=group, group_src=0)
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))


@contextmanager
def values_in_calls(root: nn.Module) -> Iterator[None]:
    """Context in which a deferred model can compute in this process, block by block.

    A repeated block has values while it runs, all other modules until the end. Afterwards every
    tensor is the one from before. For steps without autograd, whose graph would keep values.

    Raises:
        ConfigError: If a module on ``meta`` has no ``reset_parameters``.
    """
    blocks: dict[str, nn.Module] = {}
    for name, block in find_blocks(root).items():
        if not name.startswith(tuple(f"{outer}." for outer in blocks)):
            blocks[name] = block
    # Modules with names in several places, or beside blocks, may run while no block does.
    homes: dict[nn.Module, set[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        home = next((name for name in blocks if f"{path}.".startswith(f"{name}.")), "")
        homes.setdefault(module, set()).add(home)
    around = {
        module: path
        for module, path in own_modules([root], "").items()
        if "" in homes[module] or len(homes[module]) > 1
    }
    with ExitStack() as stack:
        for name, block in blocks.items():
            made = _MadeInCalls(own_modules([block], name))
            stack.callback(block.register_forward_pre_hook(made.begin, prepend=True).remove)
            stack.callback(block.register_forward_hook(made.end, always_call=True).remove)
        stack.enter_context(made_for_now(around))
        yield


class _MadeInCalls:
    """Hooks of a block that has values while it runs."""

    def __init__(self, modules: dict[nn.Module, str]) -> None:
        self._modules = modules
        self._calls: list[ExitStack] = []

    def begin(self, *_: object) -> None:
        """Make the block's tensors, unless it is running already."""
        self._calls.append(ExitStack())
        self._calls[-1].enter_context(made_for_now(self._modules))

    def end(self, *_: object) -> None:
        """Remove the values that this call has made."""
        if self._calls:
            self._calls.pop().close()


@contextmanager
def made_for_now(modules: dict[nn.Module, str]) -> Iterator[None]:
    """Context in which these modules' own tensors have values on the CPU, in this process. Local.

    Args:
        modules: Modules with their dotted names, parents first.

    Raises:
        ConfigError: If a module on ``meta`` has no ``reset_parameters``.
    """
    deferred = [
        (module, key, value)
        for module in modules
        for key, value in (
            *((key, each) for key, each in own_tensors(module) if each.is_meta),
            *deferred_attributes(module),
        )
    ]
    if not deferred:
        yield
        return
    state = capture_random_state()  # some modules draw their values
    try:
        with torch.no_grad():
            _make_modules(modules, torch.device("cpu"), has_values=True)
        restore_random_state(state)
        yield
    finally:
        for module, key, value in deferred:
            setattr(module, key, value)
        give_back_free_memory()


def _make_modules(
    modules: dict[nn.Module, str], device: torch.device, *, has_values: bool
) -> dict[nn.Parameter, nn.Parameter]:
    """Make tensors on ``meta``, move others; return new parameters by those on ``meta``."""
    known: dict[int, tuple[Tensor, Tensor]] = {}

    def make(tensor: Tensor, name: str, *, has_values: bool) -> Tensor:
        if id(tensor) not in known:
            # The old one is kept too: its id must not be reused for another tensor.
            known[id(tensor)] = tensor, _make(tensor, name, device, has_values=has_values)
        return known[id(tensor)][1]

    to_reset = [module for module, path in modules.items() if is_to_reset(module, path)]
    for module, path in modules.items():
        for key, tensor in own_tensors(module):
            made = make(tensor, f"{path}.{key}".lstrip("."), has_values=has_values)
            if made is not tensor:
                setattr(module, key, made)
        make_attributes(module, lambda tensor: make(tensor, "", has_values=True))
    # Children first: a parent may set what its children have just reset.
    for module in reversed(to_reset):
        module.reset_parameters()  # type: ignore[operator]
    return {
        old: made
        for old, made in known.values()
        if made is not old and isinstance(old, nn.Parameter) and isinstance(made, nn.Parameter)
    }


def _make(tensor: Tensor, name: str, device: torch.device, *, has_values: bool) -> Tensor:
    """Return a tensor on the device, with values or uninitialized; a real one is moved."""
    if not tensor.is_meta:
        if is_composite(tensor):  # whose ``data`` cannot be set to that of another device
            is_there = all(each.device == device for each in components_of(tensor))
            return tensor if is_there else nn.Parameter(tensor.to(device), requires_grad=False)
        tensor.data = tensor.data.to(device)
        return tensor
    if is_deferred(tensor) and has_values:
        made = make_values(tensor, name, device)
    else:
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        vars(made).update(vars(tensor))  # models mark parameters with attributes
    return made


def make_values(tensor: Tensor, name: str, device: torch.device) -> Tensor:
    """Return the values of a deferred tensor, contiguous on a device, in their own memory."""
    made = replay(tensor, name).to(device).contiguous()
    if made.untyped_storage().nbytes() > made.nbytes:
        made = made.clone()  # a view would keep the full storage
    give_back_free_memory()
    return made


def is_to_reset(module: nn.Module, path: str) -> bool:
    """Whether a module's own tensors are on plain ``meta``, so that it has to reset them itself.

    Raises:
        ConfigError: If it has no ``reset_parameters``, or if some of its tensors are real.
    """
    own = dict(own_tensors(module))
    bare = [key for key, each in own.items() if each.is_meta and not is_deferred(each)]
    if not bare:
        return False
    what = f"{path or 'The model'} ({type(module).__name__})"
    if not callable(getattr(module, "reset_parameters", None)):
        raise ConfigError(
            f"{what} was constructed on the meta device and has no reset_parameters() that could "
            f"set its {bare[0]!r}. Construct the model under boltmesh.strategies.deferred_init() "
            f"instead, which does what __init__ does, or define reset_parameters()."
        )
    if len(bare) < len(own):
        real = next(key for key in own if key not in bare)
        raise ConfigError(
            f"{what} has its {bare[0]!r} on the meta device and values in its {real!r}, which "
            f"reset_parameters() would overwrite. Construct the model under "
            f"boltmesh.strategies.deferred_init(), or all of this module on one device."
        )
    return True


def own_modules(roots: Sequence[nn.Module], name: str) -> dict[nn.Module, str]:
    """Return the modules of a unit with their dotted names, parents first."""
    paths: dict[nn.Module, str] = {}

    def visit(module: nn.Module, path: str) -> None:
        if module in paths:
            return
        paths[module] = path
        for key, child in module.named_children():
            if not isinstance(child, FSDPModule):
                visit(child, f"{path}.{key}".lstrip("."))

    for root in roots:
        visit(root, name)
    return paths


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own parameters and buffers that are not sharded."""
    own = {
        **dict(module.named_parameters(recurse=False, remove_duplicate=False)),
        **dict(module.named_buffers(recurse=False, remove_duplicate=False)),
    }
    for key, tensor in own.items():
        if not isinstance(tensor, DTensor):
            yield key, tensor


def deferred_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield a module's other attributes with deferred tensors, also in plain containers."""
    registered = ("_parameters", "_buffers", "_modules")
    for key, value in list(vars(module).items()):
        is_plain = isinstance(value, Tensor) or type(value) in {list, tuple, dict}
        if key not in registered and is_plain and any(map(is_deferred, tensors_of(value))):
            yield key, value


def make_attributes(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Replace tensors in the attributes that ``deferred_attributes`` yields by ``make``."""

    def make_deferred(value: Any) -> Any:
        return make(value) if isinstance(value, Tensor) and is_deferred(value) else value

    for key, value in deferred_attributes(module):
        setattr(module, key, map_leaves(make_deferred, value))
