"""The command palette: Textual's own, with the dashboard's commands in the dashboard's order."""

from typing import TYPE_CHECKING, cast

from textual.command import DiscoveryHit, Hit, Hits, Provider
from typing_extensions import override

from boltmesh.tui.screens.commands import Command, commands_of

if TYPE_CHECKING:
    from boltmesh.tui.app import DashboardApp


class Commands(Provider):
    """Offers what can be done on the screen below the palette."""

    @override
    async def discover(self) -> Hits:
        for command in self._commands():
            yield DiscoveryHit(command.title, command.run, help=command.help)

    @override
    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for command in self._commands():
            score = matcher.match(command.title)
            if score > 0:
                title = matcher.highlight(command.title)
                yield Hit(score, title, command.run, help=command.help)

    def _commands(self) -> list[Command]:
        return list(commands_of(cast("DashboardApp", self.app), self.screen))
