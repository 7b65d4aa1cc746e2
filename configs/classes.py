"""From ``class_path`` and ``init_args`` to an object: the only names in a config that run code.

A class path is ``package.module.Class``, or ``path/to/file.py:Class`` for code that is not
installed. ``check_class_path`` looks without importing anything; ``build`` imports, compares the
arguments with the signature, and makes the object.
"""

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from boltmesh.configs.advice import (
    located,
    name_choices,
    nearest,
    one_line,
    show,
    source_of,
)
from boltmesh.errors import BoltMeshError, ConfigError


def build(section: DictConfig, key: str, *, source: str, **first: Any) -> Any:
    """The object that a section names, its nested sections built before it.

    Args:
        section: Has ``class_path`` and perhaps ``init_args``.
        key: The full key of the section, for errors.
        source: The config, for errors.
        **first: Arguments that do not come from the config and win over it.

    Raises:
        ConfigError: When the class cannot be found, does not take the arguments, or refuses them.
    """
    cls = find_class(section.class_path, f"{key}.class_path", source=source)
    given = OmegaConf.select(section, "init_args")
    arguments = {} if given is None else _build_nested(given, f"{key}.init_args", source)
    check_arguments(cls, {**arguments, **first}, f"{key}.init_args", source=source)
    try:
        return cls(**{**arguments, **first})
    except BoltMeshError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{located(source, key)} cannot be built: {cls.__name__} raised "
            f"{type(error).__name__}: {_sentence(error)}"
        ) from error


def _build_nested(value: Any, key: str, source: str) -> Any:
    if isinstance(value, DictConfig):
        if "class_path" in value and set(value) <= {"class_path", "init_args"}:
            return build(value, key, source=source)
        return {str(at): _build_nested(value[at], f"{key}.{at!s}", source) for at in value}
    if isinstance(value, ListConfig):
        return [_build_nested(each, f"{key}.{at}", source) for at, each in enumerate(value)]
    return value


def check_class_path(class_path: str, key: str, *, source: str) -> None:
    """Refuse a class path that cannot be right, as far as this shows without importing it."""
    file, colon, name = class_path.rpartition(":")
    if colon:
        path = _existing_file(file, class_path, key, source)
        known = _names_in(path, key, source)
        if known is not None and name not in known:
            raise _no_such_name(class_path, key, source, name, str(path), known, "{}:{}", file)
        return
    package, dot, _ = class_path.partition(".")
    if not dot:
        raise ConfigError(
            f"{located(source, key)}={class_path} names no module. Write "
            f"package.module.{class_path}, or path/to/file.py:{class_path}."
        )
    if package not in sys.modules and _find_spec(package) is None:
        raise _no_module(class_path, key, source, package)


def find_class(class_path: str, key: str, *, source: str) -> type[Any]:
    """Import the class of a class path."""
    check_class_path(class_path, key, source=source)
    file, colon, name = class_path.rpartition(":")
    if colon:
        module = _import_file(_existing_file(file, class_path, key, source), key, source)
        whole, joined = file, "{}:{}"
    else:
        whole, _, name = class_path.rpartition(".")
        module, joined = _import_module(class_path, whole, key, source), "{}.{}"
    if not hasattr(module, name):
        known = [each for each, value in vars(module).items() if isinstance(value, type)]
        raise _no_such_name(class_path, key, source, name, module.__name__, known, joined, whole)
    found = getattr(module, name)
    if not isinstance(found, type):
        kind = type(found).__name__
        raise ConfigError(f"{located(source, key)}={class_path} is a {kind}, not a class.")
    return found


def check_arguments(cls: type[Any], arguments: Mapping[str, Any], key: str, *, source: str) -> None:
    """Compare arguments with the signature of the class; a class without one is not checked."""
    try:
        parameters = inspect.signature(cls).parameters
    except (ValueError, TypeError):
        return
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}
    }
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    for name in arguments:
        if name not in named and not takes_any:
            guess = nearest(name, named.keys() - arguments.keys())
            hint = (
                f"Did you mean '{key}.{guess}'?"
                if guess
                else f"It takes {name_choices(named, at_most=40)}."
            )
            where = source_of(source, f"{key}.{name}")
            raise ConfigError(
                f"{where}: unknown key '{key}.{name}': {cls.__name__} does not take it. {hint}"
            )
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in arguments:
            raise ConfigError(
                f"{located(source, key)}.{name} is missing: {cls.__name__} needs it. Add "
                f"{key}.{name}={_example_for(parameter)}."
            )


def _example_for(parameter: inspect.Parameter) -> str:
    examples: dict[Any, object] = {int: 1, float: 0.1, bool: True, str: "text", Path: "path"}
    for kind, example in examples.items():
        if parameter.annotation in {kind, kind.__name__}:
            return show(example)
    return "..."


