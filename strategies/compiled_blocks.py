"""Compiles the repeated blocks of a model, with one compilation for all blocks of a class.

``torch.compile`` gets the forward of the class, with the block as an argument: with parameters as
inputs of the graph the compiled code serves every block of the class. It replaces ``forward`` on
the instances, below hooks: sharding, gathers and telemetry by hooks stay outside of graphs.

Only training is compiled. Within a mode that intercepts torch's functions or operators, as in a dry
run on tensors without data, blocks run uncompiled.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from boltmesh.errors import ConfigError, UnsupportedError
from boltmesh.strategies.blocks import find_blocks
from boltmesh.strategies.patch import Changes, compiled
from boltmesh.strategies.torch_compat.modules import is_compiled
from boltmesh.strategies.torch_compat.tensors import is_fake, is_watched

BACKEND = "inductor"

_OPTIONS = {"fallback_random": True}
"""Random numbers are those of torch's own kernels, so dropout masks are those of the uncompiled
model."""


class CompiledBlocks:
    """Compiles the repeated blocks of a model during a fit.

    Raises:
        ConfigError: With selective checkpointing, which cannot look into compiled blocks.
    """

    def __init__(self, recompute: str | None, *, is_on: bool) -> None:
        if is_on and recompute == "selective":
            raise ConfigError(
                "compile_blocks=True hides the operators of a block from "
                "activation_checkpointing='selective', which keeps the results of some of them. "
                "Use activation_checkpointing='full', or leave compile_blocks out."
            )
        self.is_on = is_on
        self._changes = Changes()
        self._limits = ExitStack()

    def put_on(self, root: Module, device: torch.device) -> None:
        """Make the repeated blocks compile at their first call. No effect the second time.

        Args:
            root: The model, before hooks of other features replace the forward of its blocks.
            device: Device of the run.

        Raises:
            ConfigError: Without a compiler for the device, or if the model has no repeated block.
            UnsupportedError: If the user has compiled parts of the model.
        """
        if not self.is_on or self._changes.modules():
            return
        for name, module in root.named_modules():
            if is_compiled(module):
                raise UnsupportedError(
                    f"{name or type(root).__name__!r} is compiled by torch.compile already, and "
                    f"compile_blocks=True would compile it once more. Leave one of them out."
                )
        refuse_without_compiler(device)
        candidates = find_blocks(root)
        blocks = [each for each in candidates.values() if any(each.children())]
        if not blocks:
            raise ConfigError(
                f"compile_blocks=True compiles the repeated blocks of a model, and "
                f"{type(root).__name__} repeats none: a block is a module of several layers that a "
                f"ModuleList or Sequential holds twice or more. Leave it out, or call "
                f"torch.compile on the model."
            )
        self._limits.enter_context(_compiler().recompile_limit_raises())
        options: Any = _OPTIONS if BACKEND == "inductor" else None
        compile_ = partial(torch.compile, backend=BACKEND, options=options)
        of_kinds: dict[type[Module], Callable[..., Any]] = {}
        for block in blocks:
            kind = type(block)
            before = vars(block).get("forward")
            if before is None and kind not in of_kinds:
                of_kinds[kind] = compile_(kind.forward)
            run = partial(of_kinds[kind], block) if before is None else compiled(before, compile_)
            self._changes.set(block, "forward", CompiledForward(kind.__name__, block.forward, run))

    def take_off(self) -> None:
        """Restore the blocks."""
        self._changes.undo()
        self._limits.close()


def refuse_without_compiler(device: torch.device) -> None:
    """Refuse to compile for a device if this machine lacks a compiler for it.

    Raises:
        ConfigError: Naming what is missing.
    """
    missing = _compiler().missing_for(device)
    if missing is not None:
        raise ConfigError(
            f"compile_blocks=True compiles for {device.type}, and {missing}. Install it, or leave "
            f"compile_blocks out."
        )


def _compiler() -> Any:
    with warnings.catch_warnings():  # of torch's own modules when they are imported
        warnings.simplefilter("ignore", DeprecationWarning)
        from boltmesh.strategies.torch_compat import compiler

    return compiler


class CompiledForward:
    """The forward of a block: compiled in training, plain where a mode intercepts operators."""

    def __init__(self, name: str, plain: Callable[..., Any], compiled: Callable[..., Any]) -> None:
        self._name = name
        self._plain = plain
        self._compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        return self.choose((*args, *kwargs.values()))(*args, **kwargs)

    def choose(self, arguments: Sequence[Any]) -> Callable[..., Any]:
        """Return the forward for these arguments; a recomputation has to run the same again."""
        if not torch.is_grad_enabled() or _is_looked_at(arguments):
            return self._plain
        return self._run

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        compiler = _compiler()
        try:
            return self._compiled(*args, **kwargs)
        except compiler.RecompileLimitError as error:
            raise UnsupportedError(
                f"compile_blocks=True compiled {self._name} again and again: its forward depends "
                f"on more than weights and the shapes of inputs. Leave compile_blocks out. "
                f"torch.compile: {_first_line(error)}"
            ) from error
        except compiler.CompilerError as error:
            raise UnsupportedError(
                f"compile_blocks=True could not compile {self._name}. Leave compile_blocks out. "
                f"torch.compile: {_first_line(error)}"
            ) from error


def _is_looked_at(arguments: Sequence[Any]) -> bool:
    """Whether a mode intercepts operators, which compiled code hides, or arguments have no data."""
    return is_watched() or any(
        isinstance(each, Tensor) and (each.is_meta or is_fake(each)) for each in arguments
    )


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
