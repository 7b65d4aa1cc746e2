"""Page 5: what the devices and the processes of the job do, as this host sees them."""

from typing import Final

from boltmesh.tui.layout import page
from boltmesh.tui.layout.page import Keys, Page, Panel, Scene, Table, place, table_draw
from boltmesh.tui.layout.region import Item, Region, stack
from boltmesh.tui.panels import devices
from boltmesh.tui.panels import processes as processes_module

DEVICES = Table(
    name="devices",
    columns=devices.COLUMNS,
    draw=devices.draw_devices,
    rows=devices.shown_devices,
    rank_of=lambda row: min(row.ranks, default=None),
)
PROCESSES = Table(
    name="processes",
    columns=processes_module.COLUMNS,
    draw=processes_module.draw_processes,
    rows=processes_module.shown_processes,
    rank_of=lambda row: int(row.rank),
)


class DevicesPage:
    """Devices above, processes below."""

    tab = page.DEVICES
    tables = (DEVICES, PROCESSES)
    keys: Keys = (("enter", "its rank"), ("tab", "other table"))

    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """Both tables share what the devices do not need."""
        state, view = scene.state, scene.view
        rows = len(DEVICES.rows(state, view.table(DEVICES.name)))
        processes = len(PROCESSES.rows(state, view.table(PROCESSES.name)))
        plan = stack(
            body,
            (
                Item("devices", min(3, body.height), scene.title + 3 + rows, 1),
                Item("processes", scene.title + 2, scene.title + 2 + processes, 2, grows=True),
            ),
        )
        return place(
            plan,
            {
                "devices": table_draw(DEVICES, scene),
                "processes": table_draw(PROCESSES, scene),
            },
        )


PAGE: Final[Page] = DevicesPage()
