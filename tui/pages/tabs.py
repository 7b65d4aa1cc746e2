"""The tabs of the pages, in the order of their digits, known before any page is loaded."""

from typing import Final

from boltmesh.tui.drawing.tabs import Tab

OVERVIEW: Final = Tab(key="1", name="overview", title="Overview", short="Over")
RANKS: Final = Tab(key="2", name="ranks", title="Ranks", short="Rank")
COMMUNICATION: Final = Tab(key="3", name="communication", title="Communication", short="Comm")
PIPELINE: Final = Tab(key="4", name="pipeline", title="Pipeline", short="Pipe")
DEVICES: Final = Tab(key="5", name="devices", title="Devices", short="Dev")
MEMORY: Final = Tab(key="6", name="memory", title="Memory", short="Mem")
EVENTS: Final = Tab(key="7", name="events", title="Events", short="Evt")
MESH: Final = Tab(key="8", name="mesh", title="Mesh", short="Mesh")
PLAN: Final = Tab(key="9", name="plan", title="Plan", short="Plan")
JOBS: Final = Tab(key="0", name="jobs", title="Jobs", short="Jobs")

PAGE_TABS: Final = (OVERVIEW, RANKS, COMMUNICATION, PIPELINE, DEVICES, MEMORY, EVENTS, MESH, PLAN)
TABS: Final = (*PAGE_TABS, JOBS)
