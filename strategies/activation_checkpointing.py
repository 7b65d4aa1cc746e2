"""Activation checkpointing of a model's repeated blocks.

Blocks keep little of their forward pass and are recomputed in the backward pass, by torch's
non-reentrant checkpoint, which replaces ``forward`` on the instances: modules, parameters and their
names do not change.

Source: Chen et al. 2016, https://arxiv.org/abs/1604.06174
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies.blocks import find_blocks
from boltmesh.strategies.compiled_blocks import CompiledForward
from boltmesh.strategies.offload.activations import ActivationOffload
from boltmesh.strategies.patch import Changes
from boltmesh.strategies.torch_compat.autograd import CHECKPOINT_OPTIONS
from boltmesh.strategies.torch_compat.tensors import COSTLY_OPERATORS
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from boltmesh.telemetry.writer.recorder import Recorder

Recompute = Literal["full", "selective"]
RecomputeShare = Recompute | Mapping[Recompute, float]
"""A kind for all blocks, or a kind with its share of the blocks."""

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Contexts of the forward pass, and of its recomputation."""


class ActivationCheckpointing:
    """Selects the blocks of a model that are recomputed in the backward pass.

    Args:
        kind: ``"full"`` keeps only the inputs of each block; ``"selective"`` also the outputs of
            matrix products, convolutions and attention, and recomputes the rest; None keeps all.
            ``{"full": 0.5}`` recomputes half of the blocks, which lie evenly among the others.
        offload: Where inputs of blocks are kept: True: in host memory; a folder: in a file there;
            False: on the device.

    Raises:
        ConfigError: For an unknown kind, a share outside of (0, 1], a missing folder, and offload
            without a kind.
    """

    def __init__(self, kind: RecomputeShare | None, offload: bool | str | Path = False) -> None:
        share = 1.0
        if isinstance(kind, Mapping):
            kind, share = _with_share(kind)
        if kind is not None and kind not in get_args(Recompute):
            raise ConfigError(
                f"activation_checkpointing={kind!r} is none of its kinds. Use 'full', which keeps "
                f"the inputs of each block alone, 'selective', which also keeps what matrix "
                f"products and attention give, or null, which keeps everything."
            )
        if offload is not False and kind is None:
            raise ConfigError(
                f"activation_offload={offload!s} moves the inputs of recomputed blocks, and none "
                f"is recomputed. Set activation_checkpointing='full' as well."
            )
        if not isinstance(offload, bool) and not Path(offload).is_dir():
            raise ConfigError(
                f"activation_offload={offload!s} is no folder. Make it on a fast local disk, "
                f"or write true for host memory."
            )
        self.kind = kind
        self.share = share
        """Share of the blocks that are recomputed."""
        self._offload_to = offload
        self.offload: ActivationOffload | None = None
        """Offload of the wrapped model; None if the inputs stay on the device."""
        self._changes = Changes()

    @property
    def blocks(self) -> frozenset[Module]:
        """Blocks that are recomputed now; none outside of a fit."""
        return self._changes.modules()

    def put_on(
        self,
        root: Module,
        *,
        rank: int = 0,
        recorder: Recorder | NullRecorder | None = None,
    ) -> None:
        """Wrap the repeated blocks of a model. No effect on a model that is wrapped already.

        Blocks without child modules (a ``Linear`` in a ``Sequential``) keep only their input
        anyway, and are left out.

        Raises:
            ConfigError: If the model has no such block.
        """
        if self.kind is None or self.blocks:
            return
        blocks = [each for each in find_blocks(root).values() if any(each.children())]
        if not blocks:
            raise ConfigError(
                f"activation_checkpointing={self.kind!r} runs the repeated blocks of a model again "
                f"in the backward pass, and {type(root).__name__} repeats none: a block is a "
                f"module of several layers that a ModuleList or Sequential holds twice or more. "
                f"Leave it out, or call torch.utils.checkpoint in the model."
            )
        if self._offload_to is not False:
            folder = None if self._offload_to is True else Path(self._offload_to)
            self.offload = ActivationOffload(folder, rank=rank, recorder=recorder)
        for block in _spread(blocks, self.share):
            run = partial(_run, block, block.forward, _CONTEXTS[self.kind], self.offload)
            self._changes.set(block, "forward", run)

    def take_off(self) -> None:
        """Restore the blocks."""
        self._changes.undo()
        if self.offload is not None:
            self.offload.close()
            self.offload = None


