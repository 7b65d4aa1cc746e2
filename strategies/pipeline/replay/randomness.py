"""Two streams of random numbers: code between units draws the same ones on every stage."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

STAGE_STRIDE = 0x9E3779B97F4A7C15
"""Far apart seeds for neighbouring stages: 2**64 over the golden ratio, as SplitMix64 steps."""


class RandomStreams:
    """Seeds one run of the step on one stage.

    What all stages compute, such as a random mask of the batch, has to come out the same on all of
    them, however many numbers the units in between draw on the stage that runs them. Units of
    different stages in turn must not draw the same numbers.
    """

    def __init__(self, seed: int, stage: int, device: torch.device, *, is_mixed: bool) -> None:
        """Take what the streams start from.

        Args:
            seed: Equal on all stages, and another one for every microbatch.
            stage: Whose units run.
            device: Where they draw.
            is_mixed: Whether code between units draws after the first unit.
        """
        self.seed = seed
        self.unit_seed = (seed + (stage + 1) * STAGE_STRIDE) % 2**63
        self.device = device
        self.is_mixed = is_mixed
        self.unit_state: list[torch.Tensor] | None = None

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Draw from the stream of code between units, and put the generators back at the end."""
        before = self._state()
        torch.manual_seed(self.seed)
        try:
            yield
        finally:
            self._set(before)

    @contextmanager
    def around_unit(self) -> Iterator[None]:
        """Draw from the stream of units."""
        if self.unit_state is not None and not self.is_mixed:
            yield
            return
        before = self._state() if self.is_mixed else None
        if self.unit_state is None:
            torch.manual_seed(self.unit_seed)
        else:
            self._set(self.unit_state)
        try:
            yield
        finally:
            self.unit_state = self._state() if self.is_mixed else []
            if before is not None:
                self._set(before)

    def _state(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        if self.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.device))
        return states

    def _set(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(states[1], self.device)
