"""How a recipe or file, and what the command line changes, become one checked config.

Every mistake is one line that names its source, the full key, the nearest right name and a value
that works. Nothing here imports a class that the config names; ``classes.py`` does.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from boltmesh.configs.advice import (
    COMMAND_LINE,
    Source,
    first_line,
    located,
    name_choices,
    nearest,
)
from boltmesh.configs.merge import Merge, all_keys, example_of, full_key
from boltmesh.configs.schema import SECTIONS, Config
from boltmesh.errors import ConfigError

TEXT_LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
"""Reads every value as the text that it is, by the parser that OmegaConf uses."""

_NOT_READ = (
    ArithmeticError, AttributeError, LookupError, TypeError, ValueError, yaml.YAMLError,
    OmegaConfBaseException,
)  # fmt: skip
"""Errors of the parser; for a wrong value behind a tag, such as ``!!timestamp x``, it raises
whatever its own code runs into."""

_MAX_BITS = 64
"""Most bits of a whole number: torch, files and system calls hold no more."""

_WORD = re.compile(r"[\w.:+-]+")

RECIPE_FOLDER = Path(__file__).resolve().parent


def load(name_or_path: str | Path, overrides: Sequence[str] = ()) -> DictConfig:
    """Read a recipe by name, or a file by path, and apply ``key=value`` overrides in order.

    Interpolations stay in the result and are resolved when read, so that writing it back gives a
    config that means the same.

    Raises:
        ConfigError: One line, for anything that is wrong with the file or an override.
    """
    path = find(name_or_path)
    try:
        return _load(path, overrides)
    except RecursionError as error:
        raise ConfigError(
            f"{path}, or the command line, has a value that is nested too deeply to be read. "
            f"Write lists and mappings of at most a hundred levels."
        ) from error


def _load(path: Path, overrides: Sequence[str]) -> DictConfig:
    config: DictConfig = OmegaConf.structured(Config)
    from_file = Merge(
        config, source=str(path), folder=path.parent, written=partial(_written_in, path)
    )
    from_file.section("", Config, _read(path))
    texts: dict[str, str] = {}
    from_command_line = Merge(config, source=COMMAND_LINE, folder=None, written=texts.get)
    # Another class or strategy drops the arguments of the old one: names come before arguments, and
    # so does null, which leaves a section out.
    names = ("strategy", "strategy.name")
    pairs = sorted(
        map(_split, overrides),
        key=lambda pair: (
            not (
                pair[0] in names
                or pair[0].endswith(".class_path")
                or (pair[0] in SECTIONS and pair[1] is None)
            )
        ),
    )
    for key, value, text in pairs:
        texts[key] = text
        from_command_line.assign(key, value)
    is_open = OmegaConf.is_interpolation(config.run, "name") or OmegaConf.is_missing(
        config.run, "name"
    )
    if not is_open and config.run.name is None:
        config.run.name = re.sub(r"[^\w.-]+", "-", path.stem)
    _check_values(config, source=_source(path, (key for key, *_ in pairs)))
    return config


def source_named(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Source:
    """Return what errors call a config that was loaded; its overrides are right."""
    return _source(find(name_or_path), (_split(each)[0] for each in overrides))


def _source(path: Path, changed: Iterable[str]) -> Source:
    source = Source(path)
    source.changed = frozenset(changed)
    return source


def without_section(overrides: Sequence[str], section: str) -> list[str]:
    """Return the ``key=value`` that change no key of a section."""
    keys = [(each, each.partition("=")[0].strip()) for each in overrides]
    return [each for each, key in keys if key.partition(".")[0] != section]


def recipes() -> dict[str, Path]:
    """The shipped recipes by name."""
    return {path.stem: path for path in sorted(RECIPE_FOLDER.glob("*.yaml"))}


def find(name_or_path: str | Path) -> Path:
    """The file of a recipe's name or of a path."""
    path, text = Path(name_or_path), str(name_or_path)
    looks_like_path = path.suffix in {".yaml", ".yml"} or len(path.parts) > 1
    if looks_like_path and path.is_dir():
        raise ConfigError(f"{text} is a folder, not a config file.{_nearby(path / '_')}")
    if path.is_file():
        return path
    if looks_like_path:
        raise ConfigError(f"There is no config file {text}.{_nearby(path)}")
    known = recipes()
    if text in known:
        return known[text]
    guess = nearest(text, known)
    hint = f" Did you mean '{guess}'?" if guess else ""
    raise ConfigError(
        f"There is no recipe '{text}'.{hint} "
        f"Give {name_choices(known, last='or')}, or the path of a YAML file."
    )


