"""Activation checkpointing: blocks keep little of their forward pass and run again in the backward.

The repeated blocks of a model are run by torch's non-reentrant checkpoint, which stands on the
instances in the place of their ``forward``: modules, parameters and their names stay as they are.

Source: Chen et al. 2016, https://arxiv.org/abs/1604.06174
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch.nn import Module
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from boltmesh.errors import ConfigError
from boltmesh.strategies.blocks import find_blocks
from boltmesh.strategies.torch_compat.tensors import COSTLY_OPERATORS

Recompute = Literal["full", "selective"]

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Around the forward pass, and around its repetition."""


class ActivationCheckpointing:
    """Which blocks of a model run again in the backward pass.

    Args:
        kind: ``"full"`` keeps the inputs of each block alone; ``"selective"`` also what matrix
            products, convolutions and attention give, and repeats what is cheap; None keeps all.

    Raises:
        ConfigError: When there is no such kind.
    """

    def __init__(self, kind: Recompute | None) -> None:
        if kind is not None and kind not in get_args(Recompute):
            raise ConfigError(
                f"activation_checkpointing={kind!r} is none of its kinds. Use 'full', which keeps "
                f"the inputs of each block alone, 'selective', which also keeps what matrix "
                f"products and attention give, or null, which keeps everything."
            )
        self.kind = kind
        self._blocks: dict[Module, Any] = {}
        """With the ``forward`` that each instance had of its own; None for the one of its class."""

    @property
    def blocks(self) -> frozenset[Module]:
        """What runs again at the moment; nothing outside of a fit."""
        return frozenset(self._blocks)

    def put_on(self, root: Module) -> None:
        """Let the repeated blocks of a model run again. A model that has it already is left alone.

        Blocks that consist of no layers of their own (a ``Linear`` in a ``Sequential``) keep no
        more than their input anyway, and are left out.

        Raises:
            ConfigError: When the model has no such block.
        """
        if self.kind is None or self._blocks:
            return
        blocks = [each for each in find_blocks(root).values() if any(each.children())]
        if not blocks:
            raise ConfigError(
                f"activation_checkpointing={self.kind!r} runs the repeated blocks of a model again "
                f"in the backward pass, and {type(root).__name__} repeats none: a block is a "
                f"module of several layers that a ModuleList or Sequential holds twice or more. "
                f"Leave it out, or call torch.utils.checkpoint in the model."
            )
        for block in blocks:
            self._blocks[block] = vars(block).get("forward")
            vars(block)["forward"] = partial(_run, block, block.forward, _CONTEXTS[self.kind])

    def take_off(self) -> None:
        """Put the blocks back as they were."""
        for block, before in self._blocks.items():
            if before is None:
                del vars(block)["forward"]
            else:
                vars(block)["forward"] = before
        self._blocks = {}


def _run(
    block: Module,
    forward: Callable[..., Any],
    contexts: Callable[[Module], Contexts],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    args = tuple(_without_cache(block, each) for each in args)
    kwargs = {name: _without_cache(block, each) for name, each in kwargs.items()}
    # Names of its own arguments may be names of the block's.
    call = partial(forward, **kwargs)
    return checkpoint(call, *args, use_reentrant=False, context_fn=partial(contexts, block))


def _without_cache(block: Module, value: Any) -> Any:
    """Return an argument of a block, None for a cache of transformers that is being filled.

    The block would write its keys and values into it once more, and attend to both. Transformers'
    own checkpointing takes it out, too.
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
    return nullcontext(), _buffers_kept(block)


def _selective(block: Module) -> Contexts:
    forward, again = create_selective_checkpoint_contexts(_choose)  # type: ignore[no-untyped-call]
    return forward, _within(_buffers_kept(block), again)


_CONTEXTS: dict[str, Callable[[Module], Contexts]] = {"full": _full, "selective": _selective}


def _choose(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_costly = operator in COSTLY_OPERATORS
    return CheckpointPolicy.MUST_SAVE if is_costly else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _buffers_kept(block: Module) -> Iterator[None]:
    """Give buffers their values back: running statistics count a batch once."""
    # ``data`` counts its changes apart: what the forward pass has saved is what it was.
    before = [(each.data, each.data.clone()) for each in block.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)


@contextmanager
def _within(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    outer, inner = contexts
    with outer, inner:
        yield
