"""Checkpoints of models with frozen parameters: without these, and with the names of peft.

With ``save_trainable_only=True`` a checkpoint leaves out the frozen parameters that have not
changed since training began, and has a fingerprint of each. A fingerprint is the same in every
layout: each rank sums the elements that it holds, and a sum does not depend on how it is divided.

A checkpoint of a peft model has its configuration and the names of adapters in peft's files.
"""

import json
import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from boltmesh.errors import CheckpointError
from boltmesh.strategies.checkpoint.chunks import (
    OffloadedChunk,
    Snapshot,
    narrow,
    own_chunks,
    own_part,
)
from boltmesh.strategies.object_collectives import gather_objects
from boltmesh.strategies.torch_compat.tensors import components_of, is_composite

TRAINABLE_ONLY = "boltmesh_trainable_only"
"""Key of a checkpoint: fingerprints of the parameters that it leaves out, by name."""

PEFT = "boltmesh_peft"
"""Key of a checkpoint: an entry for each peft adapter, see ``peft_entries``."""

_BLOCK = 1 << 20
"""Number of elements at a time; the arithmetic takes about 40 bytes for each."""
_DIM_FACTORS = (
    0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB, 0x5851F42D4C957F2D,
    0x2545F4914F6CDD1D, 0x369DEA0F31A53F85, 0x27BB2EE687B0B0FD, 0x1D2AB6E4C2E3F4A7,
)  # fmt: skip
_MIX = 0x3C79AC492BA7B653
_SHIFT = 0x165667B19E3779F9
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def frozen_names(module: Module) -> list[str]:
    """Return all names of parameters without gradients."""
    named = module.named_parameters(remove_duplicate=False)
    return [name for name, each in named if not each.requires_grad]


def fingerprints(
    tensors: Mapping[str, Tensor], expected: Mapping[str, str] | None = None, *, is_shared: bool
) -> dict[str, str]:
    """Return, for each name, dtype, shape and a weighted sum of the bits of all elements.

    Args:
        tensors: Whole tensors or shards of this rank, of any shape, by name.
        expected: Fingerprints to compare with; tensors are cast to their dtypes first, since a
            module that was built in fp32 may be trained in bf16.
        is_shared: Whether ranks hold parts; then this is collective over all ranks.
    """
    own = {
        name: _pieces(each, _dtype_of((expected or {}).get(name))) for name, each in tensors.items()
    }
    of_ranks: list[Any] = [own]
    if is_shared and dist.is_initialized():
        of_ranks = gather_objects(own)
    joined: dict[str, tuple[str, dict[Any, int]]] = {}
    for others in reversed(of_ranks):  # of equal pieces that of the first rank counts
        for name, (kind, pieces) in others.items():
            joined[name] = kind, joined.get(name, (kind, {}))[1] | pieces
    return {
        name: f"{kind} {sum(pieces.values()) & 0xFFFFFFFFFFFFFFFF:016x}"
        for name, (kind, pieces) in sorted(joined.items())
    }


def reduced(
    checkpoint: dict[str, Any], base: Mapping[str, str], now: Mapping[str, str]
) -> dict[str, Any]:
    """Return a checkpoint without the parameters that have not changed.

    Args:
        checkpoint: The Trainer's checkpoint.
        base: Fingerprints of the frozen parameters when training began.
        now: Their fingerprints now.
    """
    left_out = {name: each for name, each in base.items() if now.get(name) == each}
    state = {name: each for name, each in checkpoint["state_dict"].items() if name not in left_out}
    return {**checkpoint, "state_dict": state, TRAINABLE_ONLY: left_out}


def refuse_other_names(
    left_out: Collection[str], state: Collection[str], module: Collection[str]
) -> None:
    """Compare the names of a reduced checkpoint with those of a module.

    Args:
        left_out: Names of the tensors that the checkpoint leaves out.
        state: Names of the tensors that it holds.
        module: Names in the module's ``state_dict``.

    Raises:
        CheckpointError: Naming the first name that one of them lacks.
    """
    known = {*left_out, *state}
    if missing := [name for name in module if name not in known]:
        raise CheckpointError(
            f"The checkpoint holds trained parameters alone, and {missing[0]!r} of the module is "
            f"neither among them nor in the frozen base of its run. Build the module of that run, "
            f"with the same adapters."
        )
    if unknown := sorted(known - set(module)):
        raise CheckpointError(
            f"The checkpoint was written with {unknown[0]!r}, which the module does not have. "
            f"Build the module of that run, with the same adapters."
        )


