"""Puts the values of a file or of the command line into the config, one checked key at a time.

OmegaConf holds the result and checks types; what it cannot say well (the full key, the nearest
right one, a value that works) and what it lets pass (a bool as a number, a number out of range)
is said here.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from boltmesh.configs.advice import (
    describe_type,
    first_line,
    name_choices,
    nearest,
    nearest_key,
    show,
    working_value,
)
from boltmesh.configs.schema import SECTIONS, SHORTHAND_SECTIONS, ClassSection, Config, kind_of
from boltmesh.errors import ConfigError


def full_key(key: str) -> str:
    """``max_steps`` is ``trainer.max_steps``, and so for every key of trainer or run alone."""
    first = key.partition(".")[0]
    if first in SECTIONS:
        return key
    hints = get_type_hints(Config)
    owners = [
        section
        for section in SHORTHAND_SECTIONS
        if first in {each.name for each in fields(hints[section])}
    ]
    return f"{owners[0]}.{key}" if len(owners) == 1 else key


def all_keys(section: type[Any] = Config, parent: str = "") -> Iterator[str]:
    """Every key that the schema names, sections included, in the order of the schema."""
    hints = get_type_hints(section)
    for each in fields(section):
        key = f"{parent}.{each.name}" if parent else each.name
        yield key
        if kind_of(section, each.name) == "section":
            yield from all_keys(hints[each.name], key)


def _keys_within(mapping: Mapping[Any, Any], parent: str = "") -> Iterator[str]:
    """Every key that a config has, those of arguments among them, which no schema names."""
    for name, value in mapping.items():
        key = f"{parent}.{name}" if parent else str(name)
        yield key
        if isinstance(value, Mapping):
            yield from _keys_within(value, key)


def example_of(key: str) -> str:
    """A value that works for a full key, as the schema gives it."""
    section: type[Any] = Config
    *parents, name = key.split(".")
    for parent in parents:
        hint = get_type_hints(section).get(parent)
        if hint is None or kind_of(section, parent) != "section":
            return "..."
        section = hint
    found = {each.name: each for each in fields(section)}.get(name)
    return "..." if found is None else show(found.metadata.get("example"))


class Merge:
    """The values of one source, on their way into the config.

    Args:
        config: Changed in place.
        source: Name of the source in errors: a file, or the command line.
        folder: Where the paths in this source start; None leaves them to the working directory.
        written: Gives what the source has as the value of a full key, or None. YAML reads 010 as
            the number 8, and where a text is wanted it is 010.
    """

    def __init__(
        self,
        config: DictConfig,
        *,
        source: str,
        folder: Path | None,
        written: Callable[[str], str | None],
    ) -> None:
        self.config = config
        self.source = source
        self.folder = folder
        self._written = written

    def assign(self, key: str, value: Any) -> None:
        """Set one full key, which may end inside a free mapping or a list of classes."""
        section: type[Any] = Config
        names = key.split(".")
        for at, name in enumerate(names):
            here = ".".join(names[: at + 1])
            found = {each.name: each for each in fields(section)}.get(name)
            if found is None:
                raise self._unknown(here, section, key)
            inside = names[at + 1 :]
            kind = kind_of(section, name)
            if not inside:
                if value is None and kind in {"section", "mapping"}:
                    self._leave_out(here, get_type_hints(section)[name])
                else:
                    self._field(here, found, section, value)
                return
            if kind == "section":
                section = get_type_hints(section)[name]
            elif kind == "mapping":
                if key == "strategy.name":
                    self._strategy({"name": value})
                self._set(key, value)
                return
            elif kind == "classes":
                self._list_item(here, inside, value)
                return
            else:
                raise self._error(
                    f"unknown key '{key}'. {here} is a single value: "
                    f"{here}={working_value(found, get_type_hints(section)[name], value)}."
                )

    def _leave_out(self, key: str, hint: type[Any]) -> None:
        """Remove what the file has for a free mapping, or for a section that names a class."""
        if get_origin(hint) is dict:
            left: Any = {}
        elif getattr(hint, "class_path", "") is None:
            left = OmegaConf.structured(hint)
        else:
            raise self._no_section(key, hint, None)
        OmegaConf.update(self.config, key, left, merge=False)

    def section(self, key: str, section: type[Any], value: Any) -> None:
        """Set the keys of one section from a mapping; null, of a file, has none."""
        if value is None:
            return
        if not isinstance(value, Mapping):
            raise self._no_section(key, section, value)
        known = {each.name: each for each in fields(section)}
        # A new class drops the arguments of the old one, so the class comes first.
        for name in sorted(map(str, value), key=lambda name: name != "class_path"):
            here = f"{key}.{name}" if key else name
            if name not in known:
                raise self._unknown(here, section)
            self._field(here, known[name], section, value[name])

    def _field(self, key: str, found: Field[Any], section: type[Any], value: Any) -> None:
        hint, kind = get_type_hints(section)[found.name], kind_of(section, found.name)
        if kind == "section":
            self.section(key, hint, value)
            return
        if kind == "classes" and isinstance(value, list):
            value = self._class_list(key, value)
        if found.name == "class_path" and (value is None or isinstance(value, str)):
            value = self._class_path(key, value)
        if kind == "mapping" and value is None:
            value = {}
        if key == "strategy":
            value = self._strategy(value)
        if type(value) in (int, float) and _is_text(hint):
            value = self._written(key) or value
        complaint = _complaint(found, hint, value)
        if complaint is None:
            try:
                OmegaConf.update(self.config, key, value, merge=isinstance(value, Mapping))
            except (OmegaConfBaseException, OverflowError):
                complaint = describe_type(hint)
            else:
                if isinstance(value, str) and not (_is_text(hint) or _is_open(value)):
                    # A number in quotes is one by now, or true.
                    stored = OmegaConf.select(self.config, key)
                    is_number = isinstance(stored, bool) and value.strip("+-").isdecimal()
                    complaint = (
                        describe_type(hint) if is_number else _complaint(found, hint, stored)
                    )
        if complaint is not None:
            raise self._error(
                f"{key}={show(value)} is not {complaint}. "
                f"Write for example {key}={working_value(found, hint, value)}."
            )

    def _set(self, key: str, value: Any) -> None:
        """Set a key below a free mapping; keys that are not there yet are made."""
        parents = key.split(".")[:-1]
        for at in range(1, len(parents) + 1):
            parent = ".".join(parents[:at])
            held = OmegaConf.select(self.config, parent)
            if held is not None and not isinstance(held, (DictConfig, ListConfig)):
                raise self._error(
                    f"unknown key '{key}'. {parent} is a single value: {parent}={show(held)}."
                )
        try:
            OmegaConf.update(self.config, key, value, merge=isinstance(value, Mapping))
        except (OmegaConfBaseException, IndexError, TypeError) as error:
            raise self._error(f"{key}={show(value)} cannot be set: {first_line(error)}.") from error

    def _strategy(self, value: Any) -> Any:
        """Another strategy does not take the old one's arguments."""
        given = {"name": value} if isinstance(value, str) else value
        if isinstance(given, Mapping) and isinstance(given.get("name"), (Mapping, list)):
            raise self._error(
                f"strategy.name={show(given['name'])} is not the name of a strategy. Write for "
                f"example strategy.name=bolt_ddp."
            )
        old = _given(self.config.strategy, "name")
        if isinstance(given, Mapping) and given.get("name", "") not in {"", old}:
            self.config.strategy = {}
        return given

    def _class_path(self, key: str, class_path: str | None) -> str | None:
        section = OmegaConf.select(self.config, key.rpartition(".")[0])
        if isinstance(section, DictConfig) and not OmegaConf.is_missing(section, "class_path"):
            old = _given(section, "class_path")
            if old is not None and old != class_path:
                section.init_args = {}
        return None if class_path is None else self._anchored(class_path)

    def _anchored(self, class_path: str) -> str:
        """The class path with its file absolute, when the file lies beside the config."""
        file, colon, name = class_path.rpartition(":")
        if colon and self.folder is not None and not Path(file).is_absolute():
            beside = self.folder / file
            if beside.is_file():
                return f"{beside.resolve()}:{name}"
        return class_path

    def _class_list(self, key: str, value: list[Any]) -> list[Any]:
        known = {each.name for each in fields(ClassSection)}
        items: list[Any] = []
        for index, given in enumerate(value):
            here = f"{key}.{index}"
            item = {"class_path": given} if isinstance(given, str) else given
            if not isinstance(item, Mapping) or not isinstance(item.get("class_path"), str):
                raise self._error(
                    f"{here}={show(given)} names no class. Write for example "
                    f"{key}='[{{class_path: lightning.pytorch.callbacks.Timer}}]'."
                )
            for name in map(str, item):
                if name not in known:
                    raise self._unknown(f"{here}.{name}", ClassSection)
            init_args = item.get("init_args") or {}
            if not isinstance(init_args, Mapping):
                raise self._error(
                    f"{here}.init_args={show(init_args)} is not a mapping. "
                    f"Write for example {here}.init_args={{}}."
                )
            items.append(ClassSection(self._anchored(item["class_path"]), dict(init_args)))
        return items

    def _list_item(self, key: str, inside: list[str], value: Any) -> None:
        items = OmegaConf.select(self.config, key)
        count = len(items) if isinstance(items, ListConfig) else 0
        index, *rest = inside
        whole = ".".join((key, *inside))
        if not index.isdecimal() or int(index) >= count:
            have = f"has the items 0 to {count - 1}" if count else "is empty"
            raise self._error(
                f"unknown key '{whole}': {key} {have}. Set the whole list with "
                f"{key}='[{{class_path: package.module.Class}}]'."
            )
        if not rest:
            items[int(index)] = self._class_list(key, [value])[0]
        elif rest[0] not in {each.name for each in fields(ClassSection)}:
            raise self._unknown(".".join((key, index, rest[0])), ClassSection, whole)
        elif rest == ["class_path"] and isinstance(value, str):
            items[int(index)] = ClassSection(self._anchored(value))
        else:
            self._set(f"{key}[{index}]." + ".".join(rest), value)

    def _unknown(self, here: str, section: type[Any], whole: str | None = None) -> ConfigError:
        """``here`` is the part of the ``whole`` key up to what ``section`` does not have."""
        key = here if whole is None else whole
        parent, _, name = here.rpartition(".")
        siblings = [each.name for each in fields(section)]
        values: Any = OmegaConf.to_container(self.config, resolve=False)
        known = {*all_keys(), *_keys_within(values)}
        is_elsewhere = not parent and any(each.endswith(f".{name}") for each in known)
        sibling = None if is_elsewhere else nearest(name, siblings)
        if sibling is None:
            guess = nearest_key(key, known)
        else:
            guess = f"{parent}.{sibling}".lstrip(".")
            with_the_rest = guess + key[len(here) :]
            guess = with_the_rest if with_the_rest in known | {"strategy.name"} else guess
        if guess:
            return self._error(f"unknown key '{key}'. Did you mean '{guess}'?")
        where = f"{parent} has the keys" if parent else "The sections are"
        return self._error(f"unknown key '{key}'. {where} {name_choices(siblings, at_most=40)}.")

    def _no_section(self, key: str, section: type[Any], value: Any) -> ConfigError:
        first = fields(section)[0]
        return self._error(
            f"{key}={show(value)} is not a section. Set a key of it, "
            f"for example {key}.{first.name}={show(first.metadata.get('example'))}."
        )

    def _error(self, message: str) -> ConfigError:
        return ConfigError(f"{self.source}: {message}")


