"""Measures the size and the structure of the packages from their source alone.

    python -m tests.guards.house [--list NAME ...]

Prints each figure beside its goal; ``--list`` also prints what was counted, of all figures or of
those named. Reads files and syntax trees, takes a few seconds.
"""

import ast
from argparse import ArgumentParser
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import NamedTuple

from boltmesh.axes import ALL_AXES

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "boltmesh": "boltmesh",
    "configs": "boltmesh.configs",
    "strategies": "boltmesh.strategies",
    "tui": "boltmesh.tui",
}
"""Folders at the root, and the package that each of them is."""

WRITTEN_OUT = 3
"""So many names of axes in one display are a list that ``boltmesh/axes.py`` should derive."""
MANY_ARGUMENTS = 7
DEEP = 4
"""A class has at most so many of ours in its MRO, itself included."""
SMALL_MODULE_LINES = 40


@dataclass
class Figure:
    """One measured number."""

    value: float
    goal: str = ""
    """For a reader, such as ``"<= 80"``; empty where there is none."""
    items: list[str] = field(default_factory=list)
    """What was counted."""


@dataclass(frozen=True)
class Module:
    """A source file."""

    name: str
    folder: str
    path: Path
    tree: ast.Module
    num_lines: int

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree, in the order of ``ast.walk``."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def imported(self) -> dict[str, list[tuple[str | None, str]]]:
        """By the name here, from which modules it is imported, and under which name there."""
        found = defaultdict(list)
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    found[alias.asname or alias.name].append((node.module, alias.name))
        return found


class Class(NamedTuple):
    """A class definition and the module it is in."""

    module: Module
    node: ast.ClassDef

    @property
    def qualified(self) -> str:
        return f"{self.module.name}.{self.node.name}"


def figures(sources: Iterable[Module] | None = None) -> dict[str, Figure]:
    """Measure everything; the key of a figure is its short name.

    Args:
        sources: None for the packages.
    """
    modules = {module.name: module for module in sources or source_modules()}
    classes = [
        Class(module, node)
        for module in modules.values()
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
    ]
    return {
        **_sizes("strategies", modules, files="<= 180", med=">= 180", longest="<= 520"),
        **_sizes("tui", modules, files="<= 125"),
        **_importers(modules),
        **_class_figures(modules, classes),
        **_duplicate_classes(classes),
        "axis-tuples": _listed(_axis_tuples(modules), "0"),
        "os-exits": _listed(_os_exits(modules), "1"),
        "many-arguments": _listed(_many_arguments(modules), ""),
    }


def source_modules() -> Iterator[Module]:
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT)
            if any((ROOT / parent).is_symlink() for parent in inside.parents):
                continue
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text(encoding="utf-8")
            yield Module(name, folder, path, ast.parse(text), len(text.splitlines()))


def _listed(items: Sequence[str], goal: str) -> Figure:
    return Figure(len(items), goal, sorted(items))


def _place(module: Module, node: ast.AST) -> str:
    return f"{module.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def _sizes(
    folder: str, modules: dict[str, Module], *, files: str, med: str = "", longest: str = ""
) -> dict[str, Figure]:
    found = [module for module in modules.values() if module.folder == folder]
    lines = sorted((module.num_lines, _place(module, module.tree)) for module in found)
    # The list of names in an __init__ says nothing about how long a module is.
    bodies = [module.num_lines for module in found if not module.is_package]
    most = [f"{count} {place.rpartition(':')[0]}" for count, place in lines[-20:]]
    return {
        f"{folder}-files": Figure(len(found), files),
        f"{folder}-median": Figure(median(bodies), med),
        f"{folder}-longest": Figure(lines[-1][0], longest, most),
        f"{folder}-lines": Figure(
            sum(count for count, _ in lines), "<= 40000" if folder == "strategies" else ""
        ),
    }


