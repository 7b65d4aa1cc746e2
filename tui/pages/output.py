"""Page ``l``: the output of the ranks, dead ones too."""

from collections.abc import Sequence
from typing import Final

from typing_extensions import override

from boltmesh.tui.layout.page import Page, Panel, Scene, Table, table_with_trends
from boltmesh.tui.layout.region import Region
from boltmesh.tui.panels.help import PageHelp
from boltmesh.tui.panels.texts import OUTPUT_COLUMNS, draw_output, shown_output
from boltmesh.tui.render.tabs import Tab
from boltmesh.tui.state import State

OUTPUT: Final = Table(
    name="output",
    columns=OUTPUT_COLUMNS,
    draw=draw_output,
    rows=shown_output,
    rank_of=lambda row: int(row.rank),
    has_cursor=True,
)


class OutputPage(Page):
    """One table."""

    tab = Tab("output", "Output", key="l", is_listed=False)
    help = PageHelp(
        about="output: the newest lines that the ranks have printed, the newest first",
        keys=(("/", "only lines with these words; rank=3 shows those of one rank"),),
        terms=(("", "secrets are removed; what native code prints is not kept"),),
    )
    tables = (OUTPUT,)

    @override
    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """The table, and below it the trends of a step if they find room."""
        return table_with_trends(scene, body, OUTPUT, ("step_s", "tokens_per_s"))

    @override
    def empty_reason(self, state: State) -> Sequence[str]:
        if any(rank.output for rank in state.job.ranks):
            return ()
        return ("No output of this job is kept: its ranks have printed nothing since they began.",)


PAGE: Final[Page] = OutputPage()