def _nearby(path: Path) -> str:
    files = [each for end in ("*.yaml", "*.yml") for each in sorted(path.parent.glob(end))]
    guess = nearest(path.stem, [each.stem for each in files])
    if guess is not None:
        return f" Did you mean {next(each for each in files if each.stem == guess)}?"
    if (recipe := nearest(path.stem, recipes())) is not None:
        return f" Did you mean the recipe '{recipe}'?"
    if files:
        return f" The folder has {name_choices(each.name for each in files)}."
    return f" Give an existing file, or a recipe: {name_choices(recipes(), last='or')}."


def _read(path: Path) -> dict[str, Any]:
    try:
        loaded = OmegaConf.load(path)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not valid YAML: {error.problem}.") from error
    except (OSError, *_NOT_READ) as error:
        raise ConfigError(f"{path} cannot be read: {_problem(error)}.") from error
    content = OmegaConf.to_container(loaded, resolve=False)
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} holds a list, but a config is a mapping with the sections "
            f"{name_choices(SECTIONS)}."
        )
    return {str(key): value for key, value in content.items()}


def _problem(error: Exception) -> str:
    """Say why a text could not be read."""
    if isinstance(error, (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException)):
        return getattr(error, "problem", None) or first_line(error)
    return "a value is not what its tag (!!...) says"


def _written_in(path: Path, key: str) -> str | None:
    """Return the text of a value in a file."""
    node: Any = yaml.load(path.read_text(encoding="utf-8"), TEXT_LOADER)  # noqa: S506 - texts alone
    for name in key.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    return node if isinstance(node, str) else None


def _split(override: str) -> tuple[str, Any, str]:
    """Return the full key, the value, and its text where that is one word and no more."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        known = [each for each in all_keys() if each.rpartition(".")[2] == override]
        example = f"{known[0]}={example_of(known[0])}" if known else "max_steps=10"
        raise ConfigError(
            f"{COMMAND_LINE}: '{override}' is not key=value. Write for example {example}."
        )
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    except _NOT_READ as error:
        given = override if len(override) < 200 else f"{override[:200]}..."
        raise ConfigError(
            f"{COMMAND_LINE}: {given} is not valid YAML: {_problem(error)}. "
            f"Quote a text with special characters, twice: {key}='\"...\"'."
        ) from error
    assert isinstance(value, dict)
    word = text.strip() if _WORD.fullmatch(text.strip()) else ""
    return full_key(key.strip()), value["value"], word


def _check_values(config: DictConfig, *, source: str) -> None:
    """Raise for the first value that is missing, refers to what is not there, or is too large."""
    for key, node, name in _leaves(config):
        if OmegaConf.is_missing(node, name):
            raise ConfigError(
                f"{located(source, key)} is missing. Write it into the file, or add "
                f"{key}={example_of(key)}."
            )
        try:
            value = node[name]
        except OmegaConfBaseException as error:
            raise ConfigError(
                f"{located(source, key)} cannot be resolved: {first_line(error)}. "
                f"Write a value instead{_such_as(key)}."
            ) from error
        if isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise ConfigError(
                f"{located(source, key)} is a whole number of {value.bit_length()} bits, and may "
                f"have {_MAX_BITS}. Write a smaller one{_such_as(key)}."
            )


def _such_as(key: str) -> str:
    example = example_of(key)
    return "" if example == "..." else f", for example {key}={example}"


def _leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each leaf's key, with the container that it is in and its name there."""
    names: Iterable[Any] = range(len(node)) if isinstance(node, ListConfig) else list(node)
    for name in names:
        here = f"{key}.{name}" if key else str(name)
        is_open = OmegaConf.is_missing(node, name) or OmegaConf.is_interpolation(node, name)
        if not is_open and isinstance(node[name], (DictConfig, ListConfig)):
            yield from _leaves(node[name], here)
        else:
            yield here, node, name