def _importers(modules: dict[str, Module]) -> dict[str, Figure]:
    """Modules that one other module imports at run time. Packages are no modules here."""
    importers = defaultdict(set)
    for module in modules.values():
        for name in _imports(module.tree, modules) & modules.keys() - {module.name}:
            importers[name].add(module.name)
    single = {
        name: next(iter(found))
        for name, found in importers.items()
        if len(found) == 1 and not modules[name].is_package
    }
    small = {name for name in single if modules[name].num_lines < SMALL_MODULE_LINES}

    def lines(names: Sequence[str] | set[str]) -> list[str]:
        return [f"{name} ({modules[name].num_lines}) <- {single[name]}" for name in names]

    return {
        "one-importer": _listed(lines(list(single)), "<= 80"),
        "one-importer-small": _listed(lines(small), "0"),
    }


def _imports(tree: ast.AST, modules: dict[str, Module]) -> set[str]:
    """Names of imported modules, wherever the import is; not those for type checkers only."""
    found: set[str] = set()
    if isinstance(tree, ast.Import):
        found.update(alias.name for alias in tree.names)
    elif isinstance(tree, ast.ImportFrom):
        for alias in tree.names:
            full = f"{tree.module}.{alias.name}"
            found.add(full if full in modules else str(tree.module))
    is_typing = isinstance(tree, ast.If) and ast.unparse(tree.test).endswith("TYPE_CHECKING")
    for child in tree.orelse if is_typing else ast.iter_child_nodes(tree):  # type: ignore[attr-defined]
        if not isinstance(child, ast.expr):  # which holds no statement
            found |= _imports(child, modules)
    return found


def _class_figures(modules: dict[str, Module], classes: list[Class]) -> dict[str, Figure]:
    """How deep classes inherit, and which private members cross the classes of a family."""
    by_name = {cls.qualified: cls for cls in classes}
    bases = {cls.qualified: _bases(cls, modules, by_name) for cls in classes}

    def ancestors(name: str) -> set[str]:
        return set(bases[name]).union(*map(ancestors, bases[name]))

    above = {name: ancestors(name) for name in by_name}
    deep = [f"{name} ({len(found) + 1})" for name, found in above.items() if len(found) >= DEEP]

    # A member belongs to the class that defines or sets it; others of an MRO borrow it.
    owned = {name: _own_private(cls.node) for name, cls in by_name.items()}
    family: dict[str, set[str]] = defaultdict(set)
    for name, found in above.items():
        for each in (name, *found):
            family[each] |= {name, *found}
    crossing = [
        f"{name}: {member}"
        for name, others in family.items()
        for member in _used_private(by_name[name].node) - owned[name]
        if any(member in owned[each] for each in others)
    ]
    return {
        "deep-classes": _listed(deep, "0"),
        "shared-private": _listed(crossing, "0"),
    }


def _bases(cls: Class, modules: dict[str, Module], by_name: dict[str, Class]) -> list[str]:
    """Those base classes that are ours, by qualified name, through the re-exports of packages."""
    found = []
    for base in cls.node.bases:
        written = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
        name = _resolve(cls.module, written, modules, by_name)
        if name is not None:
            found.append(name)
    return found