def _existing_file(file: str, class_path: str, key: str, source: str) -> Path:
    path = Path(file)
    if path.is_file():
        return path.resolve()
    beside = sorted(each.name for each in path.parent.glob("*.py"))
    guess = nearest(path.name, beside)
    hint = (
        f"Did you mean {path.with_name(guess)}?"
        if guess
        else "Give a file by its path from here or from the config, or an installed class as "
        f"{key}=package.module.Class."
    )
    raise ConfigError(f"{located(source, key)}={class_path}: there is no file {file}. {hint}")


def _names_in(path: Path, key: str, source: str) -> set[str] | None:
    """The names that a file binds at its top level; None when a star import hides some."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise ConfigError(f"{located(source, key)}: {path}:{line}: {_sentence(error)}") from error
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((each.asname or each.name).partition(".")[0] for each in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return None if "*" in names else names


def _import_file(path: Path, key: str, source: str) -> ModuleType:
    """Import a file under the name that ``python path/to/file.py`` and its siblings know.

    Its folder, or what holds its package, goes on the path, so that processes which unpickle
    objects of its classes find the module as well.
    """
    names, root = [path.stem], path.parent
    while (root / "__init__.py").is_file():
        names.insert(0, root.name)
        root = root.parent
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    name = ".".join(names)
    try:
        module = importlib.import_module(name)
    except Exception as error:
        raise _import_failed(str(path), key, source, error) from error
    origin = getattr(module, "__file__", None)
    if origin is None or Path(origin).resolve() != path:
        raise ConfigError(
            f"{located(source, key)}: {path} cannot be imported, because another module has the "
            f"name '{name}' ({origin or 'built in'}). Rename the file."
        )
    return module


def _import_module(class_path: str, name: str, key: str, source: str) -> Any:
    """Import a module, or the class that a nested class is in."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not (name == missing or name.startswith(f"{missing}.")):
            raise _import_failed(name, key, source, error) from error
    except Exception as error:
        raise _import_failed(name, key, source, error) from error
    parent, _, last = name.rpartition(".")
    if not parent:
        raise _no_module(class_path, key, source, name)
    holder = _import_module(class_path, parent, key, source)
    if isinstance(getattr(holder, last, None), type):
        return getattr(holder, last)
    if isinstance(holder, ModuleType):
        inside = [*_submodules(holder), *(n for n, v in vars(holder).items() if type(v) is type)]
        end = class_path[len(name) :]
        raise _no_such_name(class_path, key, source, last, parent, inside, "{}.{}" + end, parent)
    raise _no_module(class_path, key, source, name)


def _submodules(package: ModuleType) -> Iterator[str]:
    return (each.name for each in pkgutil.iter_modules(getattr(package, "__path__", [])))


def _find_spec(package: str) -> object:
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None


def _no_module(class_path: str, key: str, source: str, module: str) -> ConfigError:
    parent, _, last = module.rpartition(".")
    rest = class_path.removeprefix(module)
    guess = nearest(last, (each.name for each in pkgutil.iter_modules()))
    fits = not parent and guess is not None and _holds(guess, rest.strip(".").split(".")[:-1])
    hint = f"Did you mean {guess}{rest}?" if fits else "Install it, or give path/to/file.py:Class."
    return ConfigError(
        f"{located(source, key)}={class_path}: there is no module '{module}'. {hint}"
    )


def _holds(package: str, submodules: list[str]) -> bool:
    """Whether a package has these modules inside each other, by its files alone."""
    spec = importlib.util.find_spec(package)
    folders = [Path(each) for each in (spec and spec.submodule_search_locations) or []]
    for name in submodules:
        if any((folder / f"{name}.py").is_file() for folder in folders):
            return True
        folders = [folder / name for folder in folders if (folder / name).is_dir()]
    return bool(folders) or not submodules


def _no_such_name(
    class_path: str,
    key: str,
    source: str,
    name: str,
    where: str,
    known: Any,
    joined: str,
    whole: str,
) -> ConfigError:
    public = sorted(each for each in known if not each.startswith("_"))
    guess = nearest(name, public)
    hint = (
        f"Did you mean {joined.format(whole, guess)}?"
        if guess
        else f"It has {name_choices(public)}."
    )
    return ConfigError(f"{located(source, key)}={class_path}: {where} has no '{name}'. {hint}")


def _import_failed(what: str, key: str, source: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{located(source, key)}: importing {what} failed with {type(error).__name__}: "
        f"{_sentence(error)}"
    )


def _sentence(error: BaseException) -> str:
    text = one_line(error)
    return text if text.endswith((".", "?", "!")) else f"{text}."
