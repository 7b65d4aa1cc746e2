"""Refuses layers that run again in a backward pass of the batch before: with newer weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook

from boltmesh.errors import ConfigError


@contextmanager
def no_module_runs() -> Iterator[None]:
    """Within, no module may be called.

    Raises:
        ConfigError: One was, which ``torch.utils.checkpoint`` does within a backward pass.
    """

    def refuse(module: Module, arguments: Any) -> None:
        raise ConfigError(
            f"a {type(module).__name__} runs again in its backward pass, as "
            f"torch.utils.checkpoint does it, and with schedule='pipedream_2bw' that comes after "
            f"the next optimizer step: it would compute with other weights than before. Leave "
            f"checkpointing out (gradient_checkpointing_disable() in Hugging Face models), or use "
            f"schedule='1f1b'."
        )

    handle = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
