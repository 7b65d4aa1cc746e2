"""All pages, in the order of their digits."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from boltmesh.tui.drawing.tabs import Tab
from boltmesh.tui.pages.communication import CommunicationPage
from boltmesh.tui.pages.devices import DevicesPage
from boltmesh.tui.pages.events import EventsPage
from boltmesh.tui.pages.memory import MemoryPage
from boltmesh.tui.pages.overview import OverviewPage
from boltmesh.tui.pages.page import Page
from boltmesh.tui.pages.pipeline import PipelinePage
from boltmesh.tui.pages.ranks import RankPage, RanksPage

_ALL: tuple[Page, ...] = (
    OverviewPage(),
    RanksPage(),
    CommunicationPage(),
    PipelinePage(),
    DevicesPage(),
    MemoryPage(),
    EventsPage(),
)

PAGES: Final[Mapping[str, Page]] = MappingProxyType({page.tab.name: page for page in _ALL})
RANK: Final[Page] = RankPage()
JOBS: Final = Tab(key="0", name="jobs", title="Jobs", short="Jobs")
TABS: Final = (*(page.tab for page in _ALL), JOBS)
