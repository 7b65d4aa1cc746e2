"""``lightning.pytorch`` and ``pytorch_lightning`` as one package, while boltmesh is loaded.

They hold the same code under two names, with classes of which one Trainer knows only its own.
boltmesh imports ``lightning.pytorch``. After ``import boltmesh``, the first of the two that is
imported is loaded, and the other name refers to it: user code, libraries and boltmesh then share
the classes. So it is with ``lightning.fabric`` and ``lightning_fabric``.

Importing this module loads neither.
"""

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from typing_extensions import override

PACKAGES = ("lightning.pytorch", "pytorch_lightning")

ROOTS = frozenset({"lightning", "lightning_fabric", "pytorch_lightning"})
"""First parts of the names of modules that are Lightning's."""

_TWINS = {
    "lightning.pytorch": "pytorch_lightning",
    "lightning.fabric": "lightning_fabric",
    "pytorch_lightning": "lightning.pytorch",
    "lightning_fabric": "lightning.fabric",
}
_PAIRS = {
    "lightning.pytorch": "lightning.pytorch",
    "lightning.fabric": "lightning.pytorch",
    "pytorch_lightning": "pytorch_lightning",
    "lightning_fabric": "pytorch_lightning",
}
"""Package of ``PACKAGES`` that a root belongs to."""

OnLoad = Callable[[str], None]


def loaded_packages() -> list[str]:
    """Return which of ``PACKAGES`` are loaded; a name that refers to the other one is not."""
    return [name for name in PACKAGES if _is_loaded(name)]


def logger() -> logging.Logger:
    """Return the logger whose messages Lightning prints."""
    return logging.getLogger(next(iter(loaded_packages()), PACKAGES[0]))


def on_load(call: OnLoad) -> None:
    """Call a function with the name of each package: of those loaded now, of others when they are.

    From the first call on, the name of a package that is not loaded refers to the other one.
    """
    for name in loaded_packages():
        call(name)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(call))


def _is_loaded(name: str) -> bool:
    return name in sys.modules and sys.modules[name].__name__ == name


def _twin_of(fullname: str) -> str | None:
    """Return the loaded module that a name refers to; None if it is a module of its own."""
    root = next((each for each in _TWINS if f"{fullname}.".startswith(f"{each}.")), None)
    if root is None or _is_loaded(root) or _is_loaded(_PAIRS[root]):
        return None
    twin = _TWINS[root]
    return twin + fullname.removeprefix(root) if _is_loaded(_PAIRS[twin]) else None


class _Finder(MetaPathFinder):
    """Finds a package under its other name, and reports the first that is loaded."""

    def __init__(self, call: OnLoad) -> None:
        self._call = call
        self._is_searching = False

    @override
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        twin = _twin_of(fullname)
        if twin is not None:
            found = importlib.util.find_spec(twin)
            is_package = found is not None and found.submodule_search_locations is not None
            return (
                None
                if found is None
                else ModuleSpec(fullname, _LoadTwin(twin), is_package=is_package)
            )
        if fullname not in PACKAGES or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _ReportAfter(spec.loader, self._call)
        return spec


class _LoadTwin(Loader):
    """Gives a module under another name."""

    def __init__(self, twin: str) -> None:
        self._twin = twin

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._twin)
        self._own = module.__spec__
        return module

    @override
    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own  # the import system has set that of the other name


class _ReportAfter(Loader):
    """Runs a module as its own loader does, then reports its name."""

    def __init__(self, loader: Loader, call: OnLoad) -> None:
        self._loader = loader
        self._call = call

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    @override
    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._call(module.__name__)