def refuse_other_base(expected: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Compare the frozen parameters of a module with those that a checkpoint leaves out.

    Raises:
        CheckpointError: Naming the first parameter that differs.
    """
    for name, then in expected.items():
        if name in found and found[name] != then:
            raise CheckpointError(
                f"The checkpoint holds trained parameters alone, and the frozen {name!r} of the "
                f"module ({found[name]}) is not the one of its run ({then}). Build the module "
                f"with the base weights of that run."
            )


def _dtype_of(fingerprint: str | None) -> torch.dtype | None:
    name = fingerprint.partition(" ")[0] if fingerprint else ""
    attribute = getattr(torch, name, None) if name else None
    return attribute if isinstance(attribute, torch.dtype) else None


@torch.no_grad()
def _pieces(tensor: Tensor, dtype: torch.dtype | None) -> tuple[str, dict[Any, int]]:
    """Return dtype and shape of a tensor, and the sum of each block that this rank holds."""
    dtype = dtype or tensor.dtype
    kind = f"{str(dtype).removeprefix('torch.')} {list(tensor.shape)}".replace(", ", ",")
    if is_composite(tensor):
        return kind, {
            (number, place): total
            for number, each in enumerate(components_of(tensor))
            for place, total in _pieces(each, None)[1].items()
        }
    chunks = [each for each in own_chunks(tensor) if 0 not in each.whole.sizes]
    if not chunks or (isinstance(tensor, Snapshot) and tensor.copied is None):
        return kind, {}
    part = own_part(tensor)
    value = part.read() if isinstance(part, OffloadedChunk) else part
    return kind, {
        (tuple(whole.offsets), tuple(whole.sizes)): _sum(
            narrow(value, offsets, whole.sizes), whole.offsets, dtype
        )
        for whole, offsets in chunks
    }


def _sum(value: Tensor, offsets: torch.Size, dtype: torch.dtype) -> int:
    """Return the sum of the bits of all elements, each times an odd number by its position."""
    if value.dim() == 0:
        value, offsets = value.reshape(1), torch.Size([0])
    rows = max(1, _BLOCK * value.shape[0] // value.numel())
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for start in range(0, value.shape[0], rows):
        block = value[start : start + rows].to(dtype).contiguous()
        if block.is_complex():
            block = torch.view_as_real(block)
        bits = block.view(_BITS[block.element_size()]).to(torch.int64)
        total += ((bits + _SHIFT) * _weights(bits, (offsets[0] + start, *offsets[1:]))).sum()
    return int(total.item())


def _weights(bits: Tensor, offsets: tuple[int, ...]) -> Tensor:
    place = torch.zeros((), dtype=torch.int64, device=bits.device)
    for dim, size in enumerate(bits.shape):
        first = offsets[dim] if dim < len(offsets) else 0
        steps = torch.arange(first, first + size, dtype=torch.int64, device=bits.device)
        shape = [-1 if at == dim else 1 for at in range(bits.dim())]
        place = place + (steps * _DIM_FACTORS[dim % len(_DIM_FACTORS)]).reshape(shape)
    place = place ^ (place >> 31)
    place = place * _MIX
    return (place ^ (place >> 29)) | 1


def peft_entries(module: Module) -> list[dict[str, Any]]:
    """Return what ``boltmesh export --peft`` needs of each adapter of a module.

    Returns:
        For each: the name of the adapter, its configuration as JSON, and the module's names by
        those in peft's files; or, instead of the latter two, the error that peft raised.
    """
    peft = sys.modules.get("peft")  # a module has no adapters of what was never imported
    if peft is None:
        return []
    return [
        {"adapter": adapter, **_peft_entry(peft, each, prefix, adapter)}
        for prefix, each in module.named_modules()
        if isinstance(each, peft.PeftModel)
        for adapter in each.peft_config
    ]


def _peft_entry(peft: Any, model: Any, prefix: str, adapter: str) -> dict[str, Any]:
    start = f"{prefix}." if prefix else ""
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    stand_ins = {name: torch.empty(2, 2, device="meta") for name, _ in tensors}
    names = {id(each): name for name, each in stand_ins.items()}
    try:
        found = peft.get_peft_model_state_dict(
            model, state_dict=stand_ins, adapter_name=adapter, save_embedding_layers=False
        )
        config = model.peft_config[adapter].to_dict()
        plain = {key: sorted(v) if isinstance(v, set) else v for key, v in config.items()}
        text = json.dumps({**plain, "inference_mode": True}, indent=2, sort_keys=True)
        own = {theirs: f"{start}{names[id(each)]}" for theirs, each in found.items()}
    except Exception as error:  # noqa: BLE001 - peft's, which is no reason to lose a checkpoint
        return {"problem": f"{type(error).__name__}: {error}"}
    return {"config": text, "names": own}
