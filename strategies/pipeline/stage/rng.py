"""Two streams of random numbers: units' own, and one that is the same on every stage."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from boltmesh.strategies.random_state import seed_random_state, seed_torch

STAGE_STRIDE = 0x9E3779B97F4A7C15
"""Distance of the seeds of adjacent stages: 2**64 over the golden ratio, as in SplitMix64."""


class RandomStreams:
    """Seeds one run of the step on one stage; the run is within this context.

    Values that all stages compute, such as a random mask of the batch, have to be the same on all
    of them, however many numbers the units draw on the stage that runs them. Units of different
    stages, however, must not draw the same numbers.

    torch's generators are restored afterwards. Those of numpy and Python are seeded too and not
    restored: that costs more than a small chunk, so the caller of a step does it once
    (:func:`host_random_kept`).
    """

    def __init__(
        self,
        seed: int,
        stage: int,
        device: torch.device,
        *,
        is_mixed: bool,
        is_mixed_on_host: bool = False,
    ) -> None:
        """Set the seeds of the streams.

        Args:
            seed: Seed of code between units, equal on all stages, different for every microbatch.
            stage: The stage of the units that run.
            device: Device of their generator.
            is_mixed: Whether code between units draws after the first unit.
            is_mixed_on_host: Whether numpy or Python draw after the first unit begins, in or
                between units.
        """
        self.seed = seed
        self.unit_seed = (seed + (stage + 1) * STAGE_STRIDE) % 2**63
        self.device = device
        self.is_mixed = is_mixed
        self.before: list[torch.Tensor] = []
        """States of torch's generators before the run, uint8 of shape ``(N,)`` each."""
        self.unit_state: list[torch.Tensor] | None = None
        self.is_mixed_on_host = is_mixed_on_host
        self.host_state: tuple[Any, Any] | None = None
        """States of the generators of Python and numpy behind the last unit."""

    def __enter__(self) -> None:
        """Draw from the stream of code between units until ``__exit__``."""
        self.before = self._state()
        seed_random_state(self.seed, self.device)

    def __exit__(self, *_: object) -> None:
        self._set(self.before)

    @property
    def goes_on(self) -> bool:
        """Whether the next unit continues the stream of the last one without a switch."""
        return self.unit_state is not None and not (self.is_mixed or self.is_mixed_on_host)

    @contextmanager
    def around_unit(self) -> Iterator[None]:
        """Return a context that draws from the stream of units."""
        on_host = self._around_unit_on_host() if self.is_mixed_on_host else nullcontext()
        with self._around_unit(), on_host:
            yield

    @contextmanager
    def _around_unit_on_host(self) -> Iterator[None]:
        with host_random_kept():
            if self.host_state is None:
                np.random.seed(self.unit_seed % 2**32)
                random.seed(self.unit_seed)
            else:
                random.setstate(self.host_state[0])
                np.random.set_state(self.host_state[1])
            try:
                yield
            finally:
                self.host_state = random.getstate(), np.random.get_state()

    @contextmanager
    def _around_unit(self) -> Iterator[None]:
        if self.unit_state is not None and not self.is_mixed:
            yield
            return
        before = self._state() if self.is_mixed else None
        if self.unit_state is None:
            seed_torch(self.unit_seed, self.device)
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


def host_random_state() -> tuple[Any, Any]:
    """Return the states of the generators of numpy and Python, for comparison."""
    _, keys, position, *_ = np.random.get_state(legacy=True)
    return random.getstate(), (keys.tobytes(), position)  # type: ignore[union-attr]


@contextmanager
def host_random_kept() -> Iterator[None]:
    """Restore the generators of numpy and Python at the end."""
    before = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