def _given(section: DictConfig, key: str) -> Any:
    """Return the value of a key; as it is written where that cannot be resolved."""
    try:
        return section.get(key)
    except OmegaConfBaseException:
        return OmegaConf.to_container(section, resolve=False)[key]  # type: ignore[index,call-overload]


def _is_text(hint: Any) -> bool:
    return str in (hint, *get_args(hint)) and not {int, float} & set(get_args(hint))


def _complaint(found: Field[Any], hint: Any, value: Any) -> str | None:
    """Return what the value should have been, where OmegaConf alone would let it pass."""
    if isinstance(value, str) and _is_open(value):
        return None
    if found.name == "devices":
        at_most = found.metadata["maximum"]
        good = _is_device_choice(value, at_most)
        return None if good else f"a number of ranks up to {at_most}, auto, or a list of devices"
    allowed = describe_type(hint)
    if isinstance(value, bool) and "true or false" not in allowed:
        return allowed
    if isinstance(value, (int, float)) and not isinstance(value, bool) and "number" not in allowed:
        is_text = str in (hint, *get_args(hint))
        return _off_form(found, value) if is_text else allowed
    if isinstance(value, (list, dict)) and get_origin(hint) not in {list, dict}:
        return None if isinstance(value, list) and "a list" in allowed else allowed
    if isinstance(value, (int, float)) and (limits := _off_limits(found, value)):
        return f"{allowed}, {limits}"
    return _off_form(found, value)


def _is_open(value: str) -> bool:
    """Whether it is to be given later, or by another key."""
    return value == "???" or "${" in value


def _off_limits(found: Field[Any], value: float) -> str | None:
    """The limits of a number that is not within them; NaN is within none."""
    limits = {"at least": found.metadata.get("minimum"), "at most": found.metadata.get("maximum")}
    low, high = limits.values()
    if (low is None or value >= low) and (high is None or value <= high):
        return None
    return " and ".join(f"{word} {limit}" for word, limit in limits.items() if limit is not None)


def _off_form(found: Field[Any], value: Any) -> str | None:
    form = found.metadata.get("form")
    if form and isinstance(value, (str, int, float)) and not re.fullmatch(form, str(value)):
        return str(found.metadata["form_in_words"])
    return None


def _is_device_choice(value: Any, at_most: int) -> bool:
    if isinstance(value, list):
        return bool(value) and all(type(at) is int and 0 <= at <= at_most for at in value)
    if isinstance(value, str):
        if re.fullmatch(r"auto|-1|[0-9]+(,[0-9]*)*", value) is None:
            return False
        return value != "0" and all(len(at) < 6 for at in value.split(","))
    return type(value) is int and (1 <= value <= at_most or value == -1)