def _resolve(
    module: Module, written: str, modules: dict[str, Module], by_name: dict[str, Class]
) -> str | None:
    if f"{module.name}.{written}" in by_name:
        return f"{module.name}.{written}"
    for source, name in module.imported.get(written, ()):
        if source in modules:
            return _resolve(modules[source], name, modules, by_name)
    return None


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _own_private(cls: ast.ClassDef) -> set[str]:
    """Private members that a class defines, or sets on ``self``."""
    found = {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if _is_own(node.value):
                found.add(node.attr)
        elif isinstance(node, ast.Assign) and node in cls.body:
            found.update(ast.unparse(target) for target in node.targets)
        elif isinstance(node, ast.AnnAssign) and node in cls.body and node.value:
            found.add(ast.unparse(node.target))
    return set(filter(_is_private, found))


def _used_private(cls: ast.ClassDef) -> set[str]:
    return {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and _is_own(node.value)
    }


def _is_own(value: ast.expr) -> bool:
    """Whether an expression is ``self`` or ``super()``."""
    return _is_name(value, "self") or (
        isinstance(value, ast.Call) and _is_name(value.func, "super")
    )


def _is_name(value: ast.expr, name: str) -> bool:
    return isinstance(value, ast.Name) and value.id == name


def _duplicate_classes(classes: list[Class]) -> dict[str, Figure]:
    """Names of several classes; ``_Place`` and ``Place`` are one name to a reader."""
    places = defaultdict(list)
    for cls in classes:
        places[cls.node.name.lstrip("_")].append(cls)
    several = {name: found for name, found in places.items() if len(found) > 1}
    inside = {
        f"{folder}: {name}": [cls for cls in found if cls.module.folder == folder]
        for name, found in several.items()
        for folder, count in Counter(cls.module.folder for cls in found).items()
        if count > 1
    }

    def lines(groups: dict[str, list[Class]]) -> list[str]:
        return [
            f"{name} x{len(found)}: {', '.join(_place(cls.module, cls.node) for cls in found)}"
            for name, found in groups.items()
        ]

    return {
        "class-names-twice": _listed(lines(several), ""),
        "class-names-twice-inside": _listed(lines(inside), "0"),
    }


def _axis_tuples(modules: dict[str, Module]) -> list[str]:
    """Displays with the names of several axes, in whichever order."""
    return [
        _place(module, node)
        for module in modules.values()
        if module.name != "boltmesh.axes"
        for node in module.nodes
        if isinstance(node, (ast.Tuple, ast.List, ast.Set))
        and sum(getattr(each, "value", None) in ALL_AXES for each in node.elts) >= WRITTEN_OUT
    ]


def _os_exits(modules: dict[str, Module]) -> list[str]:
    return [
        _place(module, node)
        for module in modules.values()
        for node in module.nodes
        if isinstance(node, ast.Attribute) and node.attr == "_exit" and _is_name(node.value, "os")
    ]


def _many_arguments(modules: dict[str, Module]) -> list[str]:
    """Functions of strategies/ with many named arguments besides ``self``."""
    found = []
    for module in modules.values():
        if module.folder != "strategies":
            continue
        for node in module.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names = [
                    argument.arg
                    for argument in (
                        *node.args.posonlyargs,
                        *node.args.args,
                        *node.args.kwonlyargs,
                    )
                    if argument.arg not in {"self", "cls"}
                ]
                if len(names) >= MANY_ARGUMENTS:
                    found.append(f"{_place(module, node)} {node.name} ({len(names)})")
    return found


TITLES = {
    "strategies-files": "files in strategies/",
    "strategies-median": "median lines of a module there",
    "strategies-longest": "lines of the longest",
    "strategies-lines": "lines in strategies/",
    "tui-files": "files in tui/",
    "tui-median": "median lines of a module there",
    "tui-longest": "lines of the longest",
    "tui-lines": "lines in tui/",
    "one-importer": "modules imported by exactly one module",
    "one-importer-small": f"those under {SMALL_MODULE_LINES} lines",
    "deep-classes": f"classes with more than {DEEP} of ours in their MRO",
    "shared-private": "private members used by another class of an MRO",
    "class-names-twice": "class names defined twice or more, in all",
    "class-names-twice-inside": "those inside boltmesh/, strategies/ or tui/",
    "axis-tuples": "places that write out names of axes",
    "os-exits": "places that call os._exit",
    "many-arguments": f"functions in strategies/ of {MANY_ARGUMENTS} or more arguments",
}


def main() -> None:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--list", nargs="*", choices=TITLES, metavar="NAME", help=f"Of: {', '.join(TITLES)}."
    )
    chosen = parser.parse_args().list
    found = figures()
    for name, title in TITLES.items():
        print(f"{name:26} {found[name].value:>8g}  {found[name].goal:9} {title}")
    for name in TITLES if chosen == [] else chosen or ():
        print(f"\n{name}:", *found[name].items, sep="\n  ")


if __name__ == "__main__":
    main()
