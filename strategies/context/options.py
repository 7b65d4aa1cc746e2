"""Options of the context axis, checked before anything starts, and what it refuses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import torch
from torch.nn import Module

from boltmesh.errors import ConfigError, UnsupportedError
from boltmesh.strategies.context.exchange import ContextGroup
from boltmesh.strategies.context.positions import Balance
from boltmesh.strategies.context.seq_shard import ContextState, Mechanism
from boltmesh.strategies.dry_run.unsupported import Reasons
from boltmesh.strategies.torch_compat.modules import is_compiled


@dataclass(frozen=True)
class ContextOptions:
    """The arguments of ``ContextParallelStrategy``; see there.

    Raises:
        ConfigError: For an unknown value of an option.
    """

    size: int | None = None
    attention: Mechanism = "auto"
    balance: Balance = "contiguous"
    max_gather_bytes: int | None = None
    dims: Mapping[str | int, int] | None = None
    tile_tokens: int | None = None

    def __post_init__(self) -> None:
        size = self.size
        is_number = type(size) is int
        if size is not None and (not is_number or size < 1):
            raise ConfigError(f"size={size!r} holds no rank. Use 2 or more, or leave it out.")
        for name, value, known in (
            ("attention", self.attention, get_args(Mechanism)),
            ("balance", self.balance, get_args(Balance)),
        ):
            if value not in known:
                raise ConfigError(f"{name}={value!r} does not exist. Use {' or '.join(known)}.")
        dims: object = self.dims
        is_named = isinstance(dims, Mapping) and all(type(each) is int for each in dims.values())
        if dims is not None and not (dims and is_named):
            raise ConfigError(
                f"dims={self.dims!r} names no dim of a batch. Use {{'input_ids': 1}}: a name or "
                f"place of the batch and the dim of the sequence, or leave it out."
            )
        if self.tile_tokens is not None and self.tile_tokens < 1:
            raise ConfigError(
                f"tile_tokens={self.tile_tokens} is the number of positions that MLPs take "
                f"together. Set 1024 or more, or leave it out."
            )
        if self.max_gather_bytes is not None and self.max_gather_bytes < 1:
            raise ConfigError(
                f"max_gather_bytes={self.max_gather_bytes} allows no gather. Leave it out, or name "
                f"the bytes of the largest tensor that a rank may make whole."
            )

    def new_state(self, group: ContextGroup) -> ContextState:
        """Return the state of a run with these options."""
        return ContextState(group, self.attention, self.balance, self.max_gather_bytes)


SEQUENCES = Reasons(
    dataloader_iter="the ranks of a context group compare each batch before a step with it",
    batch_size_finder=(
        "which need not be on all ranks of a context group at once, and those that are left wait "
        "for the others. Choose batch_size by boltmesh plan, or try sizes."
    ),
    sync_batchnorm=(
        "takes the moments of batch norms over all ranks of the job, and the ranks of a context "
        "group have the same batch: they would count it several times. Leave it out, or use "
        "GroupNorm or LayerNorm."
    ),
    gradients="gradients of this rank's positions",
)
"""Reasons why ranks that divide a sequence cannot do separately what one process does."""


def refuse_modules(root: Module) -> None:
    """Refuse modules that hide from the axis what they do with a tensor.

    Raises:
        UnsupportedError: Naming the module and what to do instead.
    """
    for name, each in root.named_modules():
        shown = repr(name) if name else type(root).__name__
        if isinstance(each, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{shown} is a scripted module, which a divided sequence cannot pass through. Use "
                f"the module that it was made of."
            )
        if is_compiled(each):
            raise UnsupportedError(
                f"{shown} is compiled, which a divided sequence cannot pass through. Leave "
                f"torch.compile out with a context axis of 2 or more ranks."
            )
        if isinstance(each, torch.nn.SyncBatchNorm):
            raise UnsupportedError(
                f"{shown} is a SyncBatchNorm, whose moments would count a batch once for each rank "
                f"of a context group. Use BatchNorm, GroupNorm or LayerNorm."
            )
