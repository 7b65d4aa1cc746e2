"""Page 5: the devices and the processes of the job, as this host sees them."""

from typing import Final

from typing_extensions import override

from boltmesh.tui.layout.page import Page, Panel, Scene, Table, place, table_draw, with_trends
from boltmesh.tui.layout.region import Item, Region, stack
from boltmesh.tui.panels import devices
from boltmesh.tui.panels.devices import PROCESS_COLUMNS, draw_processes, shown_processes
from boltmesh.tui.panels.help import DEVICE_TERMS, PageHelp
from boltmesh.tui.render.tabs import Tab

DEVICES = Table(
    name="devices",
    columns=devices.COLUMNS,
    draw=devices.draw_devices,
    rows=devices.shown_devices,
    rank_of=lambda row: min(row.ranks, default=None),
    has_cursor=True,
)
PROCESSES = Table(
    name="processes",
    columns=PROCESS_COLUMNS,
    draw=draw_processes,
    rows=shown_processes,
    rank_of=lambda row: int(row.rank),
    has_cursor=True,
)


TRENDS = ("utilisation_percent", "memory_bytes", "power_watts", "temperature_celsius")


class DevicesPage(Page):
    """Devices above, processes below."""

    tab = Tab("devices", "Devices", key="5", short_title="Dev")
    help = PageHelp(
        about="devices: GPUs and processes, as the host that shows this sees them",
        terms=DEVICE_TERMS,
    )
    tables = (DEVICES, PROCESSES)
    keys = (("enter", "its rank"), ("o", "other table"))

    @override
    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """The devices, then the processes, then the run in the remaining room."""
        state, view = scene.state, scene.view
        rows = len(DEVICES.rows(state, view.table(DEVICES.name)))
        processes = len(PROCESSES.rows(state, view.table(PROCESSES.name)))
        items = (
            Item("devices", min(3, body.height), scene.title + 3 + rows, 1),
            Item("processes", scene.title + 2, scene.title + 3 + processes, 2, grows=True),
        )
        upper, trends = with_trends(scene, body, sum(item.ideal for item in items), TRENDS)
        draws = {"devices": table_draw(DEVICES, scene), "processes": table_draw(PROCESSES, scene)}
        return [*place(stack(upper, items), draws), *trends]


PAGE: Final[Page] = DevicesPage()