def _with_share(given: Mapping[Any, Any]) -> tuple[Recompute, float]:
    if len(given) == 1:
        ((kind, share),) = given.items()
        if isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1:
            return kind, float(share)
    raise ConfigError(
        f"activation_checkpointing={dict(given)!r} is no kind with a share of the blocks. Write "
        f"{{'full': 0.5}} for half of the blocks, or 'full' for all."
    )


def _spread(blocks: list[Module], share: float) -> list[Module]:
    """Return a share of the blocks, at least the first, spread evenly over all."""

    def before(count: int) -> int:
        return ceil(round(share * count, 6))

    return [each for at, each in enumerate(blocks) if before(at + 1) > before(at)]


def _run(
    block: Module,
    forward: Callable[..., Any],
    contexts: Callable[[Module], Contexts],
    offload: ActivationOffload | None,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    args = tuple(_without_cache(block, each) for each in args)
    kwargs = {name: _without_cache(block, each) for name, each in kwargs.items()}

    if isinstance(forward, CompiledForward):
        forward = forward.choose((*args, *kwargs.values()))

    def call(*given: Any) -> Any:
        return forward(*given[:-1], **given[-1])

    # torch restores the generators of the devices that it finds in positional arguments alone, and
    # names of the checkpoint's own arguments may be names of the block's.
    with nullcontext() if offload is None else offload.saving((args, kwargs)):
        return checkpoint(
            call, *args, kwargs, context_fn=partial(contexts, block), **CHECKPOINT_OPTIONS
        )


def _without_cache(block: Module, value: Any) -> Any:
    """Return an argument of a block, or None for a key-value cache of transformers.

    The recomputed block would append its keys and values once more, and attend to both.
    Transformers' own checkpointing removes the cache too. One with earlier tokens is refused.
    """
    length = getattr(value, "get_seq_length", None)
    if not callable(length):
        return value
    indices = [getattr(each, "layer_idx", None) for each in block.modules()]
    if length(next((each for each in indices if each is not None), 0)):
        raise ConfigError(
            f"{type(block).__name__} gets a cache with keys of earlier tokens, and run again in "
            f"the backward pass it would add to them a second time. Leave "
            f"activation_checkpointing out, or train without past_key_values."
        )
    return None


def _full(block: Module) -> Contexts:
    return nullcontext(), _BuffersKept(block)


def _selective(block: Module) -> Contexts:
    forward, again = create_selective_checkpoint_contexts(_choose)  # type: ignore[no-untyped-call]
    return forward, _within(_BuffersKept(block), again)


_CONTEXTS: dict[str, Callable[[Module], Contexts]] = {"full": _full, "selective": _selective}


def _choose(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_costly = operator in COSTLY_OPERATORS
    return CheckpointPolicy.MUST_SAVE if is_costly else CheckpointPolicy.PREFER_RECOMPUTE


class _BuffersKept(AbstractContextManager[None]):
    """Restores buffers after a recomputation, so that running statistics count a batch once.

    It may be entered again: a graph that is retained is recomputed in each backward pass.
    """

    def __init__(self, block: Module) -> None:
        self._block = block
        self._before: list[tuple[Tensor, Tensor]] = []

    @override
    def __enter__(self) -> None:
        # ``data`` has its own version counter: tensors saved by the forward pass stay valid.
        self._before = [(each.data, each.data.clone()) for each in self._block.buffers()]

    @override
    def __exit__(self, *_: object) -> None:
        for buffer, value in self._before:
            buffer.copy_(value)
        self._before = []


@contextmanager
def _within(
    outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]
) -> Iterator[None]:
    with outer, inner:
        yield
