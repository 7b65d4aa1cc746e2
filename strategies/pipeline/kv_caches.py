"""Key-value caches of Hugging Face, filled by units that run on ranks of their own.

Each rank has the cache object that ``generate`` made. A unit leaves keys and values in its layer of
the cache, on its rank alone. The other ranks get the form of that layer: how long it is, and meta
tensors, which have a shape and no data, in the places of keys and values. So code between units
reads the same lengths on all ranks, and reorders beams there.
"""

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from boltmesh.errors import PipelineError
from boltmesh.strategies.pytree import is_constant, replace_tensors, take_apart

Forms = dict[tuple[int, str, int], bytes]
"""Forms of layers, by the cache's number, the attribute with its layers' owner, and the layer's."""


class _TensorForm:
    """Stands for a tensor without its data."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


class _SmallTensor:
    """Stands for a small tensor whose values code between units reads, such as a length."""

    def __init__(self, tensor: Tensor) -> None:
        self.values, self.dtype = tensor.tolist(), tensor.dtype


def caches_in(value: Any) -> list[Any]:
    """Return the caches among the leaves of a nested value."""
    return [leaf for leaf in take_apart(value)[0] if _is_cache(leaf)]


def forms_of(caches: Sequence[Any], unit: Module) -> Forms:
    """Return the forms of the layers that a unit may change.

    Raises:
        PipelineError: If a cache keeps something else than tensors and numbers.
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
    """Give layers the forms that they have on the rank of their unit."""
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
    """Return what has layers: the cache, or the two of an encoder and a decoder."""
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
