"""Compares the strategy section of a config with the arguments of the strategy of that name."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf

from boltmesh.configs.advice import (
    COMMAND_LINE,
    describe_type,
    name_choices,
    nearest,
    one_line,
    show,
    source_of,
)
from boltmesh.errors import BoltMeshError, ConfigError
from boltmesh.strategies.registry import STRATEGIES

SHARED = (
    "timeout_s",
    "telemetry",
    "seed",
    "async_save",
    "save_trainable_only",
    "verify_replicas_every",
    "checkpoint_in_memory_every",
    "activation_checkpointing",
    "activation_offload",
    "compile_blocks",
    "float8",
    "tile_logits",
    "process_group_backend",
)
"""Arguments of every strategy, where the engine has them. Each strategy class decides which others
of the engine's arguments can be chosen."""

KEPT_KEYS = ("activation_checkpointing", "activation_offload", "timeout_s")
"""Keys of a config's strategy that also hold for another strategy in its place."""

_PLAIN = {int, float, bool, str, type(None)}


def check_strategy_name(name: object, *, source: str) -> None:
    """Refuse a name that is not registered."""
    if name in STRATEGIES:
        return
    guess = nearest(str(name), STRATEGIES)
    hint = (
        f"Did you mean strategy.name={guess}?"
        if guess
        else f"Use {name_choices(STRATEGIES, at_most=len(STRATEGIES))}."
    )
    where = source_of(source, "strategy.name")
    raise ConfigError(f"{where}: there is no strategy 'strategy.name={name}'. {hint}")


def check_strategy_arguments(cls: type[Any], arguments: Mapping[str, Any], *, source: str) -> None:
    """Refuse arguments that a strategy class does not take, or of another type than it says."""
    accepted = accepted_arguments(cls)
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__[:-1]):
        if "__init__" in vars(base):
            hints.update(get_type_hints(vars(base)["__init__"]))
    for name, value in arguments.items():
        where = source_of(source, f"strategy.{name}")
        if name not in accepted:
            guess = nearest(name, accepted)
            hint = (
                f"Did you mean 'strategy.{guess}'?"
                if guess
                else f"It takes {name_choices(accepted)}."
            )
            raise ConfigError(
                f"{where}: unknown key 'strategy.{name}': {cls.__name__} does not take it. {hint}"
            )
        hint = hints.get(name, Any)
        if not _fits(value, hint):
            default = accepted[name]
            works = "null" if default is None else show(default)
            raise ConfigError(
                f"{where}: strategy.{name}={show(value)} is not {describe_type(hint)}. "
                f"Write for example strategy.{name}={works}."
            )


def make_strategy(section: Any, *, source: str, **more: Any) -> Any:
    """Make the strategy of a config's section.

    Args:
        section: The name, and arguments.
        source: The config's file, for errors.
        **more: Arguments that are of no config.

    Raises:
        BoltMeshError: One line, for arguments that the strategy does not take.
    """
    # As plain mappings and lists: a strategy may keep them, and is pickled for other ranks.
    plain = cast("dict[str, Any]", OmegaConf.to_container(section, resolve=True))
    entry = STRATEGIES[plain["name"]]
    arguments = {str(key): each for key, each in plain.items() if key != "name"}
    cls = entry.load()
    check_strategy_arguments(cls, arguments, source=source)
    try:
        return cls(**{**entry.arguments, **arguments, **more})
    except BoltMeshError as error:
        raise named_error(error, source) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        given = ", ".join(f"{name}={show(value)}" for name, value in plain.items())
        given = given if len(given) < 200 else f"{given[:200]}..."
        raise ConfigError(
            f"{source_of(source, 'strategy')}: {cls.__name__} cannot be made of {given}: "
            f"{one_line(error)}. Leave out what it does not need."
        ) from error


def named_error(error: BoltMeshError, source: str) -> BoltMeshError:
    """Return an error that begins with an argument of a strategy as an error of a config.

    It names the command line if that has set one of the arguments that it speaks of.
    """
    named = [f"strategy.{key}" for key in re.findall(r"(\w+)=", str(error))]
    is_changed = any(source_of(source, key) == COMMAND_LINE for key in named)
    return type(error)(f"{COMMAND_LINE if is_changed else source}: strategy.{error}")


def accepted_arguments(cls: type[Any]) -> dict[str, Any]:
    """Names and defaults of the arguments that a config may give."""
    accepted: dict[str, Any] = {}
    for base in cls.__mro__:
        is_ours = base is cls or base.__module__.startswith("boltmesh.")
        if "__init__" not in vars(base) or not is_ours:
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        named = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
        if base is cls:
            accepted.update(named)
        else:
            # A class further down hands them on, and has no defaults.
            shared = {name: named[name] for name in SHARED if name in named}
            accepted = {**shared, **accepted}
    return accepted


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has a type that the hint names; which text it is the strategy judges."""
    if get_origin(hint) in {Union, UnionType}:
        return any(_fits(value, part) for part in get_args(hint))
    kind = get_origin(hint) or hint
    if kind in {Literal, Path}:
        return isinstance(value, str)
    if kind in {Sequence, Mapping, Callable}:  # no config can hold a function
        return isinstance(value, {Sequence: list, Mapping: dict}.get(kind, ()))
    if kind not in _PLAIN:
        return True
    if type(value) is int:
        return kind in {int, float}
    return type(value) is kind
