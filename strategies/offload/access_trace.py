"""The order in which a step asks for shards: recorded in one step, foreseen in the next."""

from collections.abc import Iterator

MAX_RECORDED = 1 << 16
"""A step with a validation epoch in it asks for ever; what comes later would be foreseen badly."""


class AccessTrace:
    """Foresees requests by what was asked in the step before, from wherever the step now stands.

    A step that takes another way is found again at the next request that the recorded one knows;
    until then too much or too little is foreseen, which costs time and nothing else.
    """

    def __init__(self) -> None:
        self._order: list[int] = []
        self._recording: list[int] = []
        self._position = 0
        self._last: int | None = None

    def begin_step(self) -> None:
        """Take what was asked since the last call as what will be asked from now on."""
        if self._recording and len(self._recording) < MAX_RECORDED:
            self._order = self._recording
        self._recording = []
        self._position = 0
        self._last = None

    def note(self, index: int) -> None:
        """Somebody asks for a shard."""
        if len(self._recording) < MAX_RECORDED:
            self._recording.append(index)
        if not self._is_at(index):
            self._find(index)
        elif self._position < len(self._order):
            self._position += 1
        self._last = index

    def upcoming(self) -> Iterator[int]:
        """The next requests, up to the end of the step, each shard once."""
        seen = set()
        for at in range(self._position, len(self._order)):
            index = self._order[at]
            if index not in seen:
                seen.add(index)
                yield index

    def _is_at(self, index: int) -> bool:
        return self._position < len(self._order) and self._order[self._position] == index

    def _find(self, index: int) -> None:
        """Go to where the last two requests follow one another, else to the first of this one.

        Forward, then backward ask for each shard in another neighbourhood, so the pair tells them
        apart; a second forward pass, of validation or of the next micro-batch, begins anew.
        """
        order, last = self._order, self._last
        pairs = (at for at in range(1, len(order)) if order[at] == index and order[at - 1] == last)
        later = next((at for at in pairs if at >= self._position), None)
        if later is not None:
            self._position = later + 1
        elif index in order:
            self._position = order.index(index) + 1
