"""All pages, found by listing the modules of ``boltmesh.tui.pages``."""

import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Final

from typing_extensions import override

from boltmesh.tui import pages
from boltmesh.tui.layout.page import Page
from boltmesh.tui.render.tabs import Tab


class PageRegistry(Mapping[str, Page]):
    """The pages by name, in the order of their tabs: by key, then those without a key by title.

    Raises:
        ValueError: Two pages have the same name or the same key.
    """

    def __init__(self, found: Iterable[Page]) -> None:
        self._pages: dict[str, Page] = {}
        self._by_key: dict[str, Page] = {}
        for page in sorted(found, key=lambda page: _order(page.tab)):
            if page.tab.name in self._pages or page.tab.key in self._by_key:
                raise ValueError(f"two pages have the name or the key of {page.tab}")
            self._pages[page.tab.name] = page
            if page.tab.key:
                self._by_key[page.tab.key] = page

    @override
    def __getitem__(self, name: str) -> Page:
        return self._pages[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._pages)

    @override
    def __len__(self) -> int:
        return len(self._pages)

    @property
    def tabs(self) -> Sequence[Tab]:
        """The tabs of the pages that are in the line of tabs."""
        return [page.tab for page in self._pages.values() if page.tab.is_listed]

    def with_key(self, key: str) -> Page | None:
        """Return the page that a key opens."""
        return self._by_key.get(key)


def find_pages(package: ModuleType) -> list[Page]:
    """Import every module of a package, and return ``PAGE`` of those that have one."""
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    modules = [
        importlib.import_module(f"{package.__name__}.{name}")
        for name in names
        if f"{package.__name__}.{name}" != __name__
    ]
    return [module.PAGE for module in modules if hasattr(module, "PAGE")]


def _order(tab: Tab) -> tuple[bool, str, str]:
    return (not tab.key, tab.key, tab.title)


PAGES: Final = PageRegistry(find_pages(pages))
