"""Page ``c``: how the run was started."""

from typing import Final

from typing_extensions import override

from boltmesh.tui.layout.page import Page, Panel, Scene, Table, table_with_trends
from boltmesh.tui.layout.region import Region
from boltmesh.tui.panels.help import PageHelp
from boltmesh.tui.panels.texts import CONFIG_COLUMNS, draw_config, shown_config
from boltmesh.tui.render.tabs import Tab

CONFIG: Final = Table(
    name="config", columns=CONFIG_COLUMNS, draw=draw_config, rows=shown_config, has_cursor=True
)


class ConfigPage(Page):
    """One table."""

    tab = Tab("config", "Config", key="c", is_listed=False)
    help = PageHelp(
        about="config: command, hyperparameters and versions of the run",
        terms=(("", "secrets are removed before they are recorded"),),
    )
    tables = (CONFIG,)

    @override
    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """The table, and below it the trends of a step if they find room."""
        return table_with_trends(scene, body, CONFIG, ("step_s", "tokens_per_s"))


PAGE: Final[Page] = ConfigPage()
