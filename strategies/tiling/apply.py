"""Finds the layers that are too large to be gathered whole, and makes them run in tiles.

The layer stays the author's: its class, its parameters' names and its hooks. Its weight becomes a
DTensor that ``fully_shard`` is told to ignore, and its forward gathers tile by tile.
"""

from collections.abc import Iterator
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from boltmesh.errors import ConfigError
from boltmesh.strategies.tiling.functions import EmbeddingFunction, LinearFunction
from boltmesh.strategies.tiling.weight import TiledWeight
from boltmesh.strategies.torch_compat import has_gradient_hooks, not_compiled

_READ_BY_PARENTS = (nn.MultiheadAttention,)
"""They use their children's weights and never call the children."""


def apply_tiling(
    unit: nn.Module, max_bytes: int, mesh: DeviceMesh, *, name: str = ""
) -> list[TiledWeight]:
    """Make the large layers of a unit run in tiles.

    Each ``nn.Linear`` and ``nn.Embedding`` with a weight of more than ``max_bytes`` has it sharded
    here; pass the parameters to ``fully_shard`` as ``ignored_params``. Layers that share such a
    weight are all tiled. Call it after the unit's parameters are real and alike on every rank, and
    before it is sharded; modules below that are sharded already are left alone.

    Gradients are averaged over the mesh in every backward pass, as stage 3 does, so that ``.grad``
    is of the shard alone.

    Args:
        unit: A module.
        max_bytes: How large a gathered tile may be, in the type that the weight is kept in. Two
            exist at a time.
        mesh: As for ``fully_shard``.
        name: The unit's dotted name.

    Raises:
        ConfigError: When a layer does what cannot be done in tiles.
    """
    tiled: dict[Parameter, TiledWeight] = {}
    users: dict[Parameter, list[tuple[str, nn.Module]]] = {}
    for path, module in _own_modules(unit, name, set()):
        for key, parameter in module.named_parameters(recurse=False):
            users.setdefault(parameter, []).append((f"{path}.{key}".lstrip("."), module))
        whole = _tileable_weight(module)
        if whole is not None and whole.nbytes > max_bytes and whole not in tiled:
            _check(module, path)
            tiled[whole] = TiledWeight.shard(f"{path}.weight".lstrip("."), whole, max_bytes, mesh)
    for whole, weight in tiled.items():
        for path, module in users[whole]:
            if _tileable_weight(module) is not whole:
                raise ConfigError(
                    f"{weight.name!r} is run in tiles and is also {path!r}, which its "
                    f"{type(module).__name__} would need whole. Set tile_linear_bytes to "
                    f"{whole.nbytes} or more, or use the weight in a Linear or an Embedding there."
                )
            _check(module, path.rpartition(".")[0])
            module.weight = weight.parameter
            weight.layers.append(module)
            module.forward = partial(_run_in_tiles, module, weight)
    if tiled:
        _disable_fused_layers(unit)
    return list(tiled.values())


def _disable_fused_layers(unit: nn.Module) -> None:
    """Keep torch's transformer layers from reading the weights of their Linears in evaluation."""
    for module in unit.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            parts = (module.linear1, module.linear2)
            if any(isinstance(each.weight, DTensor) for each in parts):
                # The only switch there is, and it is the process's.
                torch.backends.mha.set_fastpath_enabled(False)


def _tileable_weight(module: nn.Module) -> Parameter | None:
    """Return the weight of a plain Linear or Embedding, which nobody has sharded yet."""
    is_plain = (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward) or (
        isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
    )
    if not is_plain or "forward" in vars(module):
        return None
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    return None if weight is None or isinstance(weight, DTensor) else weight


def _own_modules(
    module: nn.Module, path: str, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    if module in seen:
        return
    seen.add(module)
    yield path, module
    for key, child in module.named_children():
        if not isinstance(child, FSDPModule) and not isinstance(module, _READ_BY_PARENTS):
            yield from _own_modules(child, f"{path}.{key}".lstrip("."), seen)


def _check(module: nn.Module, path: str) -> None:
    weight = module.weight
    assert isinstance(weight, Tensor)
    if has_gradient_hooks(weight):
        raise ConfigError(
            f"The weight of {path!r} is larger than tile_linear_bytes and has a hook on its "
            f"gradient, which no rank ever has whole. Set tile_linear_bytes to {weight.nbytes} or "
            f"more, or change the shard's gradient in on_after_backward."
        )
    if not isinstance(module, nn.Embedding):
        return
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise ConfigError(
                f"{path!r} is larger than tile_linear_bytes and has {option}="
                f"{getattr(module, option)}, which needs its weight whole. Leave {option} out, or "
                f"set tile_linear_bytes to {module.weight.nbytes} or more."
            )


@not_compiled
def _run_in_tiles(layer: nn.Module, weight: TiledWeight, inputs: Tensor) -> Tensor:
    """The forward of a layer whose weight comes in tiles."""
    if isinstance(layer, nn.Embedding):
        looked_up: Tensor = EmbeddingFunction.apply(  # type: ignore[no-untyped-call]
            inputs, weight.parameter, layer.padding_idx, weight
        )
        return looked_up
    assert isinstance(layer, nn.Linear)
    kind, bias = inputs.device.type, cast("Tensor | None", layer.bias)
    if torch.is_autocast_enabled(kind):
        dtype = weight.gathered_dtype(layer, torch.get_autocast_dtype(kind))
        inputs = inputs.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(kind, enabled=False):
        outputs: Tensor = LinearFunction.apply(  # type: ignore[no-untyped-call]
            inputs, weight.parameter, bias, weight
        )
    return outputs
