"""What ranks are told from outside, such as SIGTERM, told to each other at the end of each run.

It goes before what else a rank tells the others then, so that nobody is asked for it.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_SIGNALS = 2
"""Numbers that each rank tells of signals, see ``SigtermAgreement``."""

Signals = tuple[float, float]


class SharedSignals:
    """Tells the other ranks what this one was told, and keeps what it heard of them."""

    def __init__(self) -> None:
        self.told: Callable[[], Signals] = _no_signals
        """Asked at the end of each run what this rank was told from outside."""
        self._heard = _no_signals()

    def row(self) -> Tensor:
        """Return what this rank tells, ``(NUM_SIGNALS,)``."""
        return torch.tensor(self.told(), dtype=torch.float64)

    def hear(self, rows: Tensor) -> None:
        """Keep what ranks have told.

        Args:
            rows: Of all ranks, ``(num_ranks, NUM_SIGNALS)``.
        """
        told, requeue = rows.amax(0).tolist()
        self._heard = max(self._heard[0], told), max(self._heard[1], requeue)

    def take_heard(self) -> Signals:
        """Return the largest of what ranks were told from outside, by runs since the last call."""
        heard, self._heard = self._heard, _no_signals()
        return heard

    def forget(self) -> None:
        """Ask nobody any more, and let go of what was heard."""
        self.told, self._heard = _no_signals, _no_signals()


def _no_signals() -> Signals:
    return 0.0, 0.0
