"""All pages; each is loaded when it is first turned to.

The first paint needs one of them, and a good part of the dashboard's modules are for the others.
"""

import importlib
from collections.abc import Iterator, Mapping
from typing import Final

from typing_extensions import override

from boltmesh.tui.layout.page import PAGE_TABS, Page
from boltmesh.tui.pages.ranks import RankPage


class PageRegistry(Mapping[str, Page]):
    """The pages by name, in the order of their digits; each is ``PAGE`` of its module."""

    def __init__(self) -> None:
        self._loaded: dict[str, Page] = {}

    @override
    def __getitem__(self, name: str) -> Page:
        page = self._loaded.get(name)
        if page is None:
            if name not in iter(self):
                raise KeyError(name)
            module = importlib.import_module(f"boltmesh.tui.pages.{name}")
            page = self._loaded[name] = module.PAGE
        return page

    @override
    def __iter__(self) -> Iterator[str]:
        return (tab.name for tab in PAGE_TABS)

    @override
    def __len__(self) -> int:
        return len(PAGE_TABS)


PAGES: Final = PageRegistry()
RANK: Final[Page] = RankPage()
"""One rank in full; it has no digit."""
